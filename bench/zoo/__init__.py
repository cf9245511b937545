"""The zoo: every text architecture of the installed transformers, planned, split and compared with its unsplit self. `make zoo`."""
