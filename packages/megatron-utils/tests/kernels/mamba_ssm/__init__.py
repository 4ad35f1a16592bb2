"""What Megatron-Core takes of `mamba-ssm`, in plain torch, for tests on a CPU."""

__version__ = "2.3.2"
