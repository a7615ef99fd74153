"""Groups of runs, each with one ledger and one ceiling."""
