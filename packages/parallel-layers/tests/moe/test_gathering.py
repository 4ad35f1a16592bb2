"""When gathered experts save time; what views with gathered experts compute is in test_layer.py."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from parallel_layers.linear.execution import Placement
from parallel_layers.moe import MoE, MoEConfig, bytes_to_gather, divided_mixtures, saves_time
from parallel_layers.testing import RankPool

EXPERT = 3 * 2048 * 768 * 2  # bytes of an expert of Qwen3-30B-A3B in bf16


def decide(group: ProcessGroup) -> tuple[list[bool], bool, int, int]:
    config = MoEConfig(num_experts=128, top_k=8, intermediate_size=768)
    how = {"expert_group": group, "device": "meta", "dtype": torch.bfloat16}
    mixture = MoE(2048, config, **how)
    within = MoE(2048, config, placement=Placement(group), expert_tensor_parallel=False, **how)
    alone = MoE(2048, config, device="meta")
    decisions = [saves_time(mixture, count) for count in (1, 2, 4, 64, 512)]
    model = torch.nn.ModuleList([mixture, alone, within])
    return decisions, saves_time(within, 1), bytes_to_gather([mixture]), len(divided_mixtures(model))


def test_gathered_experts_save_time_while_few_are_read(ranks: RankPool) -> None:
    """One token of each of two ranks goes to 8 experts; 64 tokens go to almost all 128, instead of 64 on each rank."""
    assert ranks.run(decide, world=2) == [([True, True, True, False, False], False, 64 * EXPERT, 2)] * 2
