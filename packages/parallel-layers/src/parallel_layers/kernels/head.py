"""Triton kernels of the language-model head: GEMMs that never write logits to memory.

Each GEMM kernel is persistent: one program per multiprocessor walks tiles of the logits (`Launch`), reads both operands
through tensor descriptors (Hopper and newer), and finishes each tile in registers. With the logits z of a tile and
their maximum m in a row:

- `product_statistics` reduces the tile to m, s = sum e^(z - m) and u = sum (z - m) e^(z - m), and can keep e^(z - m) in
  the inputs' dtype;
- `product_gradient` writes `dz_j = g_lp (1[j = label] - p_j) - g_H p_j (log p_j + H)` in the inputs' dtype;
- `kept_gradient` computes dz from kept exponentials without a GEMM: log p = log e^(z - m) + m - logsumexp.

Logits are `z = softcap * tanh(scale * raw / softcap) / temperature`. All arithmetic after the GEMM is fp32.
Exponentials are to base 2, which the hardware computes.

Shape suffixes: T tokens, H hidden, V vocabulary entries at hand, N tiles along the vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel_layers.kernels.head_triton import (
    kept_gradient_kernel,
    label_logits_kernel,
    merge_kernel,
    product_gradient_kernel,
    product_statistics_kernel,
)
from parallel_layers.kernels.runtime import HAS_TRITON, cdiv, num_multiprocessors, on_its_device

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_V = 256
"""Vocabulary entries in a tile of kept exponentials."""

_STEP = 64  # of the contraction
_KEPT_ROWS = 8
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_OUTSIDE = -1e30
"""The logit of entries outside the vocabulary: finite, so that its product with a probability of 0 is 0."""


class Numbers(NamedTuple):
    """The factors that turn raw products into logits, the same for all tokens."""

    scale: float
    softcap: float
    """0 for none."""
    inverse_temperature: float


class Rows(NamedTuple):
    """Inputs of the logits' gradient per token, `[T]` each; labels are int64, the others fp32."""

    labels: Tensor
    inverse_temperatures: Tensor | None
    grad_log_prob: Tensor
    grad_entropy: Tensor | None
    logsumexps: Tensor
    entropies: Tensor | None
    """None only if `grad_entropy` is None."""


def _descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@dataclass(frozen=True)
class Launch:
    """The tiling of a GEMM.

    Attributes:
        tokens: Tokens of a tile.
        entries: Vocabulary entries of a tile. 128 x 256 is the largest accumulator in registers of two warp groups.
        group: Rows of tiles walked side by side, so that programs share operands in the L2 cache.
        stages: Prefetched steps of the contraction; a GEMM that writes its tiles has shared memory for fewer.
        num_warps: Warps of one program.
        programs: Programs per multiprocessor.
    """

    tokens: int = 128
    entries: int = 256
    group: int = 8
    stages: int = 4
    num_warps: int = 8
    programs: int = 1

    def options(self, num_tokens: int, num_entries: int, device: torch.device) -> dict[str, Any]:
        """Return the keyword arguments of the kernels."""
        tiles = cdiv(num_tokens, self.tokens) * cdiv(num_entries, self.entries)
        return {
            "BT": self.tokens,
            "BV": self.entries,
            "BH": _STEP,
            "GROUP": self.group,
            "PROGRAMS": min(self.programs * num_multiprocessors(device), tiles),
            "FLATTEN": True,
            "num_stages": self.stages,
            "num_warps": self.num_warps,
        }


REDUCES, WRITES = Launch(), Launch(stages=3)
"""The launches of a GEMM that only reduces its tiles, and of a GEMM that also writes tiles."""


@on_its_device
def product_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    inverse_temperatures_T: Tensor | None,
    numbers: Numbers,
    *,
    parts_N3T: Tensor | None = None,
    exponentials_TV: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """Return fp32 statistics `[4, T]` of the logits (see `head.softmax_statistics`).

    `parts_N3T` receives m, s and u of each tile, and `exponentials_TV` receives e^(z - m), where given.
    """
    num_tokens, hidden_size = hidden_TH.shape
    num_entries = len(weight_VH)
    statistics = torch.empty(4, num_tokens, dtype=torch.float32, device=hidden_TH.device)
    keep = exponentials_TV is not None
    launch = launch or (WRITES if keep else REDUCES)
    tiles_v = cdiv(num_entries, launch.entries)
    parts = statistics.new_empty(tiles_v, 3, num_tokens) if parts_N3T is None else parts_N3T
    softcap = numbers.softcap != 0.0
    options = launch.options(num_tokens, num_entries, hidden_TH.device)
    product_statistics_kernel[(options["PROGRAMS"],)](
        _descriptor(hidden_TH, (launch.tokens, _STEP)),
        _descriptor(weight_VH, (launch.entries, _STEP)),
        None if exponentials_TV is None else _descriptor(exponentials_TV, (launch.tokens, launch.entries)),
        inverse_temperatures_T,
        parts,
        num_tokens,
        num_entries,
        hidden_size,
        *numbers,
        SOFTCAP=softcap,
        KEEP=keep,
        LOG2_E=_LOG2_E,
        LN_2=_LN_2,
        OUTSIDE=_OUTSIDE,
        **options,
    )
    merge_kernel[(cdiv(num_tokens, 32),)](parts, statistics, len(parts), num_tokens, OUTSIDE=_OUTSIDE, BT=32, BN=64)
    label_logits_kernel[(num_tokens,)](
        hidden_TH,
        weight_VH,
        labels_T,
        inverse_temperatures_T,
        statistics[3],
        num_entries,
        hidden_size,
        *numbers,
        SOFTCAP=softcap,
        BH=1024,
    )
    return statistics


@on_its_device
def product_gradient(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    gradient_TV: Tensor,
    rows: Rows,
    numbers: Numbers,
    *,
    first_entry: int,
    launch: Launch = WRITES,
) -> None:
    """Write the gradient of the raw products `[T, V]` for the rows of the head from `first_entry` on."""
    num_tokens, hidden_size = hidden_TH.shape
    num_entries = len(weight_VH)
    options = launch.options(num_tokens, num_entries, hidden_TH.device)
    product_gradient_kernel[(options["PROGRAMS"],)](
        _descriptor(hidden_TH, (launch.tokens, _STEP)),
        _descriptor(weight_VH, (launch.entries, _STEP)),
        _descriptor(gradient_TV, (launch.tokens, launch.entries)),
        *rows,
        num_tokens,
        num_entries,
        hidden_size,
        first_entry,
        *numbers,
        SOFTCAP=numbers.softcap != 0.0,
        LOG2_E=_LOG2_E,
        LN_2=_LN_2,
        **options,
    )


@on_its_device
def kept_gradient(
    exponentials_TV: Tensor,
    parts_N3T: Tensor,
    gradient_TV: Tensor,
    rows: Rows,
    numbers: Numbers,
    *,
    first_entry: int,
) -> None:
    """Write the gradient from the results that `product_statistics` kept; `first_entry` is a multiple of `BLOCK_V`."""
    num_tokens, num_entries = gradient_TV.shape
    kept_gradient_kernel[(cdiv(num_entries, BLOCK_V) * cdiv(num_tokens, _KEPT_ROWS),)](
        exponentials_TV,
        parts_N3T,
        gradient_TV,
        *rows,
        num_tokens,
        num_entries,
        exponentials_TV.stride(0),
        gradient_TV.stride(0),
        first_entry,
        *numbers,
        SOFTCAP=numbers.softcap != 0.0,
        LOG2_E=_LOG2_E,
        LN_2=_LN_2,
        BT=_KEPT_ROWS,
        BV=BLOCK_V,
        num_warps=4,
    )
