"""Read texts from files, encode them as tokens, and upload them to a store."""
