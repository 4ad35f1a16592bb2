"""The table of attention backends, and the choice of a backend for a call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_layers.attention import blocks
from parallel_layers.attention.flash import FLASH_ATTENTION_2, FLASH_ATTENTION_4, VARLEN
from parallel_layers.attention.kernel_interface import Kernel, Scoring, Segments
from parallel_layers.attention.reference import EXACT, REFERENCE
from parallel_layers.device.gpus import gpu
from parallel_layers.device.names import GPU
from parallel_layers.kernels.runtime import HAS_TRITON, device_type

HALF = frozenset({torch.float16, torch.bfloat16})
ANY_FLOAT = HALF | {torch.float32, torch.float64}


@dataclass(frozen=True)
class Backend:
    """A row of the table: the requirements and abilities of a backend.

    Attributes:
        needs: Required packages and hardware, as a text for messages.
        is_installed: Return True if the backend is installed; called once per process.
        kernel: Raw forward and backward; None: torch's autograd differentiates the backend.
        device: The only supported device type; None: all.
        dtypes: Supported dtypes of queries, keys and values.
        max_head_dim: Largest head size.
        head_dim_multiple: Divisor of the head size.
        pairs: Further (key size, value size) that the kernel takes without padding, where the numbers of key-value
            heads and query heads are equal.
        softcap: The backend supports soft-capped scores.
        lse: The backend returns the log-sum-exp, which attention sinks need, too.
        invariant: The bits of a segment do not depend on the rest of the pack. Flash kernels walk the keys of a block
            of queries in a fixed order. "sdpa" and "reference" pad segments and call BLAS, whose bits depend on shapes.
    """

    needs: str
    is_installed: Callable[[], bool]
    kernel: Kernel | None
    device: str | None = None
    dtypes: frozenset[torch.dtype] = ANY_FLOAT
    max_head_dim: float = math.inf
    head_dim_multiple: int = 1
    pairs: frozenset[tuple[int, int]] = frozenset()
    softcap: bool = True
    lse: bool = True
    invariant: bool = False


def _has_flash_attention_4() -> bool:
    """Ask for the distribution, because flash-attn 2 ships an old copy of flash-attn-4's module."""
    try:
        return bool(version("flash-attn-4")) and find_spec("cutlass") is not None
    except PackageNotFoundError:
        return False


def _capability() -> tuple[int, int]:
    return gpu.get_device_capability() if gpu.is_available() else (0, 0)


def _fastest_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by the fastest backend that supports the call, from the output and the log-sum-exp."""
    sizes = q.shape[-1], v.shape[-1]
    name = choose_backend("auto", q.device.type, q.dtype, sizes[0], scoring.softcap is not None, True, sizes[1])
    kernel = BACKENDS[name].kernel
    assert kernel is not None
    padding = 0 if sizes in BACKENDS[name].pairs else sizes[0] - sizes[1]
    d_out, v, out = (F.pad(x, (0, padding)) for x in (d_out, v, out))
    d_q, d_k, d_v = kernel.backward(d_out, q, k, v, out, lse, segments, scoring)
    return d_q, d_k, d_v[..., : sizes[1]]


_flash = partial(Backend, device=GPU, dtypes=HALF, invariant=True)

# "auto" prefers earlier rows: the fastest is first (see benchmarks/RESULTS.md).
BACKENDS: dict[str, Backend] = {
    "flash-attn-4": _flash(
        "the flash-attn-4 package (extra parallel-layers[flash-attn-4]) and a Hopper or Blackwell GPU",
        lambda: _has_flash_attention_4() and _capability()[0] in (9, 10, 11),
        FLASH_ATTENTION_4,
        max_head_dim=128,  # larger heads are tuned for some GPUs only; use flash-attn for these
        head_dim_multiple=32,  # the backward is wrong for 72 on Hopper (4.0.0b36)
        pairs=frozenset({(192, 128)}),  # latent attention of DeepSeek-V3
    ),
    "flash-attn": _flash(
        "the flash-attn package (extra parallel-layers[flash-attn]) and an Ampere GPU or newer",
        lambda: find_spec("flash_attn_2_cuda") is not None and _capability() >= (8, 0),
        FLASH_ATTENTION_2,
        max_head_dim=256,
        head_dim_multiple=8,
    ),
    "varlen": _flash(
        "a CUDA build of torch and an Ampere GPU or newer",
        lambda: _capability() >= (8, 0),
        VARLEN,
        max_head_dim=256,
        head_dim_multiple=8,
        softcap=False,
    ),
    "sdpa": Backend("torch", lambda: True, None, softcap=False, lse=False),
    "reference": Backend("torch", lambda: True, REFERENCE),
    "exact": Backend("torch", lambda: True, EXACT, dtypes=HALF | {torch.float32}, invariant=True),
    # Slower than the flash kernels: replaces these, and the reference, where they must be invariant.
    "triton": _flash(
        "a CUDA build of torch and an Ampere GPU or newer",
        lambda: HAS_TRITON and _capability() >= (8, 0),
        Kernel(blocks.forward, _fastest_backward, VARLEN.workspace),
        max_head_dim=256,
        head_dim_multiple=8,
        pairs=frozenset({(192, 128)}),
    ),
}

INVARIANT_BACKENDS = tuple(reversed([name for name, backend in BACKENDS.items() if backend.invariant]))
"""In order of preference: the first ones also decode with the bits of training."""


@cache
def _is_installed(name: str) -> bool:
    return BACKENDS[name].is_installed()


def available_backends() -> tuple[str, ...]:
    """Return the attention backends that can run in this process, in order of preference."""
    return tuple(name for name in BACKENDS if _is_installed(name))


def why_not(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    softcap: bool,
    lse: bool,
    value_dim: int | None = None,
    *,
    planned: bool = False,
) -> str | None:
    """Return the reason why backend `name` does not support the call, or None if it does.

    `head_dim` is the size of a key, `value_dim` the size of a value (None: `head_dim`). In a `planned` call every
    backend counts as installed.
    """
    backend = BACKENDS[name]
    multiple = backend.head_dim_multiple
    value_dim = head_dim if value_dim is None else value_dim
    size = 0 if (head_dim, value_dim) in backend.pairs else max(head_dim, value_dim)
    reasons = [
        (not (planned or _is_installed(name)), f"it needs {backend.needs}"),
        (backend.device not in (None, device), f"it runs on {backend.device}, not on {device}"),
        (dtype not in backend.dtypes, f"it takes {', '.join(sorted(map(str, backend.dtypes)))}, not {dtype}"),
        (size > backend.max_head_dim, f"its largest head size is {backend.max_head_dim}, not {size}"),
        (size % multiple, f"its head sizes are multiples of {multiple}, not {size}"),
        (softcap and not backend.softcap, "it has no soft-cap"),
        (lse and not backend.lse, "it has no log-sum-exp (which attention sinks need, too)"),
    ]
    return next((reason for applies, reason in reasons if applies), None)


def choose_backend(
    name: str, device: str, dtype: torch.dtype, head_dim: int, softcap: bool, lse: bool, value_dim: int | None = None
) -> str:
    """Return the backend of a call: `name`, or the first row that supports the call ("invariant": of invariant rows).

    Raises:
        ValueError: `name` is unknown or does not support the call, or no backend does; the message has the reasons.
    """
    planned = device == "meta"
    return _choose(planned, name, device_type(torch.device(device)), dtype, head_dim, softcap, lse, value_dim)


# The mark that torch.compiler.assume_constant_result sets: torch.compile treats the choice as a constant. The decorator
# imports the compiler, which doubles the import time of this package.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _choose(planned: bool, name: str, device: str, *needs: Any) -> str:
    if name not in ("auto", "invariant", *BACKENDS):
        raise ValueError(f"backend={name!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    candidates = INVARIANT_BACKENDS if name == "invariant" else tuple(BACKENDS)
    reasons = {candidate: why_not(candidate, device, *needs, planned=planned) for candidate in candidates}
    able = [candidate for candidate, reason in reasons.items() if reason is None]
    if not able:
        kind = "invariant backend" if name == "invariant" else "backend"
        raise ValueError(
            f"no {kind} can do this case: {'; '.join(f'{option}: {why}' for option, why in reasons.items())}"
        )
    if reason := reasons.get(name):
        raise ValueError(f"backend={name!r} cannot do this case: {reason}; use 'auto' or one of {', '.join(able)}")
    if name == "auto" and device == "cpu":
        return "reference"  # exact, as fast as sdpa there, and needs less memory
    return name if name in BACKENDS else able[0]
