"""See the package."""


def causal_conv1d_varlen_states() -> None:
    """Serve generation."""
    raise NotImplementedError
