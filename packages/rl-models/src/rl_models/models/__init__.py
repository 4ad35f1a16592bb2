"""Native models: configs, decoders, and language models with heads."""
