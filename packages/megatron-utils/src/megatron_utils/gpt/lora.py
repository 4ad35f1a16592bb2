"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) on Megatron-Core's linears, with a frozen base.

The adapters equal `parallel_layers.model.lora`'s: the same parameters, initial weights and dropout. A linear
computes its own output, and a hook adds the low-rank term. Beside the base, activations of `[T, n r]` go between the
ranks:

    layer    A                    B                  sequence parallel                     else
    column   whole                the weight's rows  all-gather of x A^T, reduce-scatter   all-reduce of its gradient
                                                     of its gradient, all-reduce of dA
    row      the weight's columns whole              reduce-scatter of x A^T, all-gather   all-reduce of x A^T
                                                     of its gradient, all-reduce of dB

Shape suffixes: T tokens, I input and O output features, r the rank, n adapted parts of a fused weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_utils.random_streams import tracker
from parallel_layers.distributed import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from parallel_layers.linear import LowRank, enabled
from parallel_layers.model import LoraOptions
from parallel_layers.module import set_sharding, shard_evenly


class Part(NamedTuple):
    """A part of a fused weight: the name of its adapter (empty: none), and its ranges of this rank's rows."""

    name: str
    rows: Sequence[tuple[int, int]]


def add_lora_(chunk: nn.Module, options: LoraOptions, parts: Mapping[str, Sequence[Part]]) -> None:
    """Freeze all parameters of a chunk, and give linears trainable adapters, in place.

    Call this before `wrap_data_parallel`, so that the base has no gradient buffers. The adapter of X.weight has the
    parameters X.lora.A `[n r, I]` and X.lora.B `[rows, r]`, with the parts one after another. The initial weights
    depend on the seed and the names of the adapters, not on the grid.
    `parallel_layers.model.lora.without_adapters` computes with the base alone.

    Args:
        chunk: A chunk of `build_gpt` of the "local" layer spec.
        options: See `LoraOptions`; `parts` replaces its targets.
        parts: The parts of each adapted weight, by name: every row of this rank is in one part, and every rank of the
            tensor-parallel group has the same parts, some perhaps without rows.

    Raises:
        ValueError: A weight does not belong to a linear of the local spec, or belongs to an expert.
    """
    chunk.requires_grad_(False)
    for name, projections in parts.items():
        linear = chunk.get_submodule(name.removesuffix(".weight"))
        if not isinstance(linear, ColumnParallelLinear | RowParallelLinear) or linear.is_expert:
            raise ValueError(
                f"{name} is of a {type(linear).__name__}; Megatron-Core's ColumnParallelLinear and RowParallelLinear "
                "take adapters, outside of experts: use layer_spec='local', or other targets"
            )
        _add(linear, options, projections)


@contextmanager
def same_draws() -> Iterator[None]:
    """Let all tensor-parallel ranks draw the same dropout inside the block, from torch's CPU generator.

    Under sequence parallelism Megatron-Core runs layers in a random stream of each rank, which only its own dropout
    needs; the models of `build_gpt` have none.
    """
    streams = tracker()
    streams.fork = lambda *_: nullcontext()
    try:
        yield
    finally:
        del streams.fork


def _add(linear: Any, options: LoraOptions, projections: Sequence[Part]) -> None:
    """Give a linear its adapter."""
    weight, group, names = (
        linear.weight,
        linear.tp_group,
        [projection.name for projection in projections if projection.name],
    )
    group = group if group.size() > 1 else None
    counts = [sum(stop - start for start, stop in projection.rows) for projection in projections]
    adapted = sum(count for count, projection in zip(counts, projections, strict=True) if projection.name)
    lora = LowRank(
        [options.rank * len(names), weight.shape[1]],
        [adapted, options.rank],
        rank=options.rank,
        scaling=options.scaling,
        parts=[(count, projection.name) for count, projection in zip(counts, projections, strict=True)],
        fan_in=linear.input_size,
        seed=options.seed,
        dropout=options.dropout,
        dtype=weight.dtype,
        device=weight.device,
    )
    row = isinstance(linear, RowParallelLinear)
    if row:
        set_sharding(lora, "A", shard_evenly([linear.input_size], group, 1, "in_features"))
    # Megatron's gradient norm counts a parameter without this mark on the first tensor-parallel rank only.
    set_tensor_model_parallel_attributes(lora.A if row else lora.B, True, int(row), 1)
    lora.reset_parameters()
    lora.eval()  # dropout is for updates alone
    linear.add_module("lora", lora)
    ranges = [torch.arange(*row_range) for projection in projections for row_range in projection.rows]
    places = torch.cat(ranges).argsort().to(weight.device)
    order = None if torch.equal(places, torch.arange(len(places), device=places.device)) else places
    linear.register_forward_hook(partial(_add_term, order=order))


def _add_term(linear: Any, inputs: tuple[Tensor, ...], output: Any, *, order: Tensor | None) -> Any:
    """Add the adapter's term to the output of a linear, `[T, 1, O/tp]` or `[T, 1, O]`.

    `order` has the place of each output feature among the rows of the parts, where they differ.
    """
    lora = enabled(linear.lora)
    if lora is None:
        return output
    x, group = inputs[0], linear.tp_group if linear.tp_group.size() > 1 else None
    over_tokens = group if linear.sequence_parallel else None
    row = isinstance(linear, RowParallelLinear)
    factors = lora.factors(
        down_group=None if row else over_tokens,
        up_group=over_tokens if row else None,
        dropout_over=(group, -1) if row else (over_tokens, 0),
    )
    inside = F.linear(x if factors.dropout is None else factors.dropout(x), factors.down)
    if row:
        send = reduce_from_tensor_parallel if over_tokens is None else reduce_scatter_to_sequence_parallel
    else:
        send = copy_to_tensor_parallel if over_tokens is None else gather_from_sequence_parallel
    term = F.linear(send(inside, group), factors.up if order is None else factors.up[order])
    return output[0] + term, *output[1:]
