"""The training folder, as a package so that the launcher can read its hyperparameters."""
