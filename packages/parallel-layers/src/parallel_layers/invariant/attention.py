"""Which attention keeps a segment's and a head's bits apart from the rest of the pack.

The flash kernels compute each block of queries of one segment and head in a program of its own, which walks the keys in
a fixed order: their forwards are so by construction. "sdpa" and "reference" pad segments to a common length and leave
them to BLAS, whose bits depend on the shapes; "exact" takes their place, on a CPU and for fp32.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel_layers.attention.backends import BACKENDS, Needs, why_not

# In the order of preference of "auto".
INVARIANT_BACKENDS = ("flash-attn-4", "flash-attn", "varlen", "exact")


def attend(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    """`packed_attention`, or what does its work under context parallelism, on an invariant backend."""
    if options["backend"] == "auto":
        size = max(q.shape[-1], v.shape[-1])
        sinks = options.get("sinks") is not None
        needs = Needs(q.device.type, q.dtype, size, options.get("softcap") is not None, sinks)
        able = [name for name in INVARIANT_BACKENDS if why_not(name, needs) is None]
        if not able:
            reasons = "; ".join(f"{name}: {why_not(name, needs)}" for name in INVARIANT_BACKENDS)
            raise ValueError(f"no invariant attention backend can do this case: {reasons}")
        options["backend"] = able[0]
    return attend(q, k, v, *rest, **options)


def check_attention_backend(name: str) -> None:
    """Raise ValueError for a backend whose results depend on the rest of the pack."""
    if name in BACKENDS and name not in INVARIANT_BACKENDS:
        raise ValueError(
            f"attention backend={name!r} depends on the rest of the pack; use 'auto' or one of "
            f"{', '.join(INVARIANT_BACKENDS)}"
        )
