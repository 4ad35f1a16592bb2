"""Batches: packed sequences and micro-batches."""
