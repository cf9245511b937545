"""Generation: cache, sampling, stopping, text. Rank 0 decides, the others execute."""
