"""Tensors on their way: loaded, saved, resharded and streamed between ranks and files."""
