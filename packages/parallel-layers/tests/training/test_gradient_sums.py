"""sum_norm_gradients_once: the unsharded model's gradients, one all-reduce for all norms and micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_layers import DecoderConfig, DecoderLayer, ParallelDims, Placement
from parallel_layers.invariant import tp_invariant
from parallel_layers.module.sharding import blocks_of
from parallel_layers.testing import RankPool
from parallel_layers.training import gradient_sums
from parallel_layers.training.gradient_sums import sum_norm_gradients_once

TOKENS, HIDDEN, BOUNDS = 8, 32, torch.tensor([0, 5, 8], dtype=torch.int32)
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
# Norms of one head ("head") and of all heads ("full"): each layer has four norms, of which the backward sums one each.
LAYERS = [DecoderConfig(**SIZES, qk_norm=kind) for kind in ("head", "full")]
NORMS, OTHERS = 4 * len(LAYERS) + 1, 4  # the all-reduces of a backward: norms' gradients; "full" norms' mean squares


class Model(nn.Module):
    """Some layers and the norm behind them, with the same weights on every grid."""

    def __init__(self, group: ProcessGroup | None, count: int = len(LAYERS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, placement = group, Placement(group, group is not None)
        self.layers = nn.ModuleList(DecoderLayer(config, placement=placement) for config in LAYERS[:count])
        self.norm = LAYERS[0].build_norm(placement)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)

    def forward(self, micro_batch: Tensor) -> Tensor:
        """The sum of this rank's tokens of the outputs, each with a weight."""
        part = slice(None)
        if self.group is not None:
            part = slice(TOKENS // 2 * self.group.rank(), TOKENS // 2 * (self.group.rank() + 1))
        angles = torch.arange(TOKENS)[:, None] * torch.ones(4).repeat(2)
        hidden = micro_batch[0, part]
        for layer in self.layers:
            hidden = layer(hidden, (angles.cos(), angles.sin()), BOUNDS, 5)
        return (self.norm(hidden) * micro_batch[1, part]).sum()


def micro_batches(count: int) -> Tensor:
    return torch.randn(count, 2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def check(model: Model, count: int) -> None:
    """Compare every parameter's gradient with its part of the undivided model's, summed over the micro-batches."""
    expected = Model(None, len(model.layers))
    for micro_batch in micro_batches(count):
        expected(micro_batch).backward()
    for path, owner in model.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            gradient: Any = parameter.grad
            full = expected.get_submodule(path).get_parameter(name).grad
            assert full is not None
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for local, where in blocks_of(owner, name):
                torch.testing.assert_close(gradient[local], full[where], rtol=1e-4, atol=1e-5)


def all_reduces_in(profile: torch.profiler.profile) -> int:
    # `profile.events()` orders thousands of events first, which takes seconds.
    return sum(event.name() == "c10d::allreduce_" for event in profile.profiler.kineto_results.events())


def update(group: ProcessGroup, count: int, together: bool) -> tuple[int, list[Tensor]]:
    """Return how many all-reduces an update takes, and the gradients of the norms."""
    model = Model(group)
    context = sum_norm_gradients_once(model, group) if together else nullcontext()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, context:
        for micro_batch in micro_batches(count):
            model(micro_batch).backward()
    check(model, count)
    gradients = [p.grad for name, p in model.named_parameters() if "norm" in name and p.grad is not None]
    return all_reduces_in(profile), gradients


def update_view(group: ProcessGroup) -> None:
    model = Model(group, 1)
    view = tp_invariant(model)
    with sum_norm_gradients_once(view, group):
        for micro_batch in micro_batches(2):
            view(micro_batch).backward()
    check(model, 2)


def test_the_norms_of_an_invariant_view_are_summed_once(ranks: RankPool) -> None:
    ranks.run(update_view, world=2)


def test_one_all_reduce_gives_the_same_bits(ranks: RankPool) -> None:
    apart, together = (ranks.run(update, 1, flag, world=2) for flag in (False, True))
    for (more, expected), (less, found) in zip(apart, together, strict=True):
        assert (more, less) == (NORMS + OTHERS, 1 + OTHERS)
        assert len(found) == NORMS
        assert all(map(torch.equal, found, expected))


def test_one_all_reduce_for_all_micro_batches(ranks: RankPool) -> None:
    first, second = ranks.run(update, 3, True, world=2)
    assert first[0] == second[0] == 1 + 3 * OTHERS
    assert all(map(torch.equal, first[1], second[1]))


def after_an_earlier_backward(group: ProcessGroup, limit: int) -> None:
    """Gradients of more than `limit` elements are sent apart."""
    model = Model(group)
    first, *others = micro_batches(3)
    model(first).backward()
    with pytest.MonkeyPatch.context() as patch, sum_norm_gradients_once(model, group):
        patch.setattr(gradient_sums, "_TOGETHER", limit)
        for micro_batch in others:
            model(micro_batch).backward()
    check(model, 3)
    model.zero_grad()
    for micro_batch in micro_batches(3):  # norms outside sum their own gradients again
        model(micro_batch).backward()
    check(model, 3)


def test_earlier_gradients_are_complete(ranks: RankPool) -> None:
    ranks.run(after_an_earlier_backward, 8, world=2)


def under_fsdp(group: ProcessGroup) -> int:
    """Each of two data-parallel ranks runs two of four micro-batches; the second backward exchanges gradients."""
    mesh = ParallelDims(dp=2, tp=2).build_mesh("cpu")
    tp = mesh.get_group("tp")
    model: Any = Model(tp)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    own = micro_batches(4).chunk(2)[mesh.get_local_rank("dp")]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):  # the second adds to the gradients of the first
            with sum_norm_gradients_once(model, tp):
                for number, micro_batch in enumerate(own):
                    model.set_requires_gradient_sync(number == 1)
                    model(micro_batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    check(model, 4)
    return all_reduces_in(profile)


def test_fsdp_sums_over_its_ranks_first(ranks: RankPool) -> None:
    assert ranks.run(under_fsdp, world=4) == [2 * (1 + 2 * OTHERS)] * 4
