"""The whole model and the split one, side by side."""
