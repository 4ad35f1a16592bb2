"""What each RMSNorm backend can do, as a table; whether it is there; which one a case gets; and Transformer Engine's.

Shape legend: H normalised size; `...` any leading dims.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from parallel_layers.kernels.rms_norm import supports_rms_norm
from parallel_layers.kernels.rms_norm_triton import MAX_SIZE
from parallel_layers.kernels.runtime import HAS_TRITON


@dataclass(frozen=True)
class NormBackend:
    """A row of the table.

    Attributes:
        needs: What must be installed, in words (for messages).
        is_installed: Asked once a process.
        takes: Whether it takes these tensors: x, the weight, the residual or None.
        tensors: Which tensors that are, in words.
    """

    needs: str
    is_installed: Callable[[], bool]
    takes: Callable[[Tensor, Tensor, Tensor | None], bool]
    tensors: str


def _te_takes(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    return x.is_cuda and weight.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


# "auto" takes triton, which adds the residual in the same pass, or else torch.
BACKENDS: dict[str, NormBackend] = {
    "triton": NormBackend(
        "Triton, which torch's CUDA builds bring",
        lambda: HAS_TRITON,
        supports_rms_norm,
        f"fp32, fp16 and bf16 on CUDA, rows up to {MAX_SIZE}, a residual like x",
    ),
    "te": NormBackend(
        "the transformer-engine package (extra parallel-layers[te])",
        lambda: find_spec("transformer_engine") is not None,
        _te_takes,
        "fp32, fp16 and bf16 on CUDA",
    ),
    "torch": NormBackend("torch", lambda: True, lambda x, weight, residual: True, "all"),
}


@cache
def _is_installed(name: str) -> bool:
    return BACKENDS[name].is_installed()


def available_norm_backends() -> tuple[str, ...]:
    """The RMSNorm backends that are installed."""
    return tuple(name for name in BACKENDS if _is_installed(name))


def check_norm_backend(name: str) -> None:
    """Raise ValueError when `name` is neither "auto" nor the name of an installed backend; says what it needs."""
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    if not _is_installed(name):
        installed = ", ".join(available_norm_backends())
        raise ValueError(f"backend={name!r} needs {BACKENDS[name].needs}; use 'auto' or one of {installed}")


# To torch.compile the answer is a constant, not code to trace; see `attention.backends.choose_backend`.
check_norm_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_norm_backend(name: str, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> str:
    """The backend for these tensors: `name` itself, or for "auto" triton if it takes them, else torch.

    Raises:
        ValueError: `name` is unknown, not installed, or does not take the tensors.
    """
    if name == "auto":
        return "triton" if supports_rms_norm(x, weight, residual) else "torch"
    check_norm_backend(name)
    backend = BACKENDS[name]
    if not backend.takes(x, weight, residual):
        raise ValueError(
            f"backend={name!r} takes {backend.tensors}, not {x.dtype} {list(x.shape)} on {x.device.type}; use 'auto'"
        )
    return name


class TransformerEngineNorm:
    """`transformer_engine.pytorch.RMSNorm`, computing with a parameter that another module owns.

    Not a module, so that its owner's parameters stay the only ones.

    Args:
        hidden_size: H.
        eps: Added to the mean square.
        unit_offset: Multiply by 1 + weight; Transformer Engine's `zero_centered_gamma`.
        dtype: Of the weight.
    """

    def __init__(self, hidden_size: int, eps: float, unit_offset: bool, dtype: torch.dtype) -> None:
        from transformer_engine.pytorch import RMSNorm  # an optional extra

        # On the meta device: the weight that it makes is never used.
        self.module: nn.Module = RMSNorm(
            hidden_size, eps=eps, zero_centered_gamma=unit_offset, dtype=dtype, device="meta"
        )

    def __call__(self, x: Tensor, weight: Tensor, parameter: nn.Parameter) -> Tensor:
        """Normalise `x [..., H]`.

        Args:
            x: `[..., H]`.
            weight: `[H]`, what x is to be multiplied by and where the gradient goes: the parameter after any
                collective.
            parameter: `[H]`, the same numbers.

        Returns:
            `[..., H]` in x's dtype.
        """
        self.module.weight = parameter  # its backward reads the weight here, when functional_call has put it back
        out: Any = functional_call(
            self.module, {"weight": weight.to(x.dtype)}, (x,)
        )  # its output has the weight's dtype
        return out
