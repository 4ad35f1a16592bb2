"""Comparison of two checkpoints, element by element."""
