"""`decoding_attributes`: views of layers that exchange what the few tokens of a decoding step need, and no more."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed.async_collectives import is_sharded
from parallel_layers.linear.execution import UNDIVIDED, Execution, Placement
from parallel_layers.linear.few_tokens import sum_and_add, sum_and_norm
from parallel_layers.linear.layers import RowParallelLinear
from parallel_layers.model.decoder import DecoderLayer
from parallel_layers.moe.decoding import decode_experts
from parallel_layers.moe.layer import MoE
from parallel_layers.norm.rms import RMSNorm


def decoding_attributes(view: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has in a decoding view, for `module.view_of`. No gradients.

    - Every rank of a tensor-parallel group has all tokens, so a half layer makes one all-reduce (`linear.few_tokens`),
      with the residual addition and the norm behind it in the same kernel.
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
    return attributes


def _of_layer(view: DecoderLayer) -> dict[str, Any]:
    """Let the residual addition and the norm behind a row-parallel layer sum its parts; see `linear.few_tokens`."""
    if view.config.residual_multiplier != 1:
        return {}
    norms = view.norms
    if norms.attention_out is None and norms.mlp_in is not None:
        norm, layer = getattr(view, norms.mlp_in), getattr(getattr(view, "self_attn", None), "o_proj", None)
        if isinstance(norm, RMSNorm) and (group := _leave_parts(layer)) is not None:
            norm.__dict__["add_and_norm"] = partial(_sum_and_norm, norm, group)
    if norms.mlp_out is None and (group := _leave_parts(getattr(getattr(view, "mlp", None), "down_proj", None))):
        return {"add_mlp": partial(_sum_and_add, group)}
    return {}


def _leave_parts(layer: nn.Module | None) -> ProcessGroup | None:
    """Let a view of a row-parallel layer return this rank's part of its sum; return the group that sums them."""
    if not isinstance(layer, RowParallelLinear) or layer.bias is not None or layer.execution.product.in_tree:
        return None
    group = layer.placement.sharded
    layer.__dict__["placement"] = UNDIVIDED
    return group


def _sum_and_norm(norm: RMSNorm, group: ProcessGroup, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return sum_and_norm(x, residual, norm, group)


def _sum_and_add(group: ProcessGroup, hidden: Tensor, x: Tensor) -> Tensor:
    return sum_and_add(x, hidden, group)


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
    if is_sharded(ranks) or experts.down_proj.is_cuda:
        experts.__dict__["forward"] = partial(decode_experts, experts, group)
    return attributes
