"""Data: prompts from files, saved datasets and Python."""
