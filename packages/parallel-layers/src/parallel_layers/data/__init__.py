"""Batches: packed sequences, micro-batches, and a batch sent from one rank to its group."""
