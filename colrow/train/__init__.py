"""Training a split model: gradients over ranks, steps, checkpoints at any degree, data, and the loop of `colrow train`."""
