"""The functions of `mamba-ssm` that Megatron-Core imports, in plain torch, for tests on a CPU."""

__version__ = "2.3.2"
