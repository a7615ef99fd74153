"""Fetch and load models, encode text, and sample."""
