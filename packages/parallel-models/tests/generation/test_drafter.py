"""Drafts of multi-token-prediction layers change no token and no log-prob, and are those that the layers predict."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, GenerationOptions, Grid, MicroBatch, load_engine
from parallel_models.generation import Prompt, Responses, ResponseStream, draw_responses, end_sessions
from parallel_models.generation.drafter import Drafter
from parallel_models.model.language_models import CausalLM
from parallel_models.model.multi_token_prediction import Predictions
from parallel_models.training import ParallelEngine

VOCAB, LAYERS, NEW = 23, 2, 21
PROMPTS = [[1, 5, 7], [3], [9, 9, 2, 14] * 15, [1, 5, 7]]
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128, "pad_token_id": None},
}
# Fields that Qwen3-Next does not have.
ROUTED = {"n_routed_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
HYBRID = {
    **{"num_experts": 4, "shared_expert_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
# The class, what its config says besides, and the number of multi-token-prediction layers.
MODELS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "glm": (Glm4MoeConfig, Glm4MoeForCausalLM, {"head_dim": 8, "num_key_value_heads": 2, "use_qk_norm": True}, 1),
    "deepseek": (DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENT, "num_key_value_heads": 4}, 2),
    "next": (Qwen3NextConfig, Qwen3NextForCausalLM, HYBRID, 1),
}
# Qwen3-Next's names of what a layer has beside a decoder layer.
NEXT_NAMES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm",
}  # fmt: skip


def write(name: str, folder: Path, vocab: int = VOCAB) -> Path:
    """Write a model of random weights; "echo": tokens and drafts depend on the last token alone; "near": nearly so."""
    family, _, kind = name.partition("-")
    make_config, make, changes, depths = MODELS[family]
    torch.manual_seed(3)
    sizes = {key: size for key, size in SIZES.items() if family != "next" or key not in ROUTED}
    model = make(make_config(**sizes | {"vocab_size": vocab}, **changes, num_hidden_layers=LAYERS + depths))
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    hidden = SIZES["hidden_size"]
    for layer in range(LAYERS, LAYERS + depths):
        shapes = {"enorm": [hidden], "hnorm": [hidden], "shared_head.norm": [hidden], "eh_proj": [hidden, 2 * hidden]}
        state |= {f"model.layers.{layer}.{part}.weight": torch.empty(shape) for part, shape in shapes.items()}
    for key, tensor in state.items():
        tensor.normal_(1.0 if "norm" in key else 0.0, 0.1 if "norm" in key else 0.5)
        if kind:
            if "o_proj" in key or "down_proj" in key:
                tensor.mul_(0.01 if kind == "near" else 0)
            elif "norm" in key:
                tensor.fill_(1)
            elif "eh_proj" in key:
                tensor.copy_(torch.eye(*tensor.shape))
    stated = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": depths}
    if family == "next":
        stated["layer_types"] = HYBRID["layer_types"][:LAYERS]
        prefix = f"model.layers.{LAYERS}."
        names = {f"{prefix}{part}.weight": f"mtp.{name}.weight" for part, name in NEXT_NAMES.items()}
        state = {names.get(key, key.replace(prefix, "mtp.layers.0.")): tensor for key, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder("glm")`: a checkpoint, written once."""
    return cache(lambda name, **options: write(name, tmp_path_factory.mktemp(name), **options))


def load(path: Path, dims: ParallelDims = ParallelDims(), device: str = "cpu") -> ParallelEngine:  # noqa: B008
    mesh = dims.build_mesh(device, list(range(dims.world_size))) if dims.world_size > 1 else None
    return load_engine(str(path), "causal_lm", Grid.build(dims, device=device, mesh=mesh), EngineOptions())


def draw(engine: ParallelEngine, prompts: Any = PROMPTS, **options: Any) -> Responses:
    rows = [Prompt(torch.tensor(prompt, device=engine.grid.device)) for prompt in prompts]
    return draw_responses(engine, rows, GenerationOptions(**{"max_new_tokens": NEW, "n": 2, **options}), 50)


def compare(engine: ParallelEngine, drafts: int, **options: Any) -> Responses:
    """Compare draws with drafts and without."""
    drawn, expected = (draw(engine, drafts=count, **options) for count in (drafts, 0))
    end_sessions()
    assert drawn.lengths == expected.lengths == expected.steps
    for n, length in enumerate(expected.lengths):
        assert drawn.tokens[n, :length].tolist() == expected.tokens[n, :length].tolist()
        torch.testing.assert_close(drawn.log_probs[n, :length], expected.log_probs[n, :length], rtol=0, atol=3e-5)
    if drawn.mask is not None and expected.mask is not None:
        assert drawn.mask.tolist() == expected.mask.tolist()
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm", "deepseek"])
def test_drafts_change_no_bit_of_an_invariant_model(folder: Callable[..., Path], name: str) -> None:
    options = EngineOptions(tp_invariant=True, dtype=torch.bfloat16)
    engine = load_engine(str(folder(name)), "causal_lm", Grid.build(ParallelDims(), device="cpu"), options)
    drawn, expected = (draw(engine, drafts=count, max_new_tokens=12, stop_ids=[4]) for count in (2, 0))
    assert drawn.lengths == expected.lengths
    assert sum(drawn.steps) < sum(expected.steps)
    for n, length in enumerate(expected.lengths):
        assert torch.equal(drawn.tokens[n, :length], expected.tokens[n, :length])
        assert torch.equal(drawn.log_probs[n, :length], expected.log_probs[n, :length])


CASES = [
    pytest.param("glm", 1, {"temperature": 0}, marks=pytest.mark.slow),
    pytest.param("glm", 2, {"stop_ids": [4, 5], "max_sequences": 3}, marks=pytest.mark.slow),
    ("glm", 3, {"top_k": 5, "top_p": 0.9, "keep_sampling_mask": True, "temperature": 1.3, "exact": True}),
    pytest.param("glm", 3, {"stop_ids": [4], "max_length": 64}, marks=pytest.mark.slow),  # drafts beyond the last block
    ("glm-near", 3, {"prompts": [[1, 5, 7] * 13], "max_new_tokens": 60}),  # two blocks between two looks
    ("next", 3, {"stop_ids": [4, 5], "max_sequences": 3}),  # states of linear attention do not go back
    pytest.param("next", 2, {"keep_cache": True, "exact": True}, marks=pytest.mark.slow),
    pytest.param("deepseek", 3, {"top_p": 0.8}, marks=pytest.mark.slow),
    pytest.param("deepseek-echo", 2, {"keep_cache": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "drafts", "options"), CASES, ids=str)
def test_tokens_and_log_probs_are_those_without_drafts(
    folder: Callable[..., Path], name: str, drafts: int, options: dict[str, Any]
) -> None:
    drawn = compare(load(folder(name)), drafts, **options)
    assert sum(drawn.steps) < sum(drawn.lengths)  # some drafts stay by chance


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["glm", "glm-echo", "deepseek-echo"])
def test_graphs_of_steps_hold_the_drafts(folder: Callable[..., Path], name: str) -> None:
    drawn = compare(load(folder(name), device="cuda"), 3, max_new_tokens=50)
    assert sum(drawn.steps) < sum(drawn.lengths)


def test_responses_wait_for_blocks(folder: Callable[..., Path]) -> None:
    """A response that leaves its slot goes on with drafts of its own tokens."""
    engine = load(folder("glm-echo"))
    block = 3 * 2 * 2 * 8 * 4 * 64  # layers, keys and values, heads, size of a head, bytes, tokens
    prompts = [[9, 2, 14] * 20, [1, 5, 7] * 20, [3] * 60]
    drawn = compare(engine, 3, prompts=prompts, max_new_tokens=40, n=1, cache_gib=(4 + 1.5) * block / 2**30)
    assert sum(drawn.computed) > sum(map(len, prompts)) - 3


@pytest.mark.parametrize("drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["glm-echo", "deepseek-echo"])
def test_drafts_that_are_always_right_all_stay(folder: Callable[..., Path], name: str, drafts: int) -> None:
    """The first step of a response has no drafts of its own; each further step draws one token more than drafts."""
    drawn = draw(load(folder(name)), drafts=drafts)
    assert drawn.lengths == [NEW] * 8
    assert set(drawn.steps) <= {-(-NEW // (drafts + 1)), 1 + -(-(NEW - 1) // (drafts + 1))}


def test_a_stream_draws_with_drafts(folder: Callable[..., Path]) -> None:
    options = GenerationOptions(max_new_tokens=NEW, max_sequences=2, drafts=3)
    stream = ResponseStream(load(folder("glm-echo")), options, 64, 64, version=0)
    stream.add(0, PROMPTS[0], torch.rand(2, NEW), NEW)
    (begun, ((_, responses),)) = stream.step()
    assert begun == [0]
    assert all(len(response.tokens) == NEW and response.steps <= 1 + NEW // 3 for response in responses)
    stream.close()


@pytest.mark.parametrize(("name", "checked"), [("glm", 3), pytest.param("deepseek", 1, marks=pytest.mark.slow)])
def test_drafts_are_those_of_the_layers(
    folder: Callable[..., Path], name: str, checked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every draft equal those of the layers over the whole sequence, without a cache."""
    engine, steps = load(folder(name)), list[tuple[Tensor, Tensor, list[Tensor], Tensor]]()
    draft = Drafter.draft

    def watched(
        drafter: Drafter, packed: PackedSequence, cache: Any, tokens: Tensor, last: Tensor, draws: Any
    ) -> Tensor:
        logits = list[Tensor]()

        def watched_draws(of_drafts: Tensor, number: int) -> Tensor:
            logits.append(of_drafts)
            drawn: Tensor = draws(of_drafts, number)
            return drawn

        drafts = draft(drafter, packed, cache, tokens, last, watched_draws)
        steps.append((cache.lengths + last + 1, tokens.gather(1, last[:, None])[:, 0], logits, drafts))
        return drafts

    monkeypatch.setattr(Drafter, "draft", watched)
    drawn = draw(engine, prompts=PROMPTS[2:3], drafts=3, n=1, max_new_tokens=40, seed=1)
    assert drawn.steps[0] < 40
    sequence = torch.cat((torch.tensor(PROMPTS[2]), drawn.tokens[0]))
    model = engine.model
    assert isinstance(model, CausalLM)
    assert model.mtp is not None
    for lengths, last, logits, drafts in steps[: drawn.steps[0] - 1]:
        length = int(lengths[0])
        assert int(last[0]) == int(sequence[length])
        with torch.no_grad():
            rows = sequence[: length + 1]
            hidden, tokens = model(PackedSequence.from_sequences([rows[:-1]])), rows[1:]
            for number in range(checked):
                packed = PackedSequence.from_sequences([tokens])
                states = model.mtp.layer_states(0, model.model, hidden, packed, tokens, None)
                torch.testing.assert_close(logits[number][0], model.logits(states[-1:])[0], rtol=1e-4, atol=1e-4)
                hidden, tokens = torch.cat((hidden, states[-1:])), torch.cat((tokens, drafts[0, number : number + 1]))


@pytest.mark.parametrize(("name", "layers"), [("glm", 1), ("deepseek", 2)])
def test_the_layer_that_repeats_goes_on_by_one_position_a_draft(
    folder: Callable[..., Path], name: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong positions would change no token, but fewer drafts would stay."""
    positions, ends = list[list[int]](), list[int]()
    draft, layer_states = Drafter.draft, Predictions.layer_states

    def watched(drafter: Drafter, packed: PackedSequence, cache: Any, tokens: Tensor, last: Tensor, *draws: Any) -> Any:
        ends.append(int(cache.lengths[0] + last[0]))
        positions.append([])
        return draft(drafter, packed, cache, tokens, last, *draws)

    def watched_layers(of: Predictions, number: int, decoder: Any, hidden: Tensor, packed: Any, *others: Any) -> Tensor:
        if packed.max_seqlen == 1 and positions:
            assert others[1].lengths[0] == packed.position_ids[0]
            positions[-1].append(int(packed.position_ids[0]))
        return layer_states(of, number, decoder, hidden, packed, *others)

    monkeypatch.setattr(Drafter, "draft", watched)
    monkeypatch.setattr(Predictions, "layer_states", watched_layers)
    draw(load(folder(name)), prompts=PROMPTS[:1], drafts=3, n=1, max_new_tokens=6, exact=True)
    assert positions == [[end + ahead + 1 for ahead in range(3 - layers)] for end in ends]
    assert ends[0] == len(PROMPTS[0]) - 1


def test_draws_with_drafts_have_the_probabilities_of_the_model(folder: Callable[..., Path]) -> None:
    """Counts of all responses of three tokens of five, against the model's probabilities."""
    engine, count, prompt = load(folder("glm", vocab=5)), 2048, [1, 3]
    drawn = draw(engine, [prompt], drafts=2, n=count, max_new_tokens=3, max_sequences=count, seed=5)
    assert sum(drawn.steps) < 3 * count
    responses = list(itertools.product(range(5), repeat=3))
    batch = PackedSequence.from_sequences([torch.tensor([*prompt, *response]) for response in responses])
    (log_probs, _) = engine.forward([MicroBatch(batch)])[0]
    probabilities = log_probs.view(-1, 5)[:, 1:4].sum(1).exp()
    numbers = (drawn.tokens * torch.tensor([25, 5, 1])).sum(1)
    counts = torch.bincount(numbers, minlength=125)
    error = (counts - count * probabilities).abs() / (count * probabilities * (1 - probabilities)).sqrt().clamp(min=1)
    assert error.max() < 4.5
    torch.testing.assert_close(drawn.log_probs.sum(1), probabilities.log()[numbers], rtol=0, atol=1e-4)


def compare_on_ranks(group: ProcessGroup, path: Path, dims: ParallelDims, **options: Any) -> tuple[Responses, int]:
    engine = load(path, dims)
    # A rank with fewer prompts feeds padding.
    dp = engine.grid.rank("dp")
    return compare(engine, 3, prompts=PROMPTS[dp:], **options), dp


GRIDS = [
    (ParallelDims(dp=2, ep=2), {"experts": "exchange"}),
    *(
        pytest.param(dims, options, marks=pytest.mark.slow)
        for dims, options in (
            (ParallelDims(tp=2), {}),
            (ParallelDims(tp=2), {"exact": True}),
            (ParallelDims(tp=2), {"top_k": 4, "keep_sampling_mask": True}),
            (ParallelDims(cp=2), {}),
            (ParallelDims(dp=2), {}),
            (ParallelDims(dp=2, tp=2), {}),
            (ParallelDims(dp=2, tp=2, ep=2), {}),
        )
    ),
]


@pytest.mark.parametrize("name", ["glm", pytest.param("deepseek", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dims", "options"), GRIDS, ids=str)
def test_grids_draw_with_drafts_as_without(
    ranks: RankPool, folder: Callable[..., Path], name: str, dims: ParallelDims, options: dict[str, Any]
) -> None:
    for drawn, dp in ranks.run(compare_on_ranks, folder(name), dims, world=dims.world_size, **options):
        assert sum(drawn.steps) < sum(drawn.lengths)
        if not dp:
            expected = draw(load(folder(name)), **options)
            assert [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=False)] == [
                row[:n].tolist() for row, n in zip(expected.tokens, expected.lengths, strict=True)
            ]


def refuse(group: ProcessGroup, path: Path) -> str:
    with pytest.raises(ValueError, match="drafts=1") as raised:
        draw(load(path, ParallelDims(pp=2)), drafts=1)
    return str(raised.value)


def test_what_cannot_draft_is_refused(ranks: RankPool, folder: Callable[..., Path], llama: Path) -> None:
    with pytest.raises(ValueError, match="drafts=1 needs multi-token-prediction layers, and the checkpoint has none"):
        draw(load(llama), drafts=1)
    with pytest.raises(ValueError, match="drafts=17 is more than 16"):
        GenerationOptions(max_new_tokens=1, drafts=17)
    assert set(ranks.run(refuse, folder("glm"), world=2)) == {
        "drafts=1 needs a grid with pp 1, not pp=2; leave drafts out"
    }
