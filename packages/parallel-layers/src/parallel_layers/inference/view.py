"""`decoding_attributes`: views of layers that exchange what the few tokens of a decoding step need, and no more."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from parallel_layers.distributed.async_collectives import is_sharded
from parallel_layers.linear.execution import Execution, Placement
from parallel_layers.moe.decoding import decode_experts
from parallel_layers.moe.layer import MoE


def decoding_attributes(view: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has in a decoding view, for `module.view_of`. No gradients.

    - Every rank of a tensor-parallel group has all tokens, so a half layer makes one all-reduce (`linear.few_tokens`).
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
    return attributes


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
