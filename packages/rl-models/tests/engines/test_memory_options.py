"""Options that save memory: log-probs and all gradients are those without the option, on every backend that has it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.sharding import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch
from rl_models.losses import LossTerms


class Found(NamedTuple):
    """The log-probs and gradients of one rank, and how often each part of the decoder ran in the update."""

    log_probs: Tensor
    gradients: dict[str, Tensor]
    calls: dict[str, int]


def loss(log_probs: Tensor, entropy: Tensor, part: Batch) -> LossTerms:
    return LossTerms(log_probs * part["weight"] + entropy)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in (11, 1, 17, 6)]
    return Batch.from_sequences(rows, weight=[torch.randn(len(row), generator=generator) for row in rows])


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach().clone()


def _learn(path: Path, backend: str, dims: ParallelDims, options: dict[str, Any]) -> Found:
    actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu", **options)
    batch = make_batch()
    batch = batch.select(range(actor.grid.rank("dp"), len(batch), dims.dp))
    if actor.engine.routed_layers:
        # Experts that no router would choose.
        experts = torch.tensor([0, 3]).expand(batch.num_tokens, len(actor.engine.routed_layers), 2)
        batch = batch.with_fields(routing=experts.to(torch.int16))
    log_probs = actor.log_probs(batch).log_probs
    calls: Counter[str] = Counter()
    for name, module in actor.engine.module.named_modules():
        if name.endswith(("q_proj", "qkv_proj", "linear_qkv", "mlp.down_proj", "mlp.experts", "linear_fc2")):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    gradients: dict[str, Tensor] = {}

    def step(*_: Any) -> float:
        for name, parameter in actor.engine.module.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradients[name] = _local(parameter.grad if gradient is None else gradient)
        return 0.0

    actor.optimizer.step = step  # type: ignore[method-assign]
    actor.update(batch, loss)
    return Found(log_probs, gradients, dict(calls))


def both(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, options: list[dict[str, Any]]
) -> list[Found]:
    """Return what this rank finds without an option, and with each of the options."""
    with cpu_stand_in() if backend == "megatron" else contextlib.nullcontext():
        return [_learn(path, backend, dims, each) for each in ({}, *options)]


def parts(found: Found, *, mlp: bool = False) -> set[str]:
    """Return the names of the parts that were counted, or of those of MLPs and mixtures alone."""
    return {name for name in found.calls if not mlp or name.endswith(("down_proj", "experts", "linear_fc2"))}


@pytest.mark.parametrize(
    ("backend", "model", "dims"),
    [
        ("transformers", "llama", ParallelDims(dp=2)),
        ("transformers", "mixture", ParallelDims(cp=2)),
        ("megatron", "llama", ParallelDims(tp=2)),
        pytest.param("megatron", "mixture", ParallelDims(ep=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recomputed_numbers_are_the_same_bits(
    ranks: RankPool, tiny: Callable[..., Path], backend: str, model: str, dims: ParallelDims
) -> None:
    choices = ["full", "selective", *([[1]] if backend == "transformers" else [])]
    options = [{"recompute": choice} for choice in choices]
    for plain, full, selective, *one in ranks.run(both, tiny(model), backend, dims, options, world=2):
        for found in (full, selective, *one):
            assert torch.equal(found.log_probs, plain.log_probs)
            assert all(torch.equal(found.gradients[name], gradient) for name, gradient in plain.gradients.items())
        for found, twice in zip(
            (full, selective, *one),
            (parts(plain), parts(plain, mlp=True), {name for name in parts(plain) if ".1." in name}),
            strict=False,
        ):
            assert twice
            assert {name: count / plain.calls[name] for name, count in found.calls.items()} == {
                name: 2 if name in twice else 1 for name in plain.calls
            }


def test_megatron_recomputes_no_layers_by_number(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"does not offer recompute=\[1\]; use 'full' or 'selective', or backend="):
        ranks.run(both, tiny("llama"), "megatron", ParallelDims(), [{"recompute": [1]}], world=1)
