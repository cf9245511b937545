"""Shapes, no weights, no process groups: how a model is split, derived from its own ops."""
