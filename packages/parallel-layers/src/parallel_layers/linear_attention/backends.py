"""The table of backends of the recurrences, and the choice of a backend for a call."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from parallel_layers.attention.backends import ANY_FLOAT, HALF
from parallel_layers.device.names import GPU
from parallel_layers.kernels.runtime import HAS_TRITON, capability, device_type

DELTA_RULE, MAMBA2 = "the gated delta rule", "Mamba-2"


@dataclass(frozen=True)
class Backend:
    """A row of the table: the requirements and abilities of a backend.

    Attributes:
        recurrences: The recurrences that the backend computes.
        needs: Required packages and hardware, as a text for messages.
        is_installed: Return True if the backend is installed; called once per process.
        device: The only supported device type; None: all.
        dtypes: Supported dtypes of queries, keys and values, or x, B and C.
        max_head_dim: Largest size of a key or value head, or of a head and its state; None: any.
        why_no_gradients: Return why the backward of a gate per head (False) or per channel (True) does not work in this
            process, or None if it does.
    """

    recurrences: frozenset[str]
    needs: str
    is_installed: Callable[[], bool]
    device: str | None = None
    dtypes: frozenset[torch.dtype] = ANY_FLOAT
    max_head_dim: int | None = None
    why_no_gradients: Callable[[bool], str | None] = lambda per_channel: None


def _has_fla() -> bool:
    """Ask for the distribution: the module `fla` is also part of older versions of flash-linear-attention."""
    try:
        return tuple(map(int, version("fla-core").split(".")[:2])) >= (0, 6) and HAS_TRITON
    except PackageNotFoundError:
        return False


def _why_no_gradients_in_fla(per_channel: bool) -> str | None:
    """fla refuses the backward for a gate per head where Triton's code for it is wrong."""
    installed = version("triton")
    triton = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    is_wrong = capability(torch.device(GPU))[0] == 9 and (3, 4) <= triton < (3, 7, 1)
    if per_channel or not is_wrong or find_spec("tilelang") is not None:
        return None
    return (
        f"its backward is wrong on Hopper with Triton 3.4 to 3.7.0, and {installed} is installed; install tilelang, or "
        "Triton 3.7.1"
    )


# "auto" prefers earlier rows.
BACKENDS: dict[str, Backend] = {
    "fla": Backend(
        frozenset({DELTA_RULE}),
        "the fla-core package, 0.6 or newer (extra parallel-layers[linear-attention]), and a CUDA build of torch",
        _has_fla,
        device=GPU,
        dtypes=HALF,
        max_head_dim=256,
        why_no_gradients=_why_no_gradients_in_fla,
    ),
    "triton": Backend(
        frozenset({MAMBA2}),
        "Triton, which CUDA builds of torch have",
        lambda: HAS_TRITON,
        device=GPU,
        dtypes=frozenset({torch.bfloat16, torch.float32}),
        max_head_dim=256,
    ),
    "chunked": Backend(frozenset({DELTA_RULE, MAMBA2}), "torch", lambda: True),
}


@cache
def _is_installed(name: str) -> bool:
    return BACKENDS[name].is_installed()


def available_backends() -> tuple[str, ...]:
    """Return the backends of the recurrences that can run in this process, in order of preference.

    "fla" computes the gated delta rule and the short convolution, "triton" Mamba-2, and "chunked" both recurrences.
    """
    return tuple(name for name in BACKENDS if _is_installed(name))


def why_not(
    name: str, device: str, dtype: torch.dtype, head_dim: int, *, per_channel: bool = False, gradients: bool = False,
    recurrence: str = DELTA_RULE, planned: bool = False,
) -> str | None:  # fmt: skip
    """Return the reason why backend `name` does not support a call, or None if it does.

    `head_dim` is the larger size of a key and a value head, `gradients` whether a backward can follow. In a `planned`
    call every backend counts as installed, with a backward.
    """
    backend = BACKENDS[name]
    if recurrence not in backend.recurrences:
        return f"it computes {', '.join(backend.recurrences)}, not {recurrence}"
    if not (planned or _is_installed(name)):
        return f"it needs {backend.needs}"
    if backend.device not in (None, device):
        return f"it runs on {backend.device}, not on {device}"
    if dtype not in backend.dtypes:
        return f"it takes {', '.join(sorted(map(str, backend.dtypes)))}, not {dtype}"
    if backend.max_head_dim is not None and head_dim > backend.max_head_dim:
        return f"its largest head size is {backend.max_head_dim}, not {head_dim}"
    return backend.why_no_gradients(per_channel) if gradients and not planned else None


def choose_backend(
    name: str, device: str, dtype: torch.dtype, head_dim: int, *, per_channel: bool = False, gradients: bool = False,
    recurrence: str = DELTA_RULE,
) -> str:  # fmt: skip
    """Return the backend of a call: `name`, or for "auto" the first row that supports the call and its backward.

    Tensors on the meta device take the backend of the device of `kernels.planned_for`.

    Raises:
        ValueError: `name` is unknown or does not support the call; the message has the reason.
    """
    planned, device = device == "meta", device_type(torch.device(device))
    return _choose(planned, name, device, dtype, head_dim, per_channel, gradients, recurrence)


# As for attention: torch.compile treats the choice as a constant.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _choose(
    planned: bool, name: str, device: str, dtype: torch.dtype, head_dim: int, per_channel: bool, gradients: bool,
    recurrence: str,
) -> str:  # fmt: skip
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend={name!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    case = {"per_channel": per_channel, "gradients": gradients, "planned": planned}
    reasons = {row: why_not(row, device, dtype, head_dim, **case, recurrence=recurrence) for row in BACKENDS}
    able = [row for row, reason in reasons.items() if reason is None]
    if reason := reasons.get(name):
        raise ValueError(f"backend={name!r} cannot do this case: {reason}; use 'auto' or one of {', '.join(able)}")
    return able[0] if name == "auto" else name
