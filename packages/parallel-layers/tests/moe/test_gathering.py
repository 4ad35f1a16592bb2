"""When gathered experts save time, and experts gathered in FP8; other views with gathered experts: test_layer.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from parallel_layers.inference import decoding_attributes, float8_attributes
from parallel_layers.kernels.float8 import quantize_rows
from parallel_layers.linear.execution import Placement
from parallel_layers.module import view_of
from parallel_layers.moe import MoE, MoEConfig, bytes_to_gather, divided_mixtures, gathered_attributes, saves_time
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


@torch.no_grad()
def in_float8(group: ProcessGroup, input_major: bool) -> None:
    """Compare both views of experts gathered in FP8 with rounded experts on one rank, and count bytes."""
    config = MoEConfig(num_experts=4, top_k=2, intermediate_size=16, expert_bias=True, input_major_experts=input_major)
    torch.manual_seed(0)
    whole, mixture = MoE(32, config), MoE(32, config, expert_group=group)
    here = slice(2 * group.rank(), 2 * group.rank() + 2)
    for name, parameter in whole.experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
        mixture.experts.get_parameter(name).copy_(parameter[here])
        if not name.endswith("bias"):
            rows = (parameter.mT if input_major else parameter).contiguous()
            numbers, scales = quantize_rows(rows)
            dense = numbers.float() * scales[..., None]
            parameter.copy_(dense.mT if input_major else dense)
            assert not torch.equal(parameter[here], mixture.experts.get_parameter(name))
    mixture.gate.load_state_dict(whole.gate.state_dict())
    gathered = view_of(mixture, lambda _, view: view.__dict__.update(gathered_attributes(view, float8=True)))
    steps = view_of(gathered, lambda _, view: view.__dict__.update(decoding_attributes(view) | float8_attributes(view)))
    x = torch.randn(5 + group.rank(), 32)  # no rank waits for others
    for view in (gathered, steps):
        torch.testing.assert_close(view(x), whole(x), rtol=1e-5, atol=1e-5)
    held = [
        part.untyped_storage()
        for part in (*steps.experts._parameters.values(), *steps.experts.rounded)
        if part is not None
    ]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in held}
    rows = 4 * (32 + 32)
    weights, biases = 4 * 3 * 32 * 16, rows * 4
    assert sum(sizes.values()) == weights + 4 * rows + biases
    assert bytes_to_gather([mixture], float8=True) == weights + biases
    assert bytes_to_gather([mixture]) == (4 * weights + biases) // 2


@pytest.mark.parametrize("input_major", [False, True])
def test_experts_in_float8_are_held_once(ranks: RankPool, input_major: bool) -> None:
    """A byte for each element of all ranks' experts, which prompts and steps read, and nothing else."""
    ranks.run(in_float8, input_major, world=2)
