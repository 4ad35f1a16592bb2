"""The same bits at every run of a program on the same grid."""

import os

import torch


def be_deterministic() -> None:
    """Make this process compute in fixed orders alone, from now on.

    torch then takes deterministic algorithms, and raises for an operation that has none; flash attention takes its
    deterministic backward; cuBLAS has one workspace, which it must know before it is first used (an environment that
    says `CUBLAS_WORKSPACE_CONFIG` already is left as it is). No kernel of parallel-layers adds by atomics, and a
    collective's order of summation is fixed by the grid.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only reveals reads of uninitialized memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
