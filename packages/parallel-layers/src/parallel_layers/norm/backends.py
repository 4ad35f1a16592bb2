"""The table of RMSNorm backends, the choice of a backend for a call, and the backend of Transformer Engine.

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
        needs: Required packages, in words (for messages).
        is_installed: Return True if the backend is installed; called once per process.
        takes: Return True if the backend supports these tensors: x, the weight, the residual or None.
        tensors: The supported tensors, in words.
    """

    needs: str
    is_installed: Callable[[], bool]
    takes: Callable[[Tensor, Tensor, Tensor | None], bool]
    tensors: str


def _te_takes(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    return x.is_cuda and weight.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


# "auto" takes triton, which adds the residual in the same pass, else torch.
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
    """Return the installed RMSNorm backends."""
    return tuple(name for name in BACKENDS if _is_installed(name))


def check_norm_backend(name: str) -> None:
    """Raise ValueError unless `name` is "auto" or an installed backend."""
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; use 'auto' or one of {', '.join(BACKENDS)}")
    if not _is_installed(name):
        installed = ", ".join(available_norm_backends())
        raise ValueError(f"backend={name!r} needs {BACKENDS[name].needs}; use 'auto' or one of {installed}")


# torch.compile treats the choice as a constant; see `attention.backends.choose_backend`.
check_norm_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_norm_backend(name: str, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> str:
    """Return the backend for these tensors: `name`, or for "auto" triton if it supports them, else torch.

    Raises:
        ValueError: `name` is unknown, not installed, or does not support the tensors.
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
    """`transformer_engine.pytorch.RMSNorm` with a parameter that another module owns.

    This class is not a module, so it registers no parameter of its own.

    Args:
        hidden_size: H.
        eps: Added to the mean square.
        unit_offset: Multiply by 1 + weight; Transformer Engine's `zero_centered_gamma`.
        dtype: dtype of the weight.
    """

    def __init__(self, hidden_size: int, eps: float, unit_offset: bool, dtype: torch.dtype) -> None:
        from transformer_engine.pytorch import RMSNorm  # an optional extra

        # On the meta device, because its own weight is never used.
        self.module: nn.Module = RMSNorm(
            hidden_size, eps=eps, zero_centered_gamma=unit_offset, dtype=dtype, device="meta"
        )

    def __call__(self, x: Tensor, weight: Tensor, parameter: nn.Parameter) -> Tensor:
        """Normalise `x [..., H]`.

        Args:
            x: `[..., H]`.
            weight: `[H]`, the parameter after any collective; receives the gradient.
            parameter: `[H]`, the parameter itself, with the same values.

        Returns:
            `[..., H]` in x's dtype.
        """
        self.module.weight = parameter  # the backward reads this attribute after functional_call has restored it
        out: Any = functional_call(
            self.module, {"weight": weight.to(x.dtype)}, (x,)
        )  # the output has the weight's dtype
        return out
