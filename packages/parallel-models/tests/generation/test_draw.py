"""The draws of responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_models import CacheOptions, EngineOptions, Grid, load_engine
from parallel_models.generation import ResponseStream, continuous_batching, decoding, draw, experts as gathering
from parallel_models.generation.continuous_batching import Responses
from parallel_models.generation.options import GenerationOptions
from parallel_models.generation.session import GenerationSession
from parallel_models.training import ParallelEngine
from parallel_models.training.decoding_forward import DecodingForward


def test_a_seed_gives_the_numbers_that_it_always_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that go on with a newer release draw the same responses; data-parallel ranks differ."""
    prompts: Any = [None, None]
    monkeypatch.setattr(draw, "_draw", lambda engine, rows, uniforms, *_: uniforms)
    for dp, seed in ((0, 2902805962516761537), (1, 2794019225575547101)):
        dims = SimpleNamespace(cp=1)
        grid: Any = SimpleNamespace(dims=dims, device=torch.device("cpu"), data_mesh=None, group=lambda _: None)
        grid.rank = {"dp": dp, "cp": 0}.get
        engine: Any = SimpleNamespace(grid=grid)
        uniforms: Any = draw.draw_responses(engine, prompts, GenerationOptions(3, n=2), 99)
        assert torch.equal(uniforms, torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)))


def load(path: Path, dims: ParallelDims, **options: Any) -> ParallelEngine:
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    return load_engine(str(path), "causal_lm", Grid.build(dims, device="cpu", mesh=mesh), EngineOptions(**options))


def counted(name: str, passes: list[str]) -> Callable[..., Any]:
    """Return a method of `DecodingForward` that notes its calls."""
    method = getattr(DecodingForward, name)

    def call(*arguments: Any, **options: Any) -> Any:
        passes.append(name)
        return method(*arguments, **options)

    return call


def draw_all(engine: ParallelEngine, experts: str) -> tuple[Responses, int]:
    """Draw more responses on the first data-parallel rank than on others; return also the passes of this rank."""
    passes = list[str]()
    prompts = [draw.Prompt(torch.tensor(ids)) for ids in ([1, 5, 7], [3], [9, 9, 2])][engine.grid.rank("dp") * 2 :]
    options: Any = {"n": 3, "max_sequences": 4, "stop_ids": range(1, 6), "experts": experts}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__call__", "step_chunk"):
            patch.setattr(DecodingForward, name, counted(name, passes))
        patch.setattr(continuous_batching, "_FEWEST_SLOTS", 1)  # the ranks have other numbers of responses at work
        return draw.draw_responses(engine, prompts, GenerationOptions(12, **options), 99), len(passes)


def draw_in_both_ways(
    group: ProcessGroup, path: Path, dims: ParallelDims
) -> tuple[int, dict[str, tuple[Responses, int]]]:
    engine = load(path, dims)
    return engine.grid.rank("dp"), {experts: draw_all(engine, experts) for experts in ("gather", "exchange")}


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp=2, ep=2),
        *(
            pytest.param(dims, marks=pytest.mark.slow)
            for dims in (
                ParallelDims(tp=2, ep=2),
                ParallelDims(dp=2, tp=2, ep=2),
                ParallelDims(dp=2, tp=2, ep=4),
                ParallelDims(dp=4, ep=2),
                ParallelDims(dp=2, pp=2, ep=2),
            )
        ),
    ],
    ids=str,
)
def test_gathered_experts_draw_what_exchanged_tokens_draw(ranks: RankPool, mixture: Path, dims: ParallelDims) -> None:
    """Both equal one rank; with gathered experts a rank with fewer responses runs fewer passes."""
    expected, _ = draw_all(load(mixture, ParallelDims()), "auto")
    results = ranks.run(draw_in_both_ways, mixture, dims, world=dims.world_size)
    for dp, ways in results:
        for drawn, _ in ways.values():
            assert drawn.lengths == ways["gather"][0].lengths
            for n, length in enumerate(drawn.lengths):
                one, other = (x.log_probs[n, :length] for x in (drawn, ways["gather"][0]))
                assert drawn.tokens[n, :length].tolist() == ways["gather"][0].tokens[n, :length].tolist()
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
                if not dp:  # data-parallel ranks differ in their numbers
                    torch.testing.assert_close(one, expected.log_probs[n, :length], rtol=0, atol=1e-5)
    if dims.dp == 2:
        (_, few), (_, many) = results[-1], results[0]
        assert few["gather"][1] < many["gather"][1]
        assert few["exchange"][1] == many["exchange"][1]


def draw_by_other_numbers(group: ProcessGroup, path: Path, dims: ParallelDims, fault: str) -> str:
    """Return the error of draws for which the last rank has other numbers, or another token."""
    engine, last = load(path, dims), group.rank() == dims.world_size - 1
    prompts = [draw.Prompt(torch.tensor(ids)) for ids in ([1, 5, 7], [3])]
    uniforms = torch.full((2, 2, 40), 0.5)
    with pytest.MonkeyPatch.context() as patch:
        if last and fault == "numbers":
            uniforms[1, 0, 20] = 0.25
        if last and fault == "token":
            patch.setattr(GenerationSession, "_draws_of", other_token(GenerationSession._draws_of))
        with pytest.raises(RuntimeError) as error:
            draw.draw_responses(engine, prompts, GenerationOptions(40, n=2), 99, uniforms)
    return str(error.value)


def other_token(method: Callable[..., Any]) -> Callable[..., Any]:
    def draws(*arguments: Any) -> Any:
        tokens, *others = method(*arguments)
        return torch.cat((tokens[:1] ^ 1, tokens[1:])), *others

    return draws


@pytest.mark.parametrize(
    ("dims", "fault"),
    [
        (ParallelDims(tp=2), "numbers"),
        (ParallelDims(tp=2), "token"),
        pytest.param(ParallelDims(dp=2, tp=2, ep=2), "numbers", marks=pytest.mark.slow),
        pytest.param(ParallelDims(dp=2, tp=2, ep=2), "token", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_draw_differently_are_named_and_nothing_hangs(
    ranks: RankPool, mixture: Path, dims: ParallelDims, fault: str
) -> None:
    for message in ranks.run(draw_by_other_numbers, mixture, dims, fault, world=dims.world_size, timeout=60):
        assert "ranks of one tensor-parallel group have drawn different tokens, or by different numbers" in message


def mistaken(group: ProcessGroup, path: Path) -> list[str]:
    """Generate with prompts that are wrong on the second rank alone."""
    engine, messages = load(path, ParallelDims(dp=2)), list[str]()
    for prompt in ([], [1, 2, 3, 4], [99]):
        with pytest.raises(ValueError, match=r"prompt|vocabulary") as error:
            draw.generate(engine, [prompt if group.rank() else [1]], GenerationOptions(2, max_length=4))
        messages.append(str(error.value))
    assert len(draw.generate(engine, [[1]], GenerationOptions(2, max_length=4))) == 1
    return messages


def test_prompts_that_are_wrong_on_one_rank_are_named_on_all(ranks: RankPool, mixture: Path) -> None:
    """The other ranks drew their responses, and waited for the rank that had raised."""
    for messages in ranks.run(mistaken, mixture, world=2, timeout=30):
        empty, long, outside = messages
        assert "prompts [0] are no rows of token ids" in empty
        assert "a prompt of 4 tokens leaves no token for a response; max_length=4" in long
        assert "token id 99 at index [0] is outside the vocabulary" in outside


def draw_in_float8(group: ProcessGroup | None, path: Path) -> Responses:
    """Draw with experts in FP8, on one rank by rounding them before, so that prompts are computed with them, too."""
    engine = load(path, ParallelDims() if group is None else ParallelDims(dp=2, ep=2))
    with torch.no_grad():
        for name, weight in engine.model.named_parameters() if group is None else ():
            if ".experts." in name:
                scales = 2 ** (weight.abs().amax(-1, keepdim=True) / 448).log2().ceil()
                weight.copy_((weight / scales).to(torch.float8_e4m3fn).float() * scales)
    options = GenerationOptions(
        8, n=3, stop_ids=range(1, 4), float8=True, experts="auto" if group is None else "gather"
    )
    prompts = [draw.Prompt(torch.tensor(ids)) for ids in ([1, 5, 7], [3])]
    uniforms = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0))
    return draw.draw_responses(engine, prompts, options, 99, uniforms)


def test_experts_gathered_in_float8_draw_what_rounded_experts_draw(ranks: RankPool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=61, num_experts_per_tok=2, **sizes)).save_pretrained(tmp_path)
    expected = draw_in_float8(None, tmp_path)
    for drawn in ranks.run(draw_in_float8, tmp_path, world=2):
        assert drawn.lengths == expected.lengths
        for n, length in enumerate(drawn.lengths):
            assert torch.equal(drawn.tokens[n, :length], expected.tokens[n, :length])
            torch.testing.assert_close(drawn.log_probs[n, :length], expected.log_probs[n, :length], rtol=0, atol=1e-5)


def choose(group: ProcessGroup, path: Path) -> list[bool]:
    """Return whether experts are gathered, for memory on the second rank and options."""
    engine = load(path, ParallelDims(dp=2, ep=2))
    cache = 2 * 2 * 2 * 2 * 8 * 4 * 64  # blocks, layers, keys and values, heads, size of a head, bytes, tokens
    others = 2 * 2 * 3 * 32 * 20 * 4  # layers, experts of the other rank, matrices, sizes, bytes
    results = list[bool]()

    def chosen(memory: int, **options: Any) -> None:
        free = memory if group.rank() else 2**40
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gathering, "free_memory", lambda device: free)
            with engine.decoding(CacheOptions(1, 60, **options)) as decoding:
                results.append(decoding.independent)

    chosen(cache + others)
    chosen(cache + others - 1)
    chosen(0, experts="gather")
    chosen(2**40, experts="exchange")
    # A step with drafts has their tokens, too; experts in FP8 have other bytes and times.
    how, new_cache = list[Any](), partial(engine.model.new_cache, float8=False, drafts=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "free_memory", lambda device: 2**40)
        patch.setattr(gathering, "bytes_to_gather", lambda mixtures, *, float8=False: how.append(float8) or 0)
        patch.setattr(gathering, "saves_time", lambda mixture, *tokens, **float8: how.append((*tokens, float8)))
        options = CacheOptions(5, 60, drafts=2, float8=True)
        results.append(gathering.gathers_experts(engine.model, engine.grid, options, new_cache))
    assert how == [True, (15, {"float8": True})]
    return results


def test_experts_are_gathered_where_they_fit_on_all_ranks(ranks: RankPool, mixture: Path) -> None:
    assert ranks.run(choose, mixture, world=2) == [[True, False, True, False, False]] * 2


def blocks_beside(group: ProcessGroup, path: Path, dims: ParallelDims, fewer: int, more: int) -> int | str:
    """Return the blocks of a cache where the second rank has memory for fewer, or the error."""
    engine, options = load(path, dims), CacheOptions(2, 600, experts="exchange")
    with engine.decoding(options) as entered:
        block = entered.caches[0].block_bytes
    memory = (1 + (fewer if group.rank() else more)) * block  # and one of padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "free_memory", lambda device: memory)
        try:
            with engine.decoding(options) as entered:
                return entered.caches[0].num_blocks
        except ValueError as error:
            return str(error)


@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2, ep=2)], ids=str)
def test_ranks_of_a_model_have_equal_blocks_and_equal_errors(
    ranks: RankPool, mixture: Path, dims: ParallelDims
) -> None:
    """A sequence of 600 tokens takes 10 blocks; data-parallel ranks have sequences of their own."""
    found = ranks.run(blocks_beside, mixture, dims, 12, 15, world=2)
    assert found == ([15, 12] if dims.dp == 2 else [12, 12])
    for message in ranks.run(blocks_beside, mixture, dims, 9, 15, world=2, timeout=30):
        assert "a sequence of 600 tokens takes 10 blocks" in str(message)


def refuse(group: ProcessGroup, path: Path) -> None:
    dims, options = ParallelDims(dp=2, ep=2), {"max_new_tokens": 1, "experts": "gather"}
    adapted = load(path, dims, lora=LoraOptions(rank=2, targets=["experts.down_proj"]))
    with pytest.raises(ValueError, match="experts='gather': experts have adapters, which are not gathered; take"):
        draw.draw_responses(adapted, [draw.Prompt(torch.tensor([1]))], GenerationOptions(**options), 9)
    draw.draw_responses(adapted, [draw.Prompt(torch.tensor([1]))], GenerationOptions(1), 9)
    with pytest.raises(ValueError, match="a stream outlives the copies; take 'exchange'"):
        ResponseStream(adapted, GenerationOptions(**options), 9, 9, 0)


def test_experts_that_cannot_be_gathered_are_refused(ranks: RankPool, mixture: Path) -> None:
    ranks.run(refuse, mixture, world=2)
    with pytest.raises(ValueError, match="experts='some' must be one of auto, gather, exchange"):
        GenerationOptions(1, experts="some")  # type: ignore[arg-type]
