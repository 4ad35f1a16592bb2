"""Prefix sharing: outputs and gradients of every token are as without, and a prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.sharding import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic
from rl_models.losses import LossTerms
from rl_models.workers.prefixes import Prompts

# Prompts of 9, 1 and 6 tokens; one response is empty, one sequence has no prompt in common.
GROUPS = [(9, (4, 1, 6, 3)), (1, (5, 5)), (6, (2, 0)), (12, (7,))]
MOST = 30


def make_batch(**fields: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> Tensor:
        return torch.randint(61, (length,), generator=generator)

    pairs = [(prompt, draw(n)) for length, of_group in GROUPS for prompt in [draw(length)] for n in of_group]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    rows = [torch.cat(pairs[i]) for i in order]
    batch = Batch.from_sequences(
        rows,
        response_lengths=[len(pairs[i][1]) for i in order],
        weight=[torch.randn(len(row), generator=generator) for row in rows],
    )
    if fields.get("sampling_mask"):
        others = torch.randint(61, (batch.num_tokens, 3), generator=generator)
        others[others == batch.tokens[:, None]] = -1
        kept = torch.cat([batch.tokens[:, None], others], dim=1).int()
        batch = batch.with_fields(sampling_mask=torch.where(batch.mask[:, None], kept, -1))
    return batch


def loss(*arguments: Any) -> LossTerms:
    *outputs, part = arguments
    return LossTerms(sum(output * part["weight"] for output in outputs))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach().clone()


def learn(
    group: ProcessGroup, path: Path, kind: Any, dims: ParallelDims, fields: dict[str, bool]
) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    """Return outputs, gradients and the tokens computed by the predictions, without and with shared prefixes."""
    found = []
    for shares in (False, True):
        worker = kind.from_pretrained(
            path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu", share_prefixes=shares,
            max_tokens_per_micro_batch=MOST,
        )  # fmt: skip
        if kind is Critic:
            with torch.no_grad():
                worker.engine.module.score.weight.fill_(0.3)
        batch = make_batch(**fields)
        batch = batch.select(range(worker.grid.rank("dp"), len(batch), dims.dp))
        computed: list[int] = []
        embedding = worker.engine.module.get_input_embeddings()
        handle = embedding.register_forward_pre_hook(
            lambda _, args, computed=computed: computed.append(args[0].numel())
        )
        outputs = list(worker.predict(batch, temperature=1.3).values())
        handle.remove()
        gradients: dict[str, Tensor] = {}

        def step(*_: Any, worker: Any = worker, gradients: dict[str, Tensor] = gradients) -> float:
            gradients |= {name: _local(p.grad) for name, p in worker.engine.module.named_parameters()}
            return 0.0

        worker.optimizer.step = step
        worker.update(batch, loss, temperature=1.3)
        found.append((outputs, gradients, sum(computed)))
    return found


@pytest.mark.parametrize(
    ("model", "kind", "dims", "fields"),
    [
        ("llama", Actor, ParallelDims(), {"sampling_mask": True}),
        pytest.param("qwen2", Actor, ParallelDims(cp=2), {}, marks=pytest.mark.slow),
        pytest.param("llama", Critic, ParallelDims(dp=2), {}, marks=pytest.mark.slow),
        pytest.param("mixture", Actor, ParallelDims(dp=2), {}, marks=pytest.mark.slow),
    ],
    ids=["sampling mask", "window-cp", "critic-dp", "mixture-dp"],
)
def test_numbers_are_as_without(
    ranks: RankPool, tiny: Callable[..., Path], model: str, kind: Any, dims: ParallelDims, fields: dict[str, bool]
) -> None:
    results = ranks.run(learn, tiny(model), kind, dims, fields, world=dims.world_size)
    for (outputs, gradients, tokens), (ours, own, fewer) in results:
        for mine, theirs in zip(ours, outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        for name, gradient in gradients.items():
            atol = 2e-5 * max(1.0, float(gradient.norm()))
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=atol, msg=name)
        assert fewer < tokens
    if dims == ParallelDims():
        # Of the first group, 9 + 4 + 1 + 6 + 3 = 23 tokens, and the same of the others.
        assert (tokens, fewer) == (95, 23 + 11 + 8 + 19)


def test_prompts_are_found_and_divided() -> None:
    batch = make_batch()
    prompts = Prompts.of(batch, MOST)
    lengths = dict(zip(prompts.numbers, prompts.lengths, strict=True))
    assert sorted(lengths.values()) == sorted(length for length, _ in GROUPS)[:4]
    assert sum(prompts.computed) == 61
    # A unit of 16 tokens holds the prompt of 9 and one or two responses.
    small = Prompts.of(batch, 16)
    for unit in set(small.units):
        inside = [n for n, each in enumerate(small.units) if each == unit]
        assert sum(small.computed[n] for n in inside) <= max(16, *(batch.lengths[n] for n in inside))
    assert len(set(small.units)) > len(set(prompts.units))
    chosen = [n for n, number in enumerate(prompts.numbers) if number == prompts.numbers[0]]
    (shared,) = prompts.of_micro_batch(chosen)
    assert shared == (prompts.lengths[0], tuple(range(len(chosen))))


def test_pairs_stay_together_and_share_their_prompt() -> None:
    batch = Batch.from_pairs([[1, 2, 3], [1, 2, 3]], [[4], [5]], [[6, 7], [8]])
    prompts = Prompts.of(batch, 4)
    assert prompts.units == [0, 0, 1, 1]
    assert [prompt.sequences for prompt in prompts.of_micro_batch([0, 1, 2, 3])] == [(0, 1), (2, 3)]
    assert prompts.computed == [4, 2, 4, 1]


def test_routing_is_refused_by_name(tiny: Callable[..., Path]) -> None:
    actor = Actor.from_pretrained(tiny("mixture"), backend="transformers", device="cpu", share_prefixes=True)
    with pytest.raises(ValueError, match="share_prefixes=True does not go with record_routing=True"):
        actor.predict(make_batch(), record_routing=True)
