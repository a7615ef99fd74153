"""Read texts from files, encode them as tokens, and upload them to a store."""

LEARN_BPE = "bpe"  # as a tokenizer: a byte-level BPE is learned from the text
