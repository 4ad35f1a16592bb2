"""Everything works on the group that it was given, with no other in sight."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
    initialize_,
    linear_log_probs,
)
from parallel_layers.distributed import collectives
from parallel_layers.head.log_probs import vocab_parallel_log_probs
from parallel_layers.linear.execution import Placement
from parallel_layers.memory.random_states import RngStates
from parallel_layers.memory.recompute import checkpoint
from parallel_layers.module.sharding import load_full_
from parallel_layers.testing import RankPool

VOCAB, HIDDEN = 11, 8


@contextlib.contextmanager
def no_default_group() -> Iterator[None]:
    """Return what asks torch for the default group finds none."""
    world = dist.distributed_c10d.GroupMember.WORLD
    dist.distributed_c10d.GroupMember.WORLD = None
    try:
        with pytest.raises(ValueError, match="process group has not been initialized"):
            dist.all_reduce(torch.zeros(1))
        yield
    finally:
        dist.distributed_c10d.GroupMember.WORLD = world


class Model(nn.Module):
    """One of each layer whose parameters are divided or replicated."""

    def __init__(self, group: ProcessGroup | None, sp: bool) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, group=group, sequence_parallel=sp)
        self.norm = RMSNorm(HIDDEN, eps=1e-6, group=group, sequence_parallel=sp)
        self.up = ColumnParallelLinear(HIDDEN, 16, bias=True, placement=Placement(group, sp))
        self.down = RowParallelLinear(16, HIDDEN, bias=True, placement=Placement(group, sp))
        self.qkv = QKVParallelLinear(HIDDEN, 4, 1, 4, placement=Placement(group, sp))
        self.out = RowParallelLinear(16, HIDDEN, placement=Placement(group, sp))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.down(self.up(hidden).tanh())
        return hidden + self.out(self.qkv(hidden).split(self.qkv.local_sizes, -1)[0])


def step(group: ProcessGroup | None, sp: bool) -> tuple[Tensor, Tensor]:
    """The loss and the gradient norm of a model."""
    torch.manual_seed(0)
    ids, labels = torch.randint(VOCAB, (8,)), torch.randint(VOCAB, (8,))
    model = Model(group, sp)
    initialize_(model, 1)
    rng = RngStates.tensor_parallel(1, group)
    hidden = checkpoint(model, ids, rng=rng)
    head = model.embed.weight
    options = {"group": group, "vocab_size": VOCAB}
    fused = linear_log_probs(hidden, head, labels, sequence_parallel=sp, **options)
    gather = collectives.gather_from_sequence_parallel if sp else collectives.copy_to_tensor_parallel
    logits = gather(hidden, group) @ head.t()
    loss = -vocab_parallel_log_probs(logits, labels, **options).log_probs.mean() - fused.log_probs.mean()
    loss.backward()
    return loss.detach(), clip_grad_norm_(model, 1.0, groups=[group])


def on_the_odd_ranks(group: ProcessGroup, sp: bool) -> tuple[Tensor, Tensor] | None:
    """The ranks 1 and 3 are 0 and 1 in their group; 0 and 2 take no part."""
    odd = dist.new_group([1, 3])
    if group.rank() % 2 == 0:
        return None
    with no_default_group():
        return step(odd, sp)


@pytest.mark.parametrize("sp", [False, True])
def test_a_step_needs_no_group_but_its_own(ranks: RankPool, sp: bool) -> None:
    expected = step(None, False)
    results = ranks.run(on_the_odd_ranks, sp)
    assert results[0] is results[2] is None
    for result in (results[1], results[3]):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def backward_on_two_grids(group: ProcessGroup, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor | None]:
    """A layer on all four ranks, fed alike, and one on each pair of ranks, fed half the tokens, in one backward."""
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    pair = group.rank() // 2
    wide = ColumnParallelLinear(HIDDEN, 16, placement=Placement(group), dtype=torch.float64)
    narrow_placement = Placement(pairs[pair], sequence_parallel=True)
    narrow = ColumnParallelLinear(HIDDEN, 16, placement=narrow_placement, dtype=torch.float64)
    for layer in (wide, narrow):
        load_full_(layer, {"weight": weight})
    whole, part = x.clone().requires_grad_(), x.chunk(4)[group.rank()].clone().requires_grad_()
    all_columns = collectives.gather_from_tensor_parallel(wide(whole), group)
    some_tokens = collectives.gather_from_tensor_parallel(narrow(part), pairs[pair])
    ((all_columns * grad).sum() + (some_tokens * grad.chunk(2)[pair]).sum()).backward()
    return [whole.grad, part.grad, wide.weight.grad, narrow.weight.grad]


def test_two_grids_in_one_backward(ranks: RankPool) -> None:
    x, weight, grad = (torch.randn(shape, dtype=torch.float64) for shape in ((8, HIDDEN), (16, HIDDEN), (8, 16)))
    for rank, (whole, part, wide, narrow) in enumerate(ranks.run(backward_on_two_grids, x, weight, grad)):
        torch.testing.assert_close(whole, grad @ weight)
        torch.testing.assert_close(part, (grad @ weight).chunk(4)[rank])
        torch.testing.assert_close(wide, (grad.t() @ x).chunk(4)[rank])
        of_pair = grad.chunk(2)[rank // 2].t() @ x.chunk(2)[rank // 2]
        torch.testing.assert_close(narrow, of_pair.chunk(2)[rank % 2])


ONE_PROCESS = """
import os
import time
import torch
import torch.distributed as dist
from parallel_layers.distributed.async_collectives import all_reduce

def threads():
    return [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(1))
assert any("gloo" in name for name in threads()), threads()
import torch.distributed.nn.functional  # as parts of torch do in passing
dist.destroy_process_group()
ends = time.monotonic() + 20  # the kernel lists a joined thread for a moment more
while any("gloo" in name for name in threads()):
    assert time.monotonic() < ends, threads()

# Another group still works when the process ends.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
all_reduce(torch.ones(1), dist.group.WORLD)
for _ in range(5):
    dist.all_gather([torch.empty(100)], torch.ones(100), async_op=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the threads in /proc")
def test_a_destroyed_group_leaves_no_thread_and_a_process_ends_well_whatever_gloo_still_does() -> None:
    run = subprocess.run([sys.executable, "-c", ONE_PROCESS], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
