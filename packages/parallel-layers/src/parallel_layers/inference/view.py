"""`decoding_attributes`: views of layers that exchange what the few tokens of a decoding step need, and no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import on_gpu
from parallel_layers.distributed.async_collectives import is_sharded
from parallel_layers.linear.execution import UNDIVIDED, Execution, Placement
from parallel_layers.linear.few_tokens import sum_and_add, sum_and_norm
from parallel_layers.linear.layers import RowParallelLinear
from parallel_layers.model.decoder import DecoderLayer
from parallel_layers.module.shared_weights import shallow_copy
from parallel_layers.moe.decoding import decode_experts
from parallel_layers.moe.layer import MoE
from parallel_layers.norm.rms import RMSNorm


def decoding_attributes(view: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has in a decoding view, for `module.view_of`. No gradients.

    - Every rank of a tensor-parallel group has all tokens, so a half layer makes one all-reduce (`linear.few_tokens`),
      with the residual addition and the norm behind it in the same kernel.
    - The residual addition at the end of a layer computes the norm of the next layer of an `nn.ModuleDict`, too.
    - Experts on several ranks compute the tokens of all ranks (`moe.decoding`). Gathered experts (`moe.gathering`)
      compute the tokens of their rank.
    """
    attributes: dict[str, Any] = {}
    if isinstance(placement := getattr(view, "placement", None), Placement):
        attributes["placement"] = replace(placement, sequence_parallel=False)
    if isinstance(execution := getattr(view, "execution", None), Execution):
        attributes["execution"] = replace(execution, few_tokens=True)
    if getattr(view, "sequence_parallel", False) is True:
        attributes["sequence_parallel"] = False
    if isinstance(view, MoE):
        attributes |= _of_mixture(view)
    if isinstance(view, DecoderLayer):
        attributes |= _of_layer(view)
    if isinstance(view, nn.ModuleDict):
        _norm_ahead(view.values())
    return attributes


def _of_layer(view: DecoderLayer) -> dict[str, Any]:
    """Let the residual addition and the norm behind a row-parallel layer sum its parts; see `linear.few_tokens`."""
    if view.config.residual_multiplier != 1:
        return {}
    norms = view.norms
    if norms.attention_out is None and norms.mlp_in is not None:
        norm, layer = getattr(view, norms.mlp_in), getattr(getattr(view, "self_attn", None), "o_proj", None)
        if isinstance(norm, RMSNorm) and (group := _leave_parts(layer)) is not None:
            norm.__dict__["add_and_norm"] = partial(_sum_and_norm, shallow_copy(norm), group)
    if norms.mlp_out is not None or view.config.mixer == "attention":
        return {}
    return {"add_mlp": _Addition(_leave_parts(getattr(getattr(view, "mlp", None), "down_proj", None)))}


class _Addition:
    """The addition of an MLP's output to the residual stream, with the norm of the next layer in the same kernel.

    Args:
        group: The ranks over which the output is summed; None: it is complete.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self._add_and_norm: Any = None
        # The norm of the stream, and the stream.
        self._results: tuple[Tensor, Tensor] | None = None

    def lead_to(self, norm: RMSNorm) -> None:
        """Compute a norm of the stream ahead, which its `add_and_norm` returns when it gets this stream."""
        plain = shallow_copy(norm)
        self._add_and_norm = plain.add_and_norm
        if self.group is not None:
            self._add_and_norm = partial(_sum_and_norm, plain, self.group)
        norm.__dict__["add_and_norm"] = partial(self._norm, plain.add_and_norm)

    def __call__(self, hidden: Tensor, x: Tensor) -> Tensor:
        """See `DecoderLayer.add_mlp`."""
        if self._add_and_norm is None:
            return hidden + x if self.group is None else sum_and_add(x, hidden, self.group)
        self._results = self._add_and_norm(x, hidden)
        return self._results[1]

    def _norm(self, otherwise: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        results, self._results = self._results, None
        if results is not None and residual is None and x is results[1]:
            return results
        computed: tuple[Tensor, Tensor] = otherwise(x, residual)
        return computed


def _norm_ahead(layers: Iterable[nn.Module]) -> None:
    """Let each layer compute the norm in front of the next one."""
    for layer, following in pairwise(layers):
        if not isinstance(layer, DecoderLayer) or not isinstance(following, DecoderLayer):
            continue
        addition, norms = layer.__dict__.get("add_mlp"), following.norms
        norm = getattr(following, norms.attention_in or norms.mlp_in or "", None)
        unchanged = not layer.config.per_layer_size and layer.layer_scalar is None
        if isinstance(addition, _Addition) and isinstance(norm, RMSNorm) and unchanged:
            addition.lead_to(norm)


def _leave_parts(layer: nn.Module | None) -> ProcessGroup | None:
    """Let a view of a row-parallel layer return this rank's part of its sum; return the group that sums them."""
    if not isinstance(layer, RowParallelLinear) or layer.bias is not None or layer.execution.product.in_tree:
        return None
    group = layer.placement.sharded
    layer.__dict__["placement"] = UNDIVIDED
    return group


def _sum_and_norm(norm: RMSNorm, group: ProcessGroup, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return sum_and_norm(x, residual, norm, group)


def _of_mixture(view: MoE) -> dict[str, Any]:
    """Return the attributes of a mixture; its children are views already, and get their own here."""
    experts, ranks = view.experts, view.experts.expert_group
    attributes: dict[str, Any] = {}
    group = ranks
    if not view.expert_tensor_parallel and view.group is not None and is_sharded(ranks):
        members = dist.get_process_group_ranks(view.group)
        if set(dist.get_process_group_ranks(ranks)) <= set(members):
            # Every rank has all tokens already: the sum over the experts is the sum over the ranks.
            attributes |= {"expert_tensor_parallel": True, "group": ranks}
            group = None
    elif not view.expert_tensor_parallel and not is_sharded(ranks):
        # The experts are gathered, and every rank has all tokens.
        attributes |= {"expert_tensor_parallel": True, "group": None}
    if view.expert_tensor_parallel or group is None:
        view.gate.__dict__["group"] = None
    if is_sharded(ranks) or on_gpu(experts.down_proj):
        experts.__dict__["forward"] = partial(decode_experts, shallow_copy(experts), group)
    return attributes
