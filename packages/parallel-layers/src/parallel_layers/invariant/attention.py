"""Attention backends in which the bits of a segment and head do not depend on the rest of the pack.

The flash kernels are invariant: one program computes a block of queries of one segment and head, and walks the keys in
a fixed order. "sdpa" and "reference" pad segments and call BLAS, whose bits depend on the shapes; "exact" replaces them
on a CPU and for fp32.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel_layers.attention.backends import BACKENDS, why_not

# "auto" prefers earlier names.
INVARIANT_BACKENDS = ("flash-attn-4", "flash-attn", "varlen", "exact")


def attend(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Call `packed_attention` or its context-parallel form on an invariant backend."""
    if options["backend"] == "auto":
        case = q.device.type, q.dtype, max(q.shape[-1], v.shape[-1])
        needs = options.get("softcap") is not None, options.get("sinks") is not None
        reasons = {name: why_not(name, *case, *needs) for name in INVARIANT_BACKENDS}
        able = [name for name, reason in reasons.items() if reason is None]
        if not able:
            texts = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ValueError(f"no invariant attention backend can do this case: {texts}")
        options["backend"] = able[0]
    return attend(q, k, v, *rest, **options)


def check_attention_backend(name: str) -> None:
    """Raise ValueError for a backend that is not invariant."""
    if name in BACKENDS and name not in INVARIANT_BACKENDS:
        raise ValueError(
            f"attention backend={name!r} depends on the rest of the pack; use 'auto' or one of "
            f"{', '.join(INVARIANT_BACKENDS)}"
        )
