"""Routed experts of all ranks gathered on every rank, for generation: each rank then draws without an exchange.

Shape suffixes: E experts, e experts of this rank, k experts per token, T tokens of a step on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from parallel_layers.distributed import async_collectives
from parallel_layers.linear.block_scaled import SCALES
from parallel_layers.linear.low_rank import LowRank, enabled
from parallel_layers.moe.decoding import RoundedExperts, can_round
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.moe.layer import MoE

# The two exchanges of a layer take as long as reading this many bytes. An estimate from 20 us each and 4 TB/s, which
# no benchmark has measured yet.
_BYTES_OF_EXCHANGES = 160 * 2**20


def divided_mixtures(model: nn.Module) -> list[MoE]:
    """Return the mixtures of a model whose experts are on several ranks."""
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    return [mixture for mixture in mixtures if async_collectives.is_sharded(mixture.experts.expert_group)]


def why_not_gather(mixtures: Sequence[MoE]) -> str | None:
    """Return why experts cannot be gathered; None if they can."""
    modules = (module for mixture in mixtures for module in mixture.experts.modules())
    if any(isinstance(module, LowRank) and enabled(module) is not None for module in modules):
        return "experts have adapters, which are not gathered"
    return None


def bytes_to_gather(mixtures: Sequence[MoE], *, float8: bool = False) -> int:
    """Return the bytes of the experts of the other ranks, or of all experts in FP8; see `gathered_attributes`."""
    return sum(_bytes(mixture, float8) * (_ranks(mixture) - (not _rounds(mixture, float8))) for mixture in mixtures)


def saves_time(mixture: MoE, num_tokens: int, *, float8: bool = False) -> bool:
    """Return whether a step takes less time with gathered experts, where each rank has `num_tokens` tokens.

    With gathered experts a rank reads the experts of its own tokens; else those of its experts that the tokens of all
    ranks go to, and it exchanges tokens. Routing is taken as uniform. Ranks that draw the same tokens do not gather.
    """
    if _shares_tokens(mixture):
        return False
    ranks, experts = _ranks(mixture), mixture.config.num_experts

    def read(tokens: int) -> float:
        """Return the share of the experts that some of the tokens go to."""
        return 1 - (1 - mixture.config.top_k / experts) ** tokens

    further = _bytes(mixture, float8) * (ranks * read(num_tokens) - read(num_tokens * ranks))
    return further < _BYTES_OF_EXCHANGES


def gathered_attributes(view: nn.Module, *, float8: bool = False) -> dict[str, Any]:
    """Return the attributes of a module in a view with gathered experts, for `module.view_of`. No gradients.

    With `float8` the weights are gathered in FP8 alone, where `can_round` allows it: a layer makes them dense for each
    call, and in a decoding view the kernels read them in FP8 (`moe.decoding`).

    Communication: an all-gather of each parameter of routed experts over their expert group.
    """
    if not isinstance(view, GroupedExperts) or not async_collectives.is_sharded(group := view.expert_group):
        return {}
    if not (float8 and can_round(view)):
        return {"_parameters": _all_gathered(view._parameters, group), "expert_group": None}
    rounded = RoundedExperts(*(_gathered(part, group) for part in RoundedExperts.of_layer(view)))
    parameters = _all_gathered({name: x for name, x in view._parameters.items() if name not in view.projections}, group)
    for name, (rows, scales) in zip(view.projections, rounded.pairs(), strict=True):
        parts = rows, scales[..., None]
        parameters[name], parameters[f"{name}{SCALES}"] = (part.mT if view.input_major else part for part in parts)
    dense_dtype = view.down_proj.dtype
    return {"_parameters": parameters, "expert_group": None, "rounded": rounded, "dense_dtype": dense_dtype}


def _all_gathered(parameters: Mapping[str, torch.Tensor | None], group: ProcessGroup) -> dict[str, torch.Tensor | None]:
    return {name: None if part is None else _gathered(part, group) for name, part in parameters.items()}


def _gathered(parameter: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the experts of all ranks `[E, ...]`; as bytes, because gloo and NCCL do not send every dtype."""
    local = parameter.detach().contiguous()
    return async_collectives.all_gather(local.view(torch.uint8), group).view(local.dtype)


def _bytes(mixture: MoE, float8: bool) -> int:
    """Return the bytes of this rank's experts, or of their copies in FP8 without the scales of rows."""
    experts = mixture.experts
    size = sum(parameter.nbytes for parameter in experts.parameters(recurse=False))
    weights = [getattr(experts, name) for name in experts.projections if _rounds(mixture, float8)]
    return size - sum(weight.nbytes - weight.numel() for weight in weights)


def _rounds(mixture: MoE, float8: bool) -> bool:
    return float8 and can_round(mixture.experts)


def _ranks(mixture: MoE) -> int:
    group = mixture.experts.expert_group
    assert group is not None
    return group.size()


def _shares_tokens(mixture: MoE) -> bool:
    """Return whether all ranks of the expert group are of one tensor-parallel group."""
    group = mixture.experts.expert_group
    if mixture.group is None or group is None:
        return False
    return set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(mixture.group))
