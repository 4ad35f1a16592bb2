"""Data: prompts from files."""
