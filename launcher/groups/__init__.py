"""Runs that belong together, under one ledger and one ceiling."""
