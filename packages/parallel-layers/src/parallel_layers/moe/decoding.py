"""Routed experts in a decoding step: every rank computes its experts for the tokens of all ranks.

A step has few tokens, so they travel to all ranks of the expert group at once, with their experts and weights, and come
back as a sum. Sizes are the same in every step: the host waits for no counts, and a CUDA graph can capture the step.

Shape suffixes: T tokens, k experts per token, M = T · k rows, E experts, e experts of this rank, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.kernels.few_rows import experts_of_few_rows
from parallel_layers.kernels.float8 import quantize_rows, suits_gemm
from parallel_layers.kernels.runtime import use_triton
from parallel_layers.linear.few_tokens import exchange_few
from parallel_layers.moe.experts import GroupedExperts, grouped_linear, is_one_kernel
from parallel_layers.moe.invariant import InvariantExperts


class RoundedExperts(NamedTuple):
    """Weights `[e, 2I, H]` and `[e, H, I]` whose rows are in FP8, with scales `[e, 2I]` and `[e, H]`."""

    gate_up: Tensor
    gate_up_scales: Tensor
    down: Tensor
    down_scales: Tensor

    @classmethod
    def of_layer(cls, layer: GroupedExperts) -> RoundedExperts:
        """Return copies of a layer's weights, for which `can_round` is true."""
        weights = [getattr(layer, name) for name in layer.projections]
        by_rows = [weight.transpose(1, 2).contiguous() if layer.input_major else weight for weight in weights]
        (gate_up, gate_up_scales), (down, down_scales) = map(quantize_rows, by_rows)
        return cls(gate_up, gate_up_scales, down, down_scales)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return both weights with their scales."""
        return [(self.gate_up, self.gate_up_scales), (self.down, self.down_scales)]


def decode_experts(
    layer: GroupedExperts, group: ProcessGroup | None, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor
) -> Tensor:
    """Return what `layer(x, experts, weights)` returns, without gradients.

    Args:
        layer: The experts.
        group: The ranks of the expert group that bring tokens of their own, in equal number; None: all ranks of the
            group have the same tokens, and the result is this rank's part of a sum over them.
        x_TH, experts_Tk, weights_Tk: See `GroupedExperts.forward`.

    Communication, with a group: an all-gather of the tokens, and a reduce-scatter `[T · ranks, H]` in at least fp32.
    """
    if not async_collectives.is_sharded(group):
        return local_experts(layer, x_TH, experts_Tk, weights_Tk)
    # One exchange: the bytes of a token, its experts and their weights lie in a row.
    parts = [x_TH, experts_Tk.int(), weights_Tk]
    packed = [part.contiguous().view(torch.uint8) for part in parts]
    bytes_of_tokens = torch.cat(packed, 1)
    gathered = exchange_few(bytes_of_tokens, group, "all-gather").split([part.shape[1] for part in packed], 1)
    x, experts, weights = (columns.contiguous().view(part.dtype) for columns, part in zip(gathered, parts, strict=True))
    return exchange_few(local_experts(layer, x, experts, weights), group, "reduce-scatter")


def local_experts(layer: GroupedExperts, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Return the sum over each token's experts on this rank of weight · expert(x): `[T, H]`.

    The attribute `rounded` of a layer of a decoding view has its weights in FP8 (`inference.float8_attributes`, or
    `gathered_attributes`).
    """
    num_local, top_k = len(layer.down_proj), experts_Tk.shape[1]
    first = 0 if layer.expert_group is None else layer.expert_group.rank() * num_local
    glu = layer.glu()
    if glu is not None and takes_few_rows(layer, x_TH):
        rounded: RoundedExperts | None = layer.__dict__.get("rounded")
        gate_up, gate_up_scales, down, down_scales = rounded or (layer.gate_up_proj, None, layer.down_proj, None)
        return experts_of_few_rows(
            x_TH.contiguous(), experts_Tk, weights_Tk, gate_up, down, glu, first=first,
            input_major=layer.input_major and rounded is None, gate_up_scales=gate_up_scales, down_scales=down_scales,
            gate_up_bias=layer.gate_up_proj_bias, down_bias=layer.down_proj_bias, bias_share=1 / layer.tp,
        )  # fmt: skip
    local = experts_Tk.flatten() - first
    is_here = (local >= 0) & (local < num_local)
    local = torch.where(is_here, local, num_local)
    order = local.argsort(stable=True)
    counts = (local == torch.arange(num_local, device=local.device)[:, None]).sum(1)
    # The rows of other ranks' experts come last. One kernel leaves them out; a loop over experts gets the others alone.
    rows = order[: int(counts.sum())] if waits_for_counts(layer) else order
    computed = layer.compute(x_TH[rows // top_k], weights_Tk.flatten()[rows], counts)
    of_rows = computed.new_zeros(len(local), computed.shape[1])
    of_rows[rows] = torch.where(is_here[rows][:, None], computed, 0)
    return of_rows.view(-1, top_k, computed.shape[1]).sum(1)


def takes_few_rows(layer: GroupedExperts, x_TH: Tensor) -> bool:
    """Return whether the kernels of `few_rows` compute the layer: on a GPU, where they have its form."""
    dense_dtype = getattr(layer, "dense_dtype", layer.down_proj.dtype)
    return ("rounded" in layer.__dict__ or has_kernel(layer)) and use_triton(x_TH) and x_TH.dtype == dense_dtype


def has_kernel(layer: GroupedExperts) -> bool:
    """Return whether the kernels of `few_rows` have the layer's form: plain weights, and a known activation.

    A layer with a GEMM of its own, as `with_float8` sets it, keeps it: its log-probs are those of training.
    """
    return layer.has_plain_weights() and layer.product is grouped_linear and layer.glu() is not None


def can_round(layer: GroupedExperts) -> bool:
    """Return whether the kernels of `few_rows` compute the layer with its weights in FP8."""
    return has_kernel(layer) and all(suits_gemm(getattr(layer, name)) for name in layer.projections)


def waits_for_counts(layer: GroupedExperts) -> bool:
    """Return whether the experts' GEMMs are loops for which the host reads counts from the device."""
    if isinstance(layer, InvariantExperts):
        return layer.waits_for_counts
    dtype = getattr(layer, "dense_dtype", None)
    return not all(is_one_kernel(weight, dtype) for weight in (getattr(layer, name) for name in layer.projections))
