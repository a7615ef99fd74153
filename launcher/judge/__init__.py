"""What a model is worth on a text: measured from its logits, by code that it cannot change."""
