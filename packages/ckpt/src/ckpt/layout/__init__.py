"""Layouts: the rectangles of Hugging Face tensors that every rank of a grid holds."""
