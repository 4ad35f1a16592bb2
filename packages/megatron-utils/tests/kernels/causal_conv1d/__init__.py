"""The functions of `causal-conv1d` that Megatron-Core imports for generation, which no test here runs."""

__version__ = "1.7.0"


def causal_conv1d_fn() -> None:
    """Serve generation."""
    raise NotImplementedError
