"""What Megatron-Core imports of `causal-conv1d`, which training with `mamba-ssm` takes itself; for tests on a CPU."""

__version__ = "1.7.0"


def causal_conv1d_fn() -> None:
    """Serve generation."""
    raise NotImplementedError
