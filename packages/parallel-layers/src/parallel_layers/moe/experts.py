"""Routed experts as stacked weights and grouped GEMMs: each run of rows times the weight of its expert.

Shape suffixes: T tokens, k experts per token, M rows at this rank's experts (in order of expert), K input and N output
features of a GEMM, H hidden, I intermediate size of an expert, E experts, e = E / ep experts of this rank; ep and tp
are the sizes of the expert and tensor-parallel groups.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.device.names import GPU
from parallel_layers.kernels.gated_experts import GLU, weighted_glu
from parallel_layers.kernels.runtime import device_type, use_triton
from parallel_layers.linear.block_scaled import SCALES, GroupedBlockScaled
from parallel_layers.linear.low_rank import LowRank, enabled
from parallel_layers.mlp.activations import ClampedSwiGLU
from parallel_layers.mlp.layer import ACTIVATIONS, GatedActivation, activation_function, gated
from parallel_layers.module.autocast import as_operand
from parallel_layers.module.initialization import as_linear, fill_parameter_
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.seeds import shared_seed
from parallel_layers.module.sharding import divide, set_sharding, shard_evenly
from parallel_layers.moe.dispatch import Dispatch, Move
from parallel_layers.moe.grouped_gemm import grouped_gemm, is_faster

GroupedProduct = Callable[..., Tensor]
"""A function with the arguments of `grouped_linear`; other functions also take `before` and `after` (`moe.float8`)."""


class _EqualShare(torch.autograd.Function):
    """Return `x / n`, whose sum over n ranks is x; the backward passes the gradient of the sum through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> Tensor:
        return x / n

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GroupedExperts(ParallelModule):
    """The routed experts: the expert group divides the E experts, the tensor-parallel group divides I of each expert.

    Parameters: `gate_up_proj [e, 2 I/tp, H]` (gate, then up), without a gate `up_proj [e, I/tp, H]`, and `down_proj
    [e, H, I/tp]`; `projections` has both names. With `bias` also
    `gate_up_proj_bias [e, 2 I/tp]` and `down_proj_bias [e, H]`, which is replicated over the tensor-parallel group.
    With `input_major` the weights are `[e, H, 2 I/tp]` and `[e, I/tp, H]`. With `alternating` the outputs of gate and
    up alternate, in the bias too.

    Communication with an expert group: as `Dispatch.plan`, all-to-alls of rows `[M, H]` and weights `[M]`, and an
    all-to-all of the rows back; backward in reverse. The tensor-parallel group communicates nothing: the output is
    a partial sum.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        activation, gated, bias, input_major, alternating: See `activation`, `gated`, `expert_bias`,
            `input_major_experts` and `alternating_gate_up` of `MoEConfig`.
        group: Tensor-parallel group that divides each expert; None: experts are whole.
        expert_group: Ranks that divide the experts, each with its own tokens; None: this rank has all experts.
        dtype, device: Dtype and device of the parameters.

    Raises:
        ValueError: The activation is unknown, E or I does not divide, or the groups share several ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: GatedActivation = "silu",
        gated: bool = True,
        bias: bool = False,
        input_major: bool = False,
        alternating: bool = False,
        group: ProcessGroup | None = None,
        expert_group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter
        self.down_proj: nn.Parameter
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        self.down_proj_lora: LowRank | None
        activation_function(activation, gated=gated)  # raise for an unknown name at construction
        self.gated, self.projections = gated, ("gate_up_proj" if gated else "up_proj", "down_proj")
        self.num_experts, self.activation, self.expert_group = num_experts, activation, expert_group
        self.group = group
        self.product: GroupedProduct = grouped_linear
        for name in self.projections:
            self.register_module(f"{name}_lora", None)
        size = intermediate_size
        if group is not None:
            check_expert_group(group, expert_group, divided=True)
            size = divide(size, group.size(), "moe_intermediate_size")
        ranks = 1 if expert_group is None else expert_group.size()
        if num_experts % ranks:
            usable = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            raise ValueError(f"num_experts={num_experts} is not divisible by ep={ranks}; use ep in {{{usable}}}")
        self.input_major, self.alternating = input_major, alternating
        num_local, order = num_experts // ranks, -1 if input_major else 1
        shapes = ((1 + gated) * size, hidden_size)[::order], (hidden_size, size)[::order]
        for name, shape in zip(self.projections, shapes, strict=True):
            setattr(self, name, nn.Parameter(torch.empty(num_local, *shape, dtype=dtype, device=device)))
            self.register_parameter(f"{name}{SCALES}", None)  # of a frozen weight in FP8
        self.gate_up_proj_bias = self.down_proj_bias = None
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_local, 2 * size, dtype=dtype, device=device))
            self.down_proj_bias = nn.Parameter(torch.empty(num_local, hidden_size, dtype=dtype, device=device))
        self.tp = 1 if group is None else group.size()
        by_expert = shard_evenly([num_experts], expert_group, 0, "num_experts")
        # By turns, the columns of a rank's part of gate and up are one block.
        parts = [2 * intermediate_size] if alternating else [intermediate_size] * (1 + gated)
        for name, sizes, dim in ((self.projections[0], parts, 1), ("down_proj", [intermediate_size], 2)):
            set_sharding(self, name, by_expert, shard_evenly(sizes, group, 3 - dim if input_major else dim, name))
            if bias:
                inside = shard_evenly(sizes, group, 1, name) if name == "gate_up_proj" else None
                set_sharding(self, f"{name}_bias", by_expert, inside)
        self.fan_in = {self.projections[0]: hidden_size, "down_proj": intermediate_size}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every expert as `ColumnParallelLinear.reset_parameters` does, and set biases to 0."""
        seed = shared_seed()
        for name, fan_in in self.fan_in.items():
            fill_parameter_(self, name, seed, as_linear(fan_in))
            if (bias := getattr(self, f"{name}_bias", None)) is not None:
                nn.init.zeros_(bias)

    def forward(self, x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return this rank's part of Σ over a token's experts of weight · expert(x): `[T, H]`."""
        dispatch = Dispatch.plan(experts_Tk, self.num_experts, self.expert_group)
        if dispatch.is_local and self._moves_in_product():
            wide = self._multiply(x_TH, self.projections[0], dispatch.counts, before=dispatch.move)
            inner = self._activate(wide, dispatch.weights_of_rows(weights_Tk), dispatch.counts).to(x_TH.dtype)
            out = self._multiply(inner, "down_proj", dispatch.counts, after=dispatch.move)
        else:
            rows, weights = dispatch.to_experts(x_TH, weights_Tk)
            out = dispatch.to_tokens(self.compute(rows, weights, dispatch.counts, biased=not dispatch.is_local))
        if self.down_proj_bias is None or not dispatch.is_local:
            return out
        # There are fewer tokens than rows.
        return out + bias_of_tokens(_EqualShare.apply(self.down_proj_bias, self.tp), experts_Tk, weights_Tk)

    def _moves_in_product(self) -> bool:
        """Return whether only the GEMMs read rows, and can move rows themselves at less cost than a copy."""
        return self.product is not grouped_linear and self.has_plain_weights()

    def has_plain_weights(self) -> bool:
        """Return whether the layer has neither enabled adapters nor weights in FP8."""
        stored = all(getattr(self, f"{name}{SCALES}") is None for name in self.projections)
        return stored and all(enabled(getattr(self, f"{name}_lora")) is None for name in self.projections)

    def compute(self, rows: Tensor, weights: Tensor, counts: Tensor, *, biased: bool = True) -> Tensor:
        """Return the weighted outputs of rows `[M, H]` in order of expert, `counts` `[e]` of each: `[M, H]`.

        The weight `[M]` is applied before `down`, where rows are usually shortest. `biased=False` leaves the bias of
        `down` out.
        """
        first = self.projections[0]
        wide = self._multiply(rows, first, counts)
        if (lora := enabled(getattr(self, f"{first}_lora"))) is not None:
            wide = wide + _through(lora.of_experts(down_group=self.group, expert_group=self.expert_group), rows, counts)
        inner = self._activate(wide, weights, counts).to(rows.dtype)
        out = self._multiply(inner, "down_proj", counts)
        if (lora := enabled(self.down_proj_lora)) is not None:
            out = out + _through(lora.of_experts(up_group=self.group, expert_group=self.expert_group), inner, counts)
        if self.down_proj_bias is not None and biased:
            share: Tensor = _EqualShare.apply(self.down_proj_bias, self.tp)
            out = out + grouped_bias(share, counts, weights)
        return out

    def _activate(self, gate_up: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return each row's weight times the activation of gate and up (+ bias): `[M, 2I/tp]` -> `[M, I/tp]`.

        Without a gate both are `[M, I/tp]`.
        """
        bias = self.gate_up_proj_bias
        if not self.gated:
            return activation_function(self.activation, gated=False)(gate_up) * weights[:, None]
        if use_triton(gate_up) and (glu := self.glu()) is not None:
            experts = None
            if bias is not None:
                numbers = torch.arange(len(counts), device=counts.device)
                experts = numbers.repeat_interleave(counts, output_size=len(gate_up))
            return weighted_glu(gate_up, weights, glu, bias_e2I=bias, experts_M=experts)
        if bias is not None:
            gate_up = gate_up + grouped_bias(bias, counts, torch.ones_like(weights))
        return gated(self.activation, gate_up, alternating=self.alternating) * weights[:, None]

    def glu(self) -> GLU | None:
        """Return the constants of the activation for its kernel; None: the kernel has no such activation."""
        if not self.gated:
            return None
        if isinstance(self.activation, ClampedSwiGLU):
            return GLU(self.activation.alpha, self.activation.limit, 1.0, self.alternating)
        return GLU(alternating=self.alternating) if ACTIVATIONS[self.activation] is F.silu else None

    def _multiply(self, rows: Tensor, name: str, counts: Tensor, **moves: Move) -> Tensor:
        """Return the rows times the weights of their experts; `moves` are further arguments of the GEMM."""
        weight, scales = getattr(self, name), getattr(self, f"{name}{SCALES}")
        if scales is None:
            return self.product(rows, weight, counts, input_major=self.input_major, **moves)
        operands = (weight.transpose(1, 2), scales.transpose(1, 2)) if self.input_major else (weight, scales)
        out: Tensor = GroupedBlockScaled.apply(as_operand(rows), *operands, counts, grouped_linear)
        return out


def _through(factors: tuple[Tensor, Tensor], x_MK: Tensor, counts_e: Tensor) -> Tensor:
    """Return `(x D^T) U^T` with each row's expert's own factors `[e, r, K]` and `[e, N, r]`: `[M, N]`.

    A factor that is a matrix belongs to all experts.
    """
    for factor in factors:
        x_MK = F.linear(x_MK, factor) if factor.dim() == 2 else grouped_linear(x_MK, factor, counts_e)
    return x_MK


def check_expert_group(group: ProcessGroup, expert_group: ProcessGroup | None, *, divided: bool) -> None:
    """Raise ValueError unless the expert group suits a tensor-parallel group that divides every expert, or none."""
    members = set(dist.get_process_group_ranks(group))
    exchanging = set() if expert_group is None else set(dist.get_process_group_ranks(expert_group))
    if divided and len(members & exchanging) > 1:
        raise ValueError(
            f"the expert group {sorted(exchanging)} has several ranks of the tensor-parallel group {sorted(members)}, "
            "over which every expert is divided; use an expert group across data-parallel ranks, or whole experts "
            "(expert_tensor_parallel=False)"
        )
    if not divided and (len(exchanging) < 2 or not (members <= exchanging or exchanging <= members)):
        raise ValueError(
            f"with expert_tensor_parallel=False the expert group must contain the tensor-parallel ranks "
            f"{sorted(members)} or be some of them, but it is {sorted(exchanging)}; copies of an expert would get "
            "different gradients"
        )


def grouped_linear(x_MK: Tensor, weight_eNK: Tensor, counts_e: Tensor, *, input_major: bool = False) -> Tensor:
    """Multiply each run of rows by the transposed weight of its expert: `[M, K]`, `[e, N, K]` -> `[M, N]`.

    With `input_major` the weight is `[e, K, N]`. Rows are ordered by expert, and `counts_e` has the rows of each. The
    result is in x's dtype, or under torch.autocast in its dtype. The weight gradient of an expert without rows is zero.
    bf16 on CUDA is one kernel without host synchronisation; otherwise a loop over the experts copies the counts to the
    host.
    """
    x_MK, stored = as_operand(x_MK), as_operand(weight_eNK)
    weight_eNK = stored.transpose(1, 2) if input_major else stored
    if len(x_MK) and x_MK.dtype == weight_eNK.dtype and is_one_kernel(weight_eNK):
        if is_faster(weight_eNK):
            return grouped_gemm(x_MK, stored, counts_e, input_major=input_major)
        return F.grouped_mm(x_MK, weight_eNK.transpose(1, 2), offs=counts_e.cumsum(0, dtype=torch.int32))
    return _loop(x_MK, weight_eNK, counts_e)


def is_one_kernel(weight_eNK: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Say whether `grouped_linear` with this weight, in `dtype`, is one kernel without host synchronisation."""
    whole_vectors = weight_eNK.shape[1] % 8 == 0 and weight_eNK.shape[2] % 8 == 0  # the kernel reads 16 bytes at a time
    return device_type(weight_eNK.device) == GPU and (dtype or weight_eNK.dtype) == torch.bfloat16 and whole_vectors


def grouped_bias(bias_eN: Tensor, counts_e: Tensor, weights_M: Tensor) -> Tensor:
    """Return each row's weight times the bias of its expert: `[M, N]` in the bias's dtype.

    This is a GEMM with an `[M, e]` matrix, so gradients are summed in fp32 and in a fixed order. The backward of a
    gather would use atomics in the bias's dtype.
    """
    row, ends = torch.arange(len(weights_M), device=weights_M.device)[:, None], counts_e.cumsum(0)
    is_expert = (row >= ends - counts_e) & (row < ends)
    return (is_expert * weights_M[:, None]).to(bias_eN.dtype) @ bias_eN


def bias_of_tokens(bias_EN: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Return the sum over a token's experts of weight times bias, by a GEMM with a `[T, E]` matrix: `[T, N]`."""
    weights_TE = weights_Tk.new_zeros(len(weights_Tk), len(bias_EN)).scatter_add(1, experts_Tk, weights_Tk)
    return weights_TE.to(bias_EN.dtype) @ bias_EN


# An operator, because torch.compile cannot trace a loop with data-dependent bounds.
@torch.library.custom_op("parallel_layers::grouped_linear", mutates_args=())
def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, out, expert_weight in zip(*_runs(counts, x, y), weight, strict=True):
        torch.mm(rows, expert_weight.T, out=out)
    return y


@_loop.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("parallel_layers::grouped_linear_backward", mutates_args=())
def loop_backward(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    """Return dx = dy W and dW = dyᵀ x, computed expert by expert; dW is empty unless the weight trains."""
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_weight = torch.empty_like(weight) if trains else weight.new_empty(0)
    for number, (d_rows, rows, out, expert_weight) in enumerate(zip(*_runs(counts, d_y, x, d_x), weight, strict=True)):
        torch.mm(d_rows, expert_weight, out=out)
        if trains:
            torch.mm(d_rows.T, rows, out=d_weight[number])
    return d_x, d_weight


@loop_backward.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, counts: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight) if trains else weight.new_empty(0)


def _runs(counts: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor's rows into the experts' runs."""
    sizes = counts.tolist()
    return [x.split(sizes) for x in tensors]


def _backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
    trains = ctx.needs_input_grad[1]
    d_x, d_weight = loop_backward(d_y, *ctx.saved_tensors, trains)
    return d_x, d_weight if trains else None, None


_loop.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
