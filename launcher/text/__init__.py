"""Texts and tokens, from files to a store."""
