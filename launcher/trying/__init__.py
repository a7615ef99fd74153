"""A search for a better training folder, under rules that the folder cannot bend."""
