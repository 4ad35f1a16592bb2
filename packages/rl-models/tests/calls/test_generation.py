"""Generation: the same tokens on every grid and backend, log-probs that `log_probs` confirms, stops, and lengths."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from ckpt import Checkpoint
from megatron_utils.testing import cpu_stand_in
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import CacheOptions, Decoding
from parallel_models.engine import max_positions
from parallel_models.generation import STEPS
from rl_models import Actor, Batch, LoraOptions
from rl_models.backends import BACKENDS
from rl_models.losses import LossTerms

PROMPTS = [[1, 5, 7], [3], [9, 9, 9, 9, 2]]


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Path]) -> dict[str, Path]:
    """A plain model, and a tied one with a sliding window."""
    return {name: tiny(name, initializer_range=0.3) for name in ("llama", "qwen2")}


@contextmanager
def loaded(path: Path, dims: ParallelDims, backend: str, **options: Any) -> Iterator[Actor]:
    """An actor, to be used inside."""
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        yield Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu", **options)


def generate(
    group: ProcessGroup, path: Path, dims: ParallelDims, backend: str, cases: list[dict[str, Any]], **options: Any
) -> list[Batch]:
    """Return what one actor draws with each of several options; adapters have numbers that change the draws."""
    batches = []
    with loaded(path, dims, backend, **options) as actor:
        for name, parameter in actor.engine.module.named_parameters():
            if name.endswith("lora.B"):
                parameter.data.fill_(0.1)
        for case in cases:
            batch = actor.generate(PROMPTS, **case)
            computed = actor.log_probs(batch, temperature=case.get("temperature") or 1.0).log_probs
            first = torch.full_like(batch.mask, actor.grid.rank("dp") == 0)
            batches.append(batch.with_fields(computed=computed, first=first))
    return batches


LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
CASES = {
    "sampled": {"max_new_tokens": 9, "temperature": 0.7, "n": 2, "seed": 5, "stop_ids": [4, 8, 15, 16]},
    "greedy": {"max_new_tokens": 6, "temperature": 0.0},
    "truncated": {"max_new_tokens": 6, "top_k": 5, "top_p": 0.8, "seed": 1},
    "masked": {"max_new_tokens": 6, "top_p": 0.9, "min_p": 0.02, "keep_sampling_mask": True},
}
PLACES = {
    "qwen2": [
        ("parallel", ParallelDims(tp=2)),
        ("transformers", ParallelDims(cp=2)),
        ("megatron", ParallelDims(tp=2)),
    ],
    "llama": [
        ("parallel", ParallelDims(cp=2)),
        ("megatron", ParallelDims(pp=2)),
    ],
}
MORE_PLACES = {
    "qwen2": [
        ("parallel", ParallelDims(pp=2)),
        ("parallel", ParallelDims(tp=4)),
        ("parallel", ParallelDims(cp=2)),
        ("megatron", ParallelDims(pp=2)),
        ("megatron", ParallelDims(cp=2)),
    ],
    "llama": [
        ("parallel", ParallelDims(pp=2)),
        ("transformers", ParallelDims()),
        ("megatron", ParallelDims()),
    ],
}
OF_FOUR = [ParallelDims(tp=4), ParallelDims(tp=2, pp=2), ParallelDims(tp=2, cp=2), ParallelDims(pp=2, cp=2)]
OF_FOUR_WITH_EXPERTS = [
    *(ParallelDims(tp=4), ParallelDims(tp=2, ep=2), ParallelDims(dp=2, tp=2, ep=2), ParallelDims(dp=4, ep=4)),
    *(ParallelDims(tp=2, pp=2, ep=2), ParallelDims(dp=2, ep=2, pp=2), ParallelDims(dp=2, cp=2, ep=4)),
]
GRIDS_OF_FOUR = {
    "qwen2": [*OF_FOUR, ParallelDims(dp=2, tp=2), ParallelDims(dp=2, pp=2), ParallelDims(dp=2, cp=2)],
    **dict.fromkeys(("mixture", "gpt-oss", "deepseek"), OF_FOUR_WITH_EXPERTS),
    "llama with adapters": OF_FOUR,
    "mixture with adapters": OF_FOUR_WITH_EXPERTS[2:5],
}
ADAPTERS = LoraOptions(4, targets=["all-linear", "experts.gate_up_proj", "experts.down_proj"])


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("llama", PLACES["llama"]),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("qwen2", PLACES["qwen2"]), *MORE_PLACES.items())),
        *(
            pytest.param(name, [("parallel", dims)], marks=pytest.mark.slow)
            for name, grids in GRIDS_OF_FOUR.items()
            for dims in grids
        ),
    ],
    ids=str,
)
def test_all_grids_and_backends_draw_the_same_tokens(
    ranks: RankPool, tiny: Callable[..., Path], model: str, places: list[tuple[str, ParallelDims]]
) -> None:
    cases = list(CASES.values())
    name, _, adapted = model.partition(" with ")
    lora = ADAPTERS if name == "mixture" else LoraOptions(4)
    options: dict[str, Any] = {"lora": lora} if adapted else {}
    path = tiny(name, initializer_range=0.3, **(LATENT if name == "deepseek" else {}))
    (expected,) = ranks.run(generate, path, ParallelDims(), "parallel", cases, world=1, **options)
    for first, case in zip(expected, cases, strict=True):
        assert len(first) == len(PROMPTS) * case.get("n", 1)
        prompts = [prompt for prompt in PROMPTS for _ in range(case.get("n", 1))]
        for tokens, response, prompt in zip(first.split(), first.responses(), prompts, strict=True):
            assert tokens.tolist() == prompt + response.tolist()
            stops = [i for i, token in enumerate(response.tolist()) if token in case.get("stop_ids", [])]
            assert len(response) == (stops[0] + 1 if stops else case["max_new_tokens"])
    for backend, dims in places:
        for found in ranks.run(generate, path, dims, backend, cases, world=dims.world_size, **options):
            for batch, first, name in zip(found, expected, CASES, strict=True):
                # Further data-parallel ranks draw from streams of their own.
                if batch["first"].all() or name == "greedy":
                    assert torch.equal(batch.tokens, first.tokens), (dims, backend, name)
                    assert batch.lengths == first.lengths
                    torch.testing.assert_close(batch["log_probs"], first["log_probs"], rtol=5e-6, atol=1e-5)
                    if first.sampling_mask is not None:
                        assert batch.sampling_mask is not None
                        assert batch.sampling_mask.tolist() == first.sampling_mask.tolist()
                drawn = torch.where(batch.mask, batch["computed"], 0)
                # fp32 rounds a log-prob relative to its size, in other places on other CPUs.
                torch.testing.assert_close(batch["log_probs"], drawn, rtol=5e-6, atol=1e-5)


def test_greedy_equals_transformers_own_generation(ranks: RankPool, models: dict[str, Path]) -> None:
    ((batch,),) = ranks.run(generate, models["llama"], ParallelDims(), "parallel", [CASES["greedy"]], world=1)
    model = AutoModelForCausalLM.from_pretrained(models["llama"]).eval()
    for prompt, tokens in zip(PROMPTS, batch.split(), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens.tolist() == expected[0].tolist()


def generate_on_dp(group: ProcessGroup, path: Path, backend: str) -> list[Any]:
    """One data-parallel rank has work for longer than the other; one has none at all."""
    rank = group.rank()
    with loaded(path, ParallelDims(dp=2), backend) as actor:
        same = actor.generate(PROMPTS, max_new_tokens=6, seed=3)
        uneven = actor.generate(PROMPTS[: 2 * rank], max_new_tokens=2 + 5 * rank, seed=3)
        log_probs = actor.log_probs(uneven).log_probs
        return [same, uneven.with_fields(computed=log_probs)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_parallel_ranks_draw_differently_and_need_not_run_in_step(
    ranks: RankPool, models: dict[str, Path], backend: str
) -> None:
    (same_0, none), (same_1, two) = ranks.run(generate_on_dp, models["llama"], backend, world=2)
    assert not torch.equal(same_0.tokens, same_1.tokens)
    assert (len(none), len(two)) == (0, 2)
    drawn = torch.where(two.mask, two["computed"], 0)
    torch.testing.assert_close(two["log_probs"], drawn, rtol=0, atol=1e-5)


def seeds(group: ProcessGroup, path: Path, backend: str) -> list[Tensor]:
    with loaded(path, ParallelDims(), backend) as actor:
        return [actor.generate(PROMPTS, max_new_tokens=8, seed=seed).tokens for seed in (0, np.int64(0), 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_decides_the_draws(ranks: RankPool, models: dict[str, Path], backend: str) -> None:
    ((first, again, other),) = ranks.run(seeds, models["llama"], backend, world=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def watch_decoding(
    group: ProcessGroup, path: Path, dims: ParallelDims, backend: str
) -> tuple[Batch, list[int], list[int]]:
    """Return what is generated, the tokens of each pass over prompts, and the places of each step."""
    prefills, steps = list[int](), list[int]()
    with loaded(path, dims, backend) as actor:
        decoding = actor.engine.decoding

        @contextmanager
        def watched(options: CacheOptions) -> Iterator[Decoding]:
            with decoding(options) as inner:

                def forward(packed: PackedSequence, caches: Any, *, logits: bool, visual: Any = ()) -> Tensor:
                    (steps if logits else prefills).append(packed.num_tokens - packed.padding)
                    return inner.forward(packed, caches, logits=logits, visual=visual)

                yield replace(inner, forward=forward)

        actor.engine.decoding = watched
        batch = actor.generate(PROMPTS, max_new_tokens=40, n=16, seed=5, stop_ids=list(range(10)))
        return batch, prefills, steps


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ParallelDims()),
        ("transformers", ParallelDims()),
        pytest.param("parallel", ParallelDims(tp=2), marks=pytest.mark.slow),
        pytest.param("megatron", ParallelDims(pp=2), marks=pytest.mark.slow),
    ],
    ids=["one", "transformers", "tp2", "megatron-pp2"],
)
def test_a_prompt_is_run_once_and_what_has_stopped_is_not_run(
    ranks: RankPool, models: dict[str, Path], backend: str, dims: ParallelDims
) -> None:
    for batch, prefills, steps in ranks.run(watch_decoding, models["llama"], dims, backend, world=dims.world_size):
        longest = max(len(response) for response in batch.responses())
        assert prefills == [sum(len(prompt) - 1 for prompt in PROMPTS)]
        assert longest <= len(steps) < longest + STEPS
        assert steps == sorted(steps, reverse=True)
        assert steps[-1] <= steps[0] // 4


def generate_in_small_room(group: ProcessGroup, path: Path, dims: ParallelDims, backend: str) -> list[Batch]:
    """Return the same draws with ample room, few places, few blocks, and short passes over prompts."""
    prompts = [[1, 5, 7] * 40, [3], [9, 9, 9, 9, 2] * 12]
    how = {"max_new_tokens": 24, "n": 3, "seed": 2, "stop_ids": [4]}
    with loaded(path, dims, backend) as actor:
        whole = actor.generate(prompts, **how)
        few_places = actor.generate(prompts, **how, max_sequences=4)
        with actor.engine.decoding(CacheOptions(1, 1)) as decoding:
            block = sum(cache.block_bytes for cache in decoding.caches)
        few_blocks = actor.generate(prompts, **how, cache_gib=6.5 * block / 2**30)
        actor.max_tokens_per_micro_batch = 16
        return [whole, few_places, few_blocks, actor.generate(prompts, **how, exact=True)]


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ParallelDims()),
        pytest.param("parallel", ParallelDims(tp=2), marks=pytest.mark.slow),
        pytest.param("parallel", ParallelDims(cp=2), marks=pytest.mark.slow),
        pytest.param("megatron", ParallelDims(), marks=pytest.mark.slow),
    ],
    ids=["one", "tp2", "cp2", "megatron"],
)
def test_draws_depend_neither_on_places_nor_on_memory(
    ranks: RankPool, models: dict[str, Path], backend: str, dims: ParallelDims
) -> None:
    """Responses wait for places, share few blocks, are put off when the pool is full, and lose nothing."""
    results = ranks.run(generate_in_small_room, models["llama"], dims, backend, world=dims.world_size)
    for whole, *others in results:
        assert len(whole) == 9
        for other in others:
            assert torch.equal(other.tokens, whole.tokens)
            torch.testing.assert_close(other["log_probs"], whole["log_probs"], rtol=0, atol=1e-5)


def test_too_little_memory_is_named(models: dict[str, Path]) -> None:
    actor = Actor.from_pretrained(models["llama"], device="cpu")
    with pytest.raises(ValueError, match=r"a sequence of 103 tokens takes 2 blocks of .* MiB .*; give more memory"):
        actor.generate([[1, 2, 3]], max_new_tokens=100, cache_gib=1e-6)


@pytest.fixture(scope="session")
def diverged(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that give NaN after the token 9, and after no other."""
    folder = tmp_path_factory.mktemp("diverged")
    for name in ("llama", "mixture"):
        model = AutoModelForCausalLM.from_pretrained(tiny(name))
        model.get_input_embeddings().weight.data[9] = torch.nan
        model.save_pretrained(folder / name)
    return {name: folder / name for name in ("llama", "mixture")}


def fail_to_generate(group: ProcessGroup, path: Path, dims: ParallelDims, backend: str) -> tuple[list[str], Batch]:
    """Return what is said of prompts that only the last data-parallel rank has; the actor then goes on."""
    last = group.rank() == dims.world_size - 1 or dims.dp == 1
    said = []
    with loaded(path, dims, backend) as actor:
        for prompts in ([[1, 5], [3, 9]], [[1], [61]]):
            for options in ({}, {"top_k": 3, "top_p": 0.9}, {"temperature": 0.0}):
                with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches
                    actor.generate(prompts if last else [[2]], max_new_tokens=1, n=2, **options)
                said.append(str(error.value))
        return said, actor.generate([[1, 5]], max_new_tokens=1)


@pytest.mark.parametrize(
    ("model", "dims", "backend"),
    [
        ("llama", ParallelDims(), "parallel"),
        pytest.param("llama", ParallelDims(tp=2), "parallel", marks=pytest.mark.slow),
        ("llama", ParallelDims(pp=2), "parallel"),
        ("llama", ParallelDims(dp=2), "parallel"),
        ("llama", ParallelDims(cp=2), "parallel"),
        pytest.param("mixture", ParallelDims(dp=2, ep=2), "parallel", marks=pytest.mark.slow),
        ("llama", ParallelDims(pp=2), "megatron"),
        pytest.param("mixture", ParallelDims(dp=2, ep=2), "megatron", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_diverged_model_is_named_on_every_rank_and_nothing_hangs(
    ranks: RankPool, diverged: dict[str, Path], model: str, dims: ParallelDims, backend: str
) -> None:
    results = ranks.run(fail_to_generate, diverged[model], dims, backend, world=dims.world_size, timeout=60)
    for rank, (said, after) in enumerate(results):
        other = "rank 1: " if dims.dp * dims.cp == 2 and rank == 0 else ""
        nan = "the model gives NaN or infinite logits after 0 tokens of the responses (prompt, response) "
        assert all(text.startswith(f"{other}{nan}[(1, 0), (1, 1)]: ") for text in said[:3])
        other = other if dims.dp == 2 else ""  # context-parallel ranks get all prompts
        assert all(text.startswith(f"{other}prompt 1: token id 61 ") for text in said[3:])
        assert after["log_probs"].isfinite().all()


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_sequences_beyond_the_models_positions_are_warned_of_once(tiny: Callable[..., Path], backend: str) -> None:
    path = tiny("llama", max_position_embeddings=8)
    beyond = r"a sequence of 12 tokens goes beyond the model's 8 positions \(max_position_embeddings"

    def load() -> Actor:
        return Actor.from_pretrained(path, backend=backend, device="cpu")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The ninth token's own successor is no one's.
        fits = load().generate([[1] * 5], max_new_tokens=4)
        load().log_probs(fits)
    actor = load()
    with pytest.warns(UserWarning, match=beyond):
        longer = actor.generate([[1] * 5], max_new_tokens=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = actor.log_probs(longer).log_probs
    torch.testing.assert_close(longer["log_probs"], torch.where(longer.mask, found, 0), rtol=0, atol=1e-5)
    for call in (
        lambda: load().log_probs(longer),
        lambda: load().update(longer, lambda inputs: LossTerms(-inputs.log_probs)),
    ):
        with pytest.warns(UserWarning, match=beyond):
            call()


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
            },
            128,
        ),
        (  # Llama 3.2's
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (  # Phi-3's
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
            },
            4096,
        ),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"factor": 8.0}}}, 64),
    ],
)
def test_the_positions_of_a_checkpoint(tmp_path: Path, config: dict[str, Any], positions: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max_positions(Checkpoint(tmp_path)) == positions


@pytest.mark.parametrize(
    ("rope", "message"),
    [([1], r"rope_scaling=\[1\] must be an object"), ({"factor": "a"}, "factor='a' must be a number above 0")],
)
def test_rope_parameters_of_a_wrong_type_are_named(rope: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_scaling": rope, "max_position_embeddings": 64}))
    with pytest.raises(ValueError, match=message):
        max_positions(Checkpoint(tmp_path))


def test_a_rotation_that_changes_at_no_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    with pytest.raises(ValueError, match="has neither max_position_embeddings nor original_max_position_embeddings"):
        max_positions(Checkpoint(tmp_path))


def test_a_prompt_with_its_response_has_a_longest_length(models: dict[str, Path]) -> None:
    actor = Actor.from_pretrained(models["llama"], device="cpu")
    bounds = {"max_new_tokens": 2 * STEPS, "max_length": STEPS + 2, "n": 2}
    free, bounded = (actor.generate(PROMPTS, **options) for options in ({**bounds, "max_length": None}, bounds))
    assert bounded.lengths == (STEPS + 2,) * 6
    for whole, part in zip(free.split(), bounded.split(), strict=True):
        assert part.tolist() == whole[: STEPS + 2].tolist()


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_longrope_ends_at_its_original_length(models: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """Beyond it all tokens would rotate otherwise: refused before a pass, by a native model without an actor, too."""
    path = tmp_path / "longrope"
    shutil.copytree(models["llama"], path)
    config = json.loads((path / "config.json").read_text())
    pairs = config["head_dim"] // 2
    rope = {"rope_type": "longrope", "short_factor": [2.0] * pairs, "long_factor": [3.0] * pairs, "rope_theta": 1e4}
    config["rope_parameters"] = {**rope, "original_max_position_embeddings": 12}
    (path / "config.json").write_text(json.dumps(config))
    actor = Actor.from_pretrained(path, backend=backend, device="cpu")
    drawn = actor.generate([[1] * 8], max_new_tokens=9, max_length=12)
    confirmed = actor.log_probs(drawn).log_probs
    torch.testing.assert_close(drawn["log_probs"][8:], confirmed[8:], rtol=0, atol=1e-5)
    message = "a sequence of 13 tokens is longer than 12, the original_max_position_embeddings"
    with pytest.raises(ValueError, match=message):
        actor.log_probs(Batch.from_sequences([[1] * 3, [1] * 13]))
    with pytest.raises(ValueError, match=message):
        actor.generate([[1] * 8], max_new_tokens=5)
    if backend == "parallel":
        model: Any = actor.engine.module
        with pytest.raises(ValueError, match=message):
            model.log_probs(PackedSequence.from_sequences([torch.ones(13, dtype=torch.int64)]))
        with pytest.raises(ValueError, match=message):
            model.new_cache(1, 13)


@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", {"float8": True}), ("mixture", {"float8": True}), ("qwen2", {"float8_cache": True})],
)
def test_float8_changes_the_log_probs_of_responses_a_little(
    tiny: Callable[..., Path], name: str, how: dict[str, Any]
) -> None:
    path = tiny(name, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, initializer_range=0.1)
    actor = Actor.from_pretrained(path, device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 9, "seed": 5}
    fast, rounded = actor.generate(PROMPTS, **options), actor.generate(PROMPTS, **how, **options)
    for batch, most in ((fast, 1e-4), (rounded, 0.2)):
        apart = (batch["log_probs"] - actor.log_probs(batch).log_probs)[batch.mask].abs()
        assert apart.max() < most
    assert apart.mean() > 1e-4
    for again, batch in zip(actor.generate(PROMPTS, **options).split(), fast.split(), strict=True):
        assert torch.equal(again, batch)  # the weights have stayed


@pytest.mark.parametrize("backend", ["transformers", "megatron"])
def test_backends_without_float8_refuse_it(ranks: RankPool, models: dict[str, Path], backend: str) -> None:
    with pytest.raises(ValueError, match=f"float8=True needs backend='parallel', not '{backend}'"):
        ranks.run(generate, models["llama"], ParallelDims(), backend, [{"max_new_tokens": 2, "float8": True}], world=1)


def test_mistakes_are_refused(models: dict[str, Path]) -> None:
    actor = Actor.from_pretrained(models["llama"], device="cpu")
    for prompts, options, message in (
        ([[1], []], {}, r"prompts \[1\] are empty"),
        ([1, 2], {}, r"prompt 0 must be \[L\] token ids, got \[\] torch.int64"),
        ([[1], [61]], {}, "token id 61 .* is outside the vocabulary"),
        ([[1]], {"n": 0}, "n=0 must be at least 1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([[1]], {"top_p": 1.5}, "top_p=1.5 must lie in"),
        ([], {"temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ("once", {}, "expected one list of token ids for each prompt, got str 'once'; encode texts first"),
        (["once"], {}, r"prompt 0 must be \[L\] token ids, got the text 'once'; encode texts first"),
        ([{"input_ids": [1]}], {}, r"prompt 0 must be \[L\] token ids, got dict"),
        ([[1]], {"stop_ids": 2}, r"stop_ids=2 must be a list of token ids, such as stop_ids=\[2\]"),
        ([[1]], {"stop_ids": ["</s>"]}, "stop_ids='</s>' must be an integer, not str"),
        ([[1]], {"temperature": "1"}, "temperature='1' must be a finite number, not str"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer, not float"),
        ([[1]], {"top_k": "5"}, "top_k='5' must be an integer, not str"),
        ([[1], [1] * 5], {"max_length": 5}, "a prompt of 5 tokens leaves no token for a response; max_length=5"),
        ([[1]], {"cache_gib": 0}, "cache_gib=0 must be positive"),
        ([[1]], {"exact": True, "float8": True}, "exact=True computes as log_probs does, and float8=True does not"),
        ([[1]], {"seed": None}, "seed=None must be an integer, not NoneType"),
        ([[1], [1] * 9999], {}, r"prompt 1 has 9999 tokens, more than the model's \d+ positions"),
    ):
        with pytest.raises(ValueError, match=message):
            actor.generate(prompts, **{"max_new_tokens": 2, **options})


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_k": 5}, {"temperature": 0.0, "exact": True}], ids=str)
def test_an_fp64_model_generates(models: dict[str, Path], options: dict[str, Any]) -> None:
    actor = Actor.from_pretrained(models["llama"], device="cpu", dtype=torch.float64)
    batch = actor.generate(PROMPTS, max_new_tokens=6, n=2, **options)
    computed = actor.log_probs(batch, temperature=options["temperature"] or 1.0).log_probs
    assert batch["log_probs"].dtype == torch.float32
    torch.testing.assert_close(batch["log_probs"], torch.where(batch.mask, computed, 0).float(), rtol=0, atol=1e-6)
