"""What the blocks send, counted, is what the README's table says that they send."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    LatentConfig,
    ParallelAttention,
    ParallelLatentAttention,
    ParallelMLP,
    RMSNorm,
)
from parallel_layers.moe import GroupedExperts, MoE, MoEConfig, TopKRouter
from parallel_layers.testing import RankPool

README = (Path(__file__).parent.parent / "README.md").read_text()
TOKENS, HIDDEN = 8, 32
SHORT = {"all_reduce": "AR", "all_gather_into_tensor": "AG", "reduce_scatter_tensor": "RS", "all_to_all_single": "A2A"}
LATENT = LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5, q_lora_rank=14)
DECODER = DecoderConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, intermediate_size=48)
EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=16)

# A block of a group; whether hidden states are sharded over tokens, or experts exchanged.
BLOCKS: dict[str, Callable[[ProcessGroup, bool], nn.Module]] = {
    "RMSNorm": lambda group, sp: RMSNorm(HIDDEN, group=group, sequence_parallel=sp),
    "ParallelAttention": lambda group, sp: ParallelAttention(HIDDEN, 4, 2, 8, group=group, sequence_parallel=sp),
    "ParallelLatentAttention": lambda group, sp: ParallelLatentAttention(
        HIDDEN, 4, LATENT, group=group, sequence_parallel=sp
    ),
    "ParallelMLP": lambda group, sp: ParallelMLP(HIDDEN, 48, group=group, sequence_parallel=sp),
    "DecoderLayer": lambda group, sp: DecoderLayer(DECODER, group=group, sequence_parallel=sp),
    "MoE": lambda group, sp: MoE(HIDDEN, EXPERTS, group=group, sequence_parallel=sp),
    "TopKRouter": lambda group, sp: TopKRouter(HIDDEN, EXPERTS, group=group if sp else None),
    "GroupedExperts": lambda group, ep: GroupedExperts(
        HIDDEN, 16, 4, group=None if ep else group, expert_group=group if ep else None
    ),
}


class Collectives(TorchDispatchMode):
    """Counts the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func.__name__:
            self.counts[SHORT[func._schema.name.split("::")[1].rstrip("_")]] += 1
        return func(*args, **(kwargs or {}))


def arguments_of(block: nn.Module) -> tuple[Any, ...]:
    if isinstance(block, ParallelAttention | ParallelLatentAttention | DecoderLayer):
        return (torch.randn(TOKENS, 8), torch.randn(TOKENS, 8)), torch.tensor([0, TOKENS]).int(), TOKENS
    if isinstance(block, GroupedExperts):
        return torch.rand(TOKENS, 4).topk(2).indices, torch.rand(TOKENS, 2, requires_grad=True)
    return ()


def sent(group: ProcessGroup, name: str, divided: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the forward and of the backward."""
    block = BLOCKS[name](group, divided)
    rows = TOKENS // 2 if divided and name != "GroupedExperts" else TOKENS
    with Collectives() as forward:
        out = block(torch.randn(rows, HIDDEN, requires_grad=True), *arguments_of(block))
    loss: Tensor = out.weights.square().sum() if name == "TopKRouter" else out.sum()
    with Collectives() as backward:
        loss.backward()
    return dict(forward.counts), dict(backward.counts)


def stated(name: str, divided: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The two cells of the README's row, of which the part behind "sp:" or "ep:" is that of divided tokens."""
    (row,) = (row for row in README.splitlines() if row.startswith(f"| `{name}`"))
    cells = []
    for cell in row.split("|")[2:4]:
        plain, _, other = cell.partition(";")
        counts: Counter[str] = Counter()
        for number, collective in re.findall(r"(?:(\d+) )?\b(AR|AG|RS|A2A)\b", other if divided and other else plain):
            counts[collective] += int(number or 1)
        cells.append(dict(counts))
    return cells[0], cells[1]


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_table_says_what_is_sent(ranks: RankPool, name: str, divided: bool) -> None:
    assert ranks.run(sent, name, divided, world=2) == [stated(name, divided)] * 2
