"""Equal bits at every run of a program on the same grid."""

import os

import torch


def be_deterministic() -> None:
    """Make this process compute sums in fixed orders from now on.

    torch takes deterministic algorithms, and raises for an operation without one; flash attention takes its
    deterministic backward. cuBLAS gets one workspace, unless the environment has `CUBLAS_WORKSPACE_CONFIG`; call this
    before the first use of cuBLAS. Kernels of parallel-layers use no atomics, and the grid fixes the order of sums in
    collectives.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only reveals reads of uninitialized memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
