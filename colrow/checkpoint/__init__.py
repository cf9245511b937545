"""Files, no ranks: finding a model, reading ranges of its tensors."""
