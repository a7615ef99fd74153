"""The training script, as a package so that the launcher can read its hyperparameters."""
