"""The engine on patched Hugging Face models."""
