"""From a Request to running jobs."""
