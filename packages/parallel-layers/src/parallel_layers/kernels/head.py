"""Triton kernels of the language-model head: matrix products whose epilogue never writes a logit.

Each product kernel is persistent: as many programs as there are multiprocessors walk the tiles (`Launch`) of the
logits, read both operands through tensor descriptors (the copy engine of Hopper and later), and finish a tile while
it is in registers. With z the logits of a tile and m their maximum in a row:

- `product_statistics` reduces the tile to m, s = sum e^(z - m) and u = sum (z - m) e^(z - m), and may keep e^(z - m) in
  the inputs' dtype;
- `product_gradient` writes `dz_j = g_lp (1[j = label] - p_j) - g_H p_j (log p_j + H)` in the inputs' dtype;
- `kept_gradient` makes the same dz from kept exponentials instead of a product: log p = log e^(z - m) + m - logsumexp.

Logits are `z = softcap * tanh(scale * raw / softcap) / temperature`. All arithmetic after the product is fp32, and
exponentials are taken to base 2, which is what the hardware computes.

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
"""Vocabulary entries of a tile whose exponentials are kept."""

_STEP = 64  # of the contraction
_KEPT_ROWS = 8
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_OUTSIDE = -1e30
"""A logit outside the vocabulary: finite, so that it can be multiplied by its probability of zero."""


class Numbers(NamedTuple):
    """What turns products into logits, beside the temperatures of single tokens."""

    scale: float
    softcap: float
    """0 for none."""
    inverse_temperature: float


class Rows(NamedTuple):
    """What the gradient of the logits needs of each token: `[T]`, fp32 but for the labels."""

    labels: Tensor
    inverse_temperatures: Tensor | None
    grad_log_prob: Tensor
    grad_entropy: Tensor | None
    logsumexps: Tensor
    entropies: Tensor | None
    """None only where `grad_entropy` is."""


def _descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@dataclass(frozen=True)
class Launch:
    """How a product is cut up.

    Attributes:
        tokens: Of a tile of the logits.
        entries: Of a tile: with 128 tokens 256 are the largest accumulator that two warp groups hold in registers.
        group: Rows of tiles that are walked side by side, so that programs share operands in the L2 cache.
        stages: Steps of the contraction on their way to shared memory; a product that writes its tile has less of it.
        num_warps: Warps of one program.
        programs: Programs for each multiprocessor; one finishes its tile while another one multiplies.
    """

    tokens: int = 128
    entries: int = 256
    group: int = 8
    stages: int = 4
    num_warps: int = 8
    programs: int = 1

    def options(self, num_tokens: int, num_entries: int, device: torch.device) -> dict[str, Any]:
        """What the kernels are launched with."""
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
"""The launches of a product that reduces its tiles, and of one that also writes them."""


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
    """Statistics `[4, T]` of the logits, fp32 (see `losses.softmax`).

    If given, `parts_N3T` is filled with m, s and u of each tile, and `exponentials_TV` with e^(z - m) of that m.
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
    """Write the gradient of the raw products of these rows of the head, which begin at entry `first_entry`."""
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
    """As `product_gradient`, from what `product_statistics` kept; `first_entry` is a multiple of `BLOCK_V`."""
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
