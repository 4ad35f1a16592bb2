"""Linear layers divided over a tensor-parallel group: modules that own the parameters of the `operators`.

Shape suffixes: T tokens, I input features, O output features, of which this rank has `I/tp` or `O/tp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.linear.block_scaled import BlockScaled, dense_weight
from parallel_layers.linear.execution import DEFAULT, UNDIVIDED, Execution, Placement
from parallel_layers.linear.low_rank import LowRank, enabled
from parallel_layers.linear.operators import check_reduce_gradient, column_parallel_linear, row_parallel_linear
from parallel_layers.module.initialization import as_linear, fill_parameter_
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.seeds import shared_seed
from parallel_layers.module.sharding import (
    Sharding,
    divide,
    divide_heads,
    set_sharding,
    shard_evenly,
    shard_heads,
    shared_range,
)


class LinearOptions(TypedDict, total=False):
    """Keyword options of every linear layer.

    Attributes:
        bias: The layer has a bias (default: False).
        placement: Where the parts of the layer and of its tokens are (default: whole).
        execution: How the layer computes and communicates (default: `Execution()`).
        dtype: dtype of the parameters.
        device: Device of the parameters.
    """

    bias: bool
    placement: Placement
    execution: Execution
    dtype: torch.dtype | None
    device: torch.device | str | None


class LinearLayer(ParallelModule):
    """The parameters and the options that all linear layers share; `sharding` divides the weight's rows or columns.

    `lora` is an adapter (`parallel_layers.model.lora`), and `weight_scale_inv` are the scales of a frozen weight in FP8
    (`parallel_layers.linear.block_scaled`). `full_sizes` and `local_sizes` are the rows of the parts of a fused
    weight, in the whole layer and on this rank. `keeps_dtype` keeps the GEMM out of FP8.
    """

    keeps_dtype = False
    bias: nn.Parameter | None
    weight_scale_inv: nn.Parameter | None
    lora: LowRank | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sharding: Sharding | None = None,
        *,
        bias: bool = False,
        placement: Placement = UNDIVIDED,
        execution: Execution = DEFAULT,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.placement, self.execution = placement, execution
        self.register_module("lora", None)
        shape = [out_features, in_features]
        if sharding is not None:
            shape[sharding.dim] = sum(block.stop - block.start for block in sharding.blocks)
            set_sharding(self, "weight", sharding)
            set_sharding(self, "bias", sharding if sharding.dim == 0 else None)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.register_parameter("weight_scale_inv", None)
        bias_O = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", bias_O)
        self.full_sizes, self.local_sizes = [out_features], [shape[0]]
        self.reset_parameters()

    @property
    def group(self) -> ProcessGroup | None:
        """The tensor-parallel group."""
        return self.placement.group

    @property
    def execution_of_weight(self) -> Execution:
        """The execution, with the GEMM that a frozen weight in FP8 needs."""
        scales = self.weight_scale_inv
        return self.execution if scales is None else replace(self.execution, product=BlockScaled(scales))

    def reset_parameters(self) -> None:
        """Draw the weight from U(-1/sqrt(in_features), 1/sqrt(in_features)) and set the bias to 0.

        Ranks with equal seeds of torch's CPU generator hold parts of the same weight, at every group size.
        """
        fill_parameter_(self, "weight", shared_seed(), as_linear(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"tp={self.placement.tp}, sequence_parallel={self.placement.sequence_parallel}"
        )


class ReplicatedLinear(LinearLayer):
    """`y = x W^T + b`, whole on every rank: weight `[O, I]`, bias `[O]`.

    Under sequence parallelism each rank has its own rows of x, and the backward all-reduces the parameters' gradients;
    without it every rank computes the same, and nothing is sent.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[T', I]` -> `[T', O]`."""
        group, factors = self.group if self.placement.sequence_parallel else None, None
        weight = copy_to_tensor_parallel(self.weight, group) if self.weight.requires_grad else self.weight
        bias = None if self.bias is None else copy_to_tensor_parallel(self.bias, group)
        if (lora := enabled(self.lora)) is not None:
            factors = lora.factors(down_group=group, up_group=group, dropout_over=(group, 0))
        return column_parallel_linear(x, weight, bias, execution=self.execution_of_weight, factors=factors)


class ColumnLinear(LinearLayer):
    """The layers whose weight's rows are divided; the attributes are arguments of `column_parallel_linear`."""

    shared_rows: tuple[int, int, int] | None = None
    reduce_gradient = True

    def forward(self, x: Tensor) -> Tensor:
        """`[T, ..., I]` (sequence parallel: `[T/tp, ..., I]`) -> `[T, ..., O/tp]`."""
        return column_parallel_linear(
            x, self.weight, self.bias, placement=self.placement, execution=self.execution_of_weight,
            reduce_gradient=self.reduce_gradient, shared_rows=self.shared_rows,
            factors=None if (lora := enabled(self.lora)) is None else lora.factors(down_group=self.group),
        )  # fmt: skip

    def effective_weight(self) -> Tensor:
        """Return the weight with the adapter merged, `[O/tp, I]`; gradients flow to neither."""
        weight = dense_weight(self, "weight")
        return weight if (lora := enabled(self.lora)) is None else weight + lora.delta().detach()


class ColumnParallelLinear(ColumnLinear):
    """`y = x W^T + b` with the rows of W divided over the group: weight `[O/tp, I]`, bias `[O/tp]`.

    Communication and `reduce_gradient` as in `column_parallel_linear`; `collectives.gather_from_tensor_parallel` gives
    all O columns.

    Raises:
        ValueError: The group's size does not divide O; or options that exclude each other.
    """

    def __init__(
        self, in_features: int, out_features: int, *, reduce_gradient: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        placement = options.get("placement", UNDIVIDED)
        check_reduce_gradient(reduce_gradient, placement)
        sharding = shard_evenly([out_features], placement.group, 0, "out_features")
        super().__init__(in_features, out_features, sharding, **options)
        self.reduce_gradient = reduce_gradient


class MergedColumnParallelLinear(ColumnLinear):
    """Several column-parallel layers of one input in one GEMM: `y = [x W_1^T, x W_2^T, ...]`.

    Each part of `out_features` is divided over the group on its own. A rank's weight is its rows of part 1, then of
    part 2, ...: `[sum(O_i)/tp, I]`; its output splits into the parts by `y.split(layer.local_sizes, dim=-1)`.

    Raises:
        ValueError: The group's size does not divide one of the parts.
    """

    def __init__(self, in_features: int, out_features: Sequence[int], **options: Unpack[LinearOptions]) -> None:
        group = options.get("placement", UNDIVIDED).group
        sharding = shard_evenly(out_features, group, 0, "out_features")
        super().__init__(in_features, sum(out_features), sharding, **options)
        self.full_sizes = list(out_features)
        self.local_sizes = [size // self.placement.tp for size in out_features]


class HeadsParallelLinear(ColumnLinear):
    """Several column-parallel layers of one input in one GEMM, each divided by its heads.

    With more ranks than heads of a part each head lives on `tp / heads` consecutive ranks (rank r has head
    `r * heads // tp`), and the backward sums the gradients of its copies, in fp32. A rank's weight is its rows of part
    1, then of part 2, ...; its output splits into the parts by `y.split(layer.local_sizes, dim=-1)`.

    Args:
        in_features: I.
        parts: The heads and the head size of each part, see `shared_range`.
        **options: See `LinearOptions`.
    """

    def __init__(self, in_features: int, parts: Sequence[tuple[int, int]], **options: Unpack[LinearOptions]) -> None:
        placement = options.get("placement", UNDIVIDED)
        full_sizes = [heads * size for heads, size in parts]
        super().__init__(in_features, sum(full_sizes), shard_heads(parts, placement.group, 0), **options)
        self.full_sizes = full_sizes
        self.local_sizes = [max(heads // placement.tp, 1) * size for heads, size in parts]
        self.shared_rows = shared_range(parts, placement.tp)


class QKVParallelLinear(HeadsParallelLinear):
    """The query, key and value projections of an attention block, divided by heads.

    KV heads fewer than ranks are copied as in `HeadsParallelLinear`. A rank's weight is `[(q + 2 kv) * head_dim, H]` in
    the order q, k, v. `num_heads_local` and `num_kv_heads_local` are this rank's heads. `parts` is 3, or 2 without
    values, or 1 for queries alone. With `gated` the part of queries has `2 * head_dim` rows for each head: its query,
    then its gate.

    Raises:
        ValueError: The group's size does not divide the query heads, or neither divides the KV heads nor is divided by
            them; or KV heads do not divide the query heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        parts: int = 3,
        gated: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        tp = options.get("placement", UNDIVIDED).tp
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
        heads = divide(num_heads, tp, "num_attention_heads")
        kv_heads = divide_heads(num_kv_heads, num_heads, tp, "num_key_value_heads")
        queries, keys = (num_heads, head_dim * (1 + gated)), (num_kv_heads, head_dim)
        super().__init__(hidden_size, [queries, keys, keys][:parts], **options)
        self.num_heads_local, self.num_kv_heads_local = heads, kv_heads


class RowParallelLinear(LinearLayer):
    """`y = x W^T + b` with the columns of W divided over the group: weight `[O, I/tp]`, bias `[O]` on every rank.

    Communication as in `row_parallel_linear`; `collectives.scatter_to_tensor_parallel` gives this rank's part of an x
    that is whole.

    Raises:
        ValueError: The group's size does not divide I.
    """

    def __init__(self, in_features: int, out_features: int, **options: Unpack[LinearOptions]) -> None:
        group = options.get("placement", UNDIVIDED).group
        super().__init__(in_features, out_features, shard_evenly([in_features], group, 1, "in_features"), **options)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, ..., I/tp]` -> `[T, ..., O]` (sequence parallel: `[T/tp, ..., O]`)."""
        factors = None
        if (lora := enabled(self.lora)) is not None:
            factors = lora.factors(up_group=self.group, dropout_over=(self.group, -1))
        return row_parallel_linear(
            x, self.weight, self.bias, placement=self.placement, execution=self.execution_of_weight, factors=factors
        )
