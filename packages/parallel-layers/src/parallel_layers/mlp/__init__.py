"""The feed-forward layer and its activation functions."""
