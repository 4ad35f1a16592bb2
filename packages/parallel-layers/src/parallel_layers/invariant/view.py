"""`tp_invariant`: a model whose forward has the same bits at every tensor-parallel size and in every pack."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.attention.backends import BACKENDS, INVARIANT_BACKENDS
from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.attention.latent import ParallelLatentAttention
from parallel_layers.attention.layer import ParallelAttention
from parallel_layers.head import log_probs
from parallel_layers.kernels.exact import in_double
from parallel_layers.kernels.rms_norm import supports_rms_norm
from parallel_layers.linear.invariant import BLOCKS, InvariantProduct, check_blocks
from parallel_layers.linear.layers import ColumnLinear, ReplicatedLinear, RowParallelLinear
from parallel_layers.linear_attention.gated_delta_net import GatedDeltaNet
from parallel_layers.linear_attention.kimi_delta_attention import KimiDeltaAttention
from parallel_layers.linear_attention.mamba2 import Mamba2
from parallel_layers.mlp.layer import ParallelMLP
from parallel_layers.module.shared_weights import Model, view_of
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.moe.invariant import InvariantExperts, InvariantMixture
from parallel_layers.moe.layer import MoE
from parallel_layers.moe.router import TopKRouter
from parallel_layers.norm.layer_norm import LayerNorm
from parallel_layers.norm.rms import HeadShardedRMSNorm, RMSNorm
from parallel_layers.rotary.embedding import RotaryEmbedding

linear_log_probs = partial(log_probs.linear_log_probs, blocks=BLOCKS)
"""`linear_log_probs` with sums in blocks of fixed size: the same bits at every tensor-parallel size."""


def tp_invariant(model: Model, *, blocks: int = BLOCKS) -> Model:
    """Return the model with a forward whose bits depend neither on the number of ranks nor on the rest of the batch.

    A token's hidden states, and its log-prob and entropy by `invariant.linear_log_probs`, are bitwise equal at tp 1, 2,
    ... `blocks`, with and without sequence parallelism. They depend only on the tokens of the same sequence up to the
    token: other sequences, padding and micro-batches change no bit.

    Row-parallel GEMMs are cut into `blocks` parts of the contraction, which are summed in fp32 and added as a binary
    tree over the ranks. Everything else computes each row (column, head, segment) independently; see `linear.invariant`
    and `kernels.exact`.

    The result is a view (`shared_weights.view_of`) with the parameters of `model`, and `model` stays unchanged. The
    view can be trained: gradients equal the ordinary layers' gradients within rounding and are not invariant. Tokens
    that come one by one to a cache have the same bits as in one pass; a cache of latent attention then holds the keys
    and values of all heads.

    A mixture's token has the same bits wherever its experts are (`moe.invariant`): at every size of the expert group,
    and whichever tokens go to the same experts.

    On a GPU the bits are equal at every tp. On a CPU elementary functions and sums are computed in fp64 and rounded, so
    that bits are equal except for rounding ties (about one number in 10^8). bf16 on Hopper GPUs and newer uses Triton
    kernels. A CPU and fp32 use exact GEMMs, which are slow and meant for tests.

    Communication: as the model, with an all-to-all instead of a row-parallel layer's reduce-scatter, and an
    all-to-all and an all-gather instead of its all-reduce; see `linear.transports`.

    Args:
        model: A layer of this package, or a module with such layers.
        blocks: A power of two; a multiple of every group's size. It divides experts' intermediate size.

    Raises:
        ValueError: A group's size does not divide `blocks`, `blocks` does not divide a row-parallel layer's inputs, or
            a layer has no invariant form: routers with scaled inputs, linear attention, norms over the heads of all
            ranks, norms of values, ring attention, and the attention backends "sdpa" and "reference".
    """
    for name, module in model.named_modules():
        _check(name or type(model).__name__, module, blocks)

    def change(module: nn.Module, view: nn.Module) -> None:
        for kind, invariant in _CLASSES.items():
            if isinstance(view, kind):
                view.__class__ = invariant
        view.__dict__.update(_invariant_attributes(view, blocks))

    return view_of(model, change)


def _invariant_attributes(view: nn.Module, blocks: int) -> dict[str, Any]:
    """Return the attributes that replace a layer's in its invariant view."""
    if isinstance(view, RowParallelLinear):
        return {"execution": replace(view.execution, product=InvariantProduct(blocks // view.placement.tp))}
    if isinstance(view, ColumnLinear | ReplicatedLinear):
        return {"execution": replace(view.execution, product=InvariantProduct())}
    if isinstance(view, TopKRouter):
        return {"invariant": True}
    if isinstance(view, InvariantExperts):
        return {"blocks": blocks}
    if isinstance(view, ParallelAttention | ParallelLatentAttention):
        backend = "invariant" if view.options["backend"] == "auto" else view.options["backend"]
        return {"options": {**view.options, "backend": backend}, "absorbs": False}
    return {}


def _check(name: str, module: nn.Module, blocks: int) -> None:
    """Raise ValueError for a layer without an invariant form."""
    group = getattr(module, "group", None)
    check_blocks(blocks, group.size() if isinstance(group, ProcessGroup) else 1)
    if isinstance(module, RowParallelLinear) and module.in_features % blocks:
        raise ValueError(f"{name}: in_features={module.in_features} is not divisible by blocks={blocks}")
    if isinstance(module, TopKRouter) and module.scale is not None:
        raise ValueError(f"{name}: a router with scaled inputs has no invariant form; use the ordinary model")
    if isinstance(module, GroupedExperts) and (size := module.fan_in["down_proj"]) % blocks:
        raise ValueError(f"{name}: moe_intermediate_size={size} is not divisible by blocks={blocks}")
    if isinstance(module, GatedDeltaNet | KimiDeltaAttention | Mamba2):
        raise ValueError(f"{name}: linear attention has no invariant form; use the ordinary model")
    if isinstance(module, HeadShardedRMSNorm):
        raise ValueError(
            f"{name}: a norm over all ranks' heads has no invariant form; use a model without qk_norm='full'"
        )
    if isinstance(module, ParallelAttention) and module.value_norm_eps is not None:
        raise ValueError(f"{name}: a norm of values has no invariant form; use a model without value_norm")
    if isinstance(module, ParallelAttention | ParallelLatentAttention):
        if getattr(module.attend, "func", None) is ring_attention:
            raise ValueError(f"{name}: ring attention depends on where a sequence lies; use context_parallel='ulysses'")
        if (backend := module.options["backend"]) in BACKENDS and backend not in INVARIANT_BACKENDS:
            raise ValueError(
                f"attention backend={backend!r} depends on the rest of the pack; use 'auto' or one of "
                f"{', '.join(INVARIANT_BACKENDS)}"
            )


class _InvariantRMSNorm(RMSNorm):
    """The Triton kernel sums each row in a fixed order; elsewhere sums are fp64."""

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        if supports_rms_norm(x, weight):
            return super().normalize(x, weight)
        return super().normalize(x.double(), weight.double()).to(x.dtype)


class _InvariantLayerNorm(LayerNorm):
    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Norm`."""
        return in_double(partial(super().normalize, weight=weight), x)


class _InvariantRotaryEmbedding(RotaryEmbedding):
    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `RotaryEmbedding`."""
        angles = self.angles(position_ids)
        cos, sin = in_double(torch.cos, angles), in_double(torch.sin, angles)
        return cos * self.attention_factor, sin * self.attention_factor


class _InvariantMLP(ParallelMLP):
    def activate(self, x: Tensor) -> Tensor:
        """See `ParallelMLP`."""
        return in_double(super().activate, x)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    GroupedExperts: InvariantExperts,
    MoE: InvariantMixture,
    RMSNorm: _InvariantRMSNorm,
    LayerNorm: _InvariantLayerNorm,
    RotaryEmbedding: _InvariantRotaryEmbedding,
    ParallelMLP: _InvariantMLP,
}
