"""Prefix sharing: outputs and gradients of every token are as without, and a prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.head import SamplingMask
from parallel_layers.module import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, RouterLosses
from rl_models.calls.prefixes import Prompts
from rl_models.losses import LossTerms

# Prompts of 9, 1 and 6 tokens; one response is empty, one sequence has no prompt in common.
GROUPS = [(9, (4, 1, 6, 3)), (1, (5, 5)), (6, (2, 0)), (12, (7,))]
MOST = 30


def make_batch(**fields: bool) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> Tensor:
        return torch.randint(61, (length,), generator=generator)

    groups = [(length, of_group[:1] if fields.get("alone") else of_group) for length, of_group in GROUPS]
    pairs = [(prompt, draw(n)) for length, of_group in groups for prompt in [draw(length)] for n in of_group]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    rows = [torch.cat(pairs[i]) for i in order]
    batch = Batch.from_sequences(
        rows,
        response_lengths=[len(pairs[i][1]) for i in order],
        weight=[torch.randn(len(row), generator=generator) for row in rows],
    )
    if fields.get("sampling_mask"):
        others = torch.randint(61, (batch.num_tokens, 3), generator=generator)
        kept = torch.cat([batch.tokens[:, None], others], dim=1).tolist()
        drawn = [ids if chosen else [] for ids, chosen in zip(kept, batch.mask.tolist(), strict=True)]
        batch = replace(batch, sampling_mask=SamplingMask.from_rows(drawn))
    return batch


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(sum(output * inputs["weight"] for output in inputs.outputs.values()))


def _local(tensor: Tensor, *, copy: bool = True) -> Tensor:
    own = (tensor.to_local() if is_dtensor(tensor) else tensor).detach()
    return own.clone() if copy else own


def learn(
    group: ProcessGroup,
    path: Path,
    kind: Any,
    dims: ParallelDims,
    fields: dict[str, bool],
    backend: str = "transformers",
    options: dict[str, Any] | None = None,
) -> list[tuple[list[Tensor], dict[str, Tensor], int]]:
    """Return outputs, gradients and the tokens computed by the predictions, without and with shared prefixes."""
    found = []
    for shares in (False, True):
        worker = kind.from_pretrained(
            path, backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu", share_prefixes=shares,
            max_tokens_per_micro_batch=MOST, **options or {},
        )  # fmt: skip
        if kind is not Actor and hasattr(worker.engine.module, "score"):
            with torch.no_grad():
                _local(worker.engine.module.score.weight, copy=False).fill_(0.3)
        batch = make_batch(**fields)
        batch = batch.select(range(worker.grid.rank("dp"), len(batch), dims.dp))
        computed: list[int] = []
        norms = [module for name, module in worker.engine.module.named_modules() if name.endswith("input_layernorm")]
        handle = norms[0].register_forward_hook(
            lambda module, args, out, computed=computed: computed.append(args[0].shape[-2])
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


def assert_as_without(results: list[list[tuple[list[Tensor], dict[str, Tensor], int]]], error: float) -> None:
    """Gradients of all parameters are compared, relative to the largest of a parameter where that is above 1."""
    for (outputs, gradients, tokens), (ours, own, fewer) in results:
        for mine, theirs in zip(ours, outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=error)
        for name, gradient in gradients.items():
            atol = error * max([1.0, *gradient.abs().flatten().tolist()])
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=atol, msg=f"{name}")
        assert any(bool(gradient.any()) for gradient in gradients.values())
        assert fewer <= tokens


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
    assert_as_without(results, 1e-5)
    assert all(fewer < tokens for (_, _, tokens), (_, _, fewer) in results)


# Models whose attention differs: grouped heads, a window, latents, sinks with a window; and a mixture of experts.
MLA = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
       "num_key_value_heads": 4, "first_k_dense_replace": 2}  # fmt: skip
ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "window": ("qwen2", {}),
    "latent": ("deepseek", MLA),
    "sinks": ("gpt-oss", {}),
    "mixture": ("mixture", {}),
}
ROUTED = {"router_losses": RouterLosses(balance=0.1, z=0.1)}
NATIVE: dict[str, tuple[str, Any, ParallelDims, dict[str, bool], dict[str, Any]]] = {
    "grouped-mask": ("grouped", Actor, ParallelDims(), {"sampling_mask": True}, {}),
    "window-tp": ("window", Actor, ParallelDims(tp=2), {}, {"sequence_parallel": False}),
    "grouped-sp-recompute": ("grouped", ActorCritic, ParallelDims(tp=2), {}, {"recompute": "full"}),
    "grouped-pp": ("grouped", ActorCritic, ParallelDims(pp=2), {"sampling_mask": True}, {}),
    "latent": ("latent", Actor, ParallelDims(), {}, {}),
    "sinks": ("sinks", Actor, ParallelDims(), {}, {}),
    "mixture": ("mixture", Actor, ParallelDims(), {}, {}),
    "latent-sp": ("latent", Actor, ParallelDims(tp=2), {}, {"tiled_mlp": 2}),
    "latent-pp-tp": ("latent", Critic, ParallelDims(pp=2, tp=2), {}, {"recompute": "selective"}),
    "window-sp-dp": ("window", ActorCritic, ParallelDims(dp=2, tp=2), {"sampling_mask": True}, {}),
    "sinks-sp-pp": ("sinks", Actor, ParallelDims(pp=2, tp=2), {}, {"offload_activations": True}),
    "mixture-ep-sp": ("mixture", Actor, ParallelDims(dp=2, tp=2, ep=2), {}, {"recompute": "full"}),
    "mixture-losses": ("mixture", Actor, ParallelDims(tp=2), {"alone": True}, ROUTED),
    "mixture-pp": ("mixture", ActorCritic, ParallelDims(pp=2), {}, {}),
}
QUICK = ("grouped-mask", "grouped-sp-recompute", "grouped-pp")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NATIVE]
)
def test_native_numbers_are_as_without(ranks: RankPool, tiny: Callable[..., Path], case: str) -> None:
    attention, kind, dims, fields, options = NATIVE[case]
    model, changes = ATTENTIONS[attention]
    results = ranks.run(learn, tiny(model, **changes), kind, dims, fields, "parallel", options, world=dims.world_size)
    assert_as_without(results, 1e-5)
    if fields.get("alone"):
        return
    assert all(fewer < tokens for (_, _, tokens), (_, _, fewer) in results)
    if dims == ParallelDims():
        # Of the first group, 9 + 4 + 1 + 6 + 3 = 23 tokens, and the same of the others.
        assert [tokens for *_, tokens in results[0]] == [95, 23 + 11 + 8 + 19]


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


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        ("mixture", {"router_losses": RouterLosses(sequence_balance=0.1)}, "router_losses=.*: a response would count"),
        ("llama", {"tp_invariant": True}, "share_prefixes=True excludes tp_invariant=True"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    tiny: Callable[..., Path], model: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Actor.from_pretrained(tiny(model), device="cpu", share_prefixes=True, **options)


def refused_by_context(group: ProcessGroup, path: Path) -> str:
    with pytest.raises(ValueError, match=r"share_prefixes=True does not go with cp=2: .*; use tp or pp") as error:
        Actor.from_pretrained(
            path, dims=ParallelDims(cp=2), mesh=mesh_of(ParallelDims(cp=2)), device="cpu", share_prefixes=True
        )
    return str(error.value)


def test_context_parallelism_is_refused_by_name(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    first, second = ranks.run(refused_by_context, tiny("llama"), world=2)
    assert first == second


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_routing_is_refused_by_name(tiny: Callable[..., Path], backend: str) -> None:
    actor = Actor.from_pretrained(tiny("mixture"), backend=backend, device="cpu", share_prefixes=True)
    with pytest.raises(ValueError, match="share_prefixes=True does not go with record_routing=True"):
        actor.predict(make_batch(), record_routing=True)
