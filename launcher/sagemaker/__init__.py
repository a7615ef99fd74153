"""Jobs on SageMaker, what they cost, and the stack of the account."""
