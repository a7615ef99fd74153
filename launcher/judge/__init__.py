"""Measure what a model is worth on a text, from its logits, by code that it cannot change."""
