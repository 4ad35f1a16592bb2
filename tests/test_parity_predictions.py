"""Multi-token-prediction layers learn as DeepSeek-V3's report says (arXiv:2412.19437, section 2.2), on every grid.

transformers drops these layers. The reference composes its decoder layers by equations 21 to 25, one sequence at a
time, each depth on the tokens that it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import SamplingOptions
from rl_models import Actor, ActorCritic, Batch, Critic, LoraOptions, LossInputs, OptimizerOptions, PipelineOptions
from rl_models.calls import DECODING_STEPS, accumulate
from rl_models.losses import LossTerms
from rl_train.engines import Native
from rl_train.loop import check_run, train
from rl_train.options import TrainOptions

LENGTHS = (11, 1, 17, 3)
VOCAB, LAYERS, FACTOR = 97, 2, 0.3
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 64, "pad_token_id": None},
}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
HYBRID = {
    **{"num_experts": 4, "shared_expert_intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    **{"layer_types": ["linear_attention", "full_attention", "full_attention"], "rms_norm_eps": 1e-3},
}
# Qwen3-Next's names of what a layer has beside a decoder layer.
OWN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
# The prefix of transformers' classes, what the config says besides, and the number of multi-token-prediction layers.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek-v3": ("DeepseekV3", {**ROUTED, **LATENT, "num_key_value_heads": 4}, 2),
    "glm4-moe": ("Glm4Moe", {**ROUTED, "head_dim": 8, "num_key_value_heads": 2, "use_qk_norm": True}, 1),
    "glm4-moe-lite": ("Glm4MoeLite", {**ROUTED, **LATENT, "num_key_value_heads": 4}, 1),
    "qwen3-next": ("Qwen3Next", HYBRID, 1),
}
GRIDS: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "tp1": (ParallelDims(), {}),
    "tp2": (ParallelDims(tp=2), {"sequence_parallel": False}),
    "tp2-sp": (ParallelDims(tp=2), {}),
    "tp4-sp": (ParallelDims(tp=4), {}),
    "dp2": (ParallelDims(dp=2), {}),
    "cp2": (ParallelDims(cp=2), {}),
    "cp2-ring": (ParallelDims(cp=2), {"context_parallel": "ring"}),
    "cp2-tp2": (ParallelDims(cp=2, tp=2), {}),
    "dp2-ep2": (ParallelDims(dp=2, ep=2), {}),
    "pp2": (ParallelDims(pp=2), {}),
    "pp2-dp2": (ParallelDims(pp=2, dp=2), {"recompute": "full"}),
    "pp2-tp2-ep2": (ParallelDims(pp=2, tp=2, ep=2), {}),
    "pp2-cp2-ring": (ParallelDims(pp=2, cp=2), {"context_parallel": "ring"}),
}
PLAIN = {("deepseek-v3", "pp2-tp2-ep2"), ("glm4-moe-lite", "tp1"), ("qwen3-next", "tp2-sp")}
CASES = [
    pytest.param(name, grid, marks=() if (name, grid) in PLAIN else pytest.mark.slow)
    for name in MODELS
    for grid in GRIDS
]


class Expected(NamedTuple):
    """A checkpoint, and the reference's metrics and gradients by name in files."""

    path: Path
    loss: float
    mtp_loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """`expected("deepseek-v3")`: computed once."""
    return cache(lambda name: reference(name, tmp_path_factory.mktemp(name)))


def make_batch() -> Batch:
    """Ragged sequences, whose later tokens are in the mask."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    masks = [torch.arange(length) >= length // 3 for length in LENGTHS]
    return Batch.from_sequences(rows, masks=masks, a=[torch.randn(n, generator=generator) for n in LENGTHS])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def reference(name: str, folder: Path) -> Expected:
    """transformers' model has the layers of further depths behind its own; the rest of a depth is in `own`."""
    prefix, changes, depths = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **changes, num_hidden_layers=LAYERS + depths)
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    one = 0 if hasattr(config, "linear_num_key_heads") else 1  # weights of norms may be differences from one
    hidden, heads = config.hidden_size, {"enorm": 1, "hnorm": 1, "shared_head.norm": 1}
    own = {
        f"model.layers.{LAYERS + depth}.{part}.weight": torch.zeros(
            *([hidden] if part in heads else [hidden, 2 * hidden])
        )
        for depth in range(depths)
        for part in (*heads, "eh_proj")
    }
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *own.items()):
            noise = torch.randn_like(parameter)
            parameter.copy_(one + 0.1 * noise if "norm" in key else 0.15 * noise)
    copies = {
        f"model.layers.{LAYERS + depth}.{copy}": source
        for depth in range(depths * one)
        for copy, source in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }
    write(folder / "model", model, own, copies)
    file = folder / "model" / "config.json"
    stated = {**json.loads(file.read_text()), "num_hidden_layers": LAYERS, "num_nextn_predict_layers": depths}
    if "layer_types" in stated:
        stated["layer_types"] = stated["layer_types"][:LAYERS]
    file.write_text(
        json.dumps(stated | ({"mlp_layer_types": ["dense", "sparse"]} if "mlp_layer_types" in stated else {}))
    )

    own = {key: tensor.requires_grad_() for key, tensor in own.items()}
    policy, further, batch = torch.zeros(()), torch.zeros(()), make_batch()
    for tokens, mask, a in zip(batch.split(), batch.split("mask"), batch.split("a"), strict=True):
        parts = predictions(model, own, tokens, depths)
        for depth, log_probs in enumerate(parts):
            # Depth k has no prediction of the first k + 1 tokens.
            taken = log_probs[mask[depth + 1 :]]
            if depth == 0:
                policy = policy + (taken * a[1:][mask[1:]]).sum()
            else:
                further = further - taken.sum() / depths
    policy, further = policy / batch.mask.sum(), further / batch.mask.sum()
    (policy + FACTOR * further).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    write(folder / "gradients", model, {key: tensor.grad for key, tensor in own.items()}, copies)
    gradients = load_file(folder / "gradients" / "model.safetensors")
    with torch.no_grad():
        return Expected(folder / "model", *map(float, (policy + FACTOR * further, further)), gradients)


def predictions(model: Any, own: dict[str, Tensor], tokens: Tensor, depths: int) -> list[Tensor]:
    """Return for the model and every depth k the log-probs of the tokens k + 1 places on."""
    inner, eps = model.model, model.config.rms_norm_eps
    if hasattr(model.config, "linear_num_key_heads"):
        own = {key: tensor + 1 if "norm" in key else tensor for key, tensor in own.items()}

    def layer(number: int, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        mask = None if hasattr(inner.layers[number], "linear_attn") else mask
        rotary = inner.rotary_emb(x[None], positions)
        out = inner.layers[number](x[None], attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        return (out[0] if isinstance(out, tuple) else out)[0]

    x = inner.embed_tokens(tokens)
    for number in range(LAYERS):
        x = layer(number, x)
    states = [inner.norm(x)]
    for depth in range(1, depths + 1):
        weights = {
            part: own[f"model.layers.{LAYERS + depth - 1}.{part}.weight"] for part in ("enorm", "hnorm", "eh_proj")
        }
        embedded = norm(embedding(tokens[depth:], inner.embed_tokens.weight), weights["enorm"], eps)
        before = norm(states[-1][: len(embedded)], weights["hnorm"], eps)
        x = torch.cat((embedded, before), -1) @ weights["eh_proj"].T
        x = layer(LAYERS + depth - 1, x) if len(x) else x
        states.append(norm(x, own[f"model.layers.{LAYERS + depth - 1}.shared_head.norm.weight"], eps))
    found = []
    for depth, state in enumerate(states):
        temperature = 0.8 if depth == 0 else 1.0
        predicted = (
            (model.lm_head(state[:-1]) / temperature).log_softmax(-1) if len(state) else state.new_zeros(0, VOCAB)
        )
        found.append(predicted.gather(-1, tokens[depth + 1 :, None])[:, 0])
    return found


def write(folder: Path, model: Any, own: dict[str, Any], copies: dict[str, str]) -> None:
    model.save_pretrained(folder)
    state = {**load_file(folder / "model.safetensors"), **{key: tensor.detach() for key, tensor in own.items()}}
    state |= {copy: state[source].clone() for copy, source in copies.items()}
    if hasattr(model.config, "linear_num_key_heads"):
        names = {f"model.layers.{LAYERS}.{part}.weight": f"mtp.{name}.weight" for part, name in OWN_NAMES.items()}
        prefix = f"model.layers.{LAYERS}."
        state = {names.get(key, key.replace(prefix, "mtp.layers.0.")): tensor for key, tensor in state.items()}
    save_file(state, folder / "model.safetensors")


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["a"])


class Found(NamedTuple):
    """What a rank has computed; the gradients on the first rank."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def learn(group: ProcessGroup, path: Path, dims: ParallelDims, options: dict[str, Any]) -> Found:
    mesh = dims.build_mesh("cpu", list(range(dims.world_size)))
    actor = Actor.from_pretrained(
        path,
        dims=dims,
        mesh=mesh,
        device="cpu",
        mtp_loss_scaling_factor=FACTOR,
        max_tokens_per_micro_batch=20,
        **options,
    )
    batch = make_batch()
    part = batch.select(range(actor.grid.rank("dp"), len(batch), dims.dp))
    metrics = accumulate(actor.engine, part, policy_loss, 20, call="update", aggregation="token-mean", temperature=0.8)
    shards = actor.engine.shards()
    local = [
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in chunk.items()}
        for _, chunk in shards.chunks
    ]
    streamed = ckpt.stream_hf(local, shards.layout, actor.grid.everyone, shards.places, to=[0])
    return Found(metrics, {name: tensor.detach() for name, tensor in streamed})


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_they_learn_as_the_report_says(
    ranks: RankPool, expected: Callable[[str], Expected], name: str, grid: str
) -> None:
    wanted, (dims, options) = expected(name), GRIDS[grid]
    found = ranks.run(learn, wanted.path, dims, options, world=dims.world_size, timeout=120)
    for rank in found:
        assert rank.metrics == pytest.approx({"loss": wanted.loss, "mtp_loss": wanted.mtp_loss}, rel=1e-5)
    gradients = found[0].gradients
    assert gradients.keys() == wanted.gradients.keys()
    for key, gradient in wanted.gradients.items():
        if not key.endswith("e_score_correction_bias"):
            assert gradient.any(), key
            difference = (gradients[key] - gradient).norm() / gradient.norm()
            assert difference <= 1e-5, f"{key}: relative difference {difference:.2e}"


def step(group: ProcessGroup, path: Path, dims: ParallelDims, factor: float, out: Path) -> None:
    """Take an update, on a pipeline with stages on both sides of the shared embedding, and save."""
    mesh = dims.build_mesh("cpu", list(range(dims.world_size)))
    options = {"dims": dims, "mesh": mesh, "device": "cpu", "optimizer": OptimizerOptions(learning_rate=1e-2)}
    actor = Actor.from_pretrained(path, mtp_loss_scaling_factor=factor, **options)
    metrics = actor.update(make_batch(), policy_loss)
    assert ("mtp_loss" in metrics) == (factor > 0)
    actor.save_pretrained(out)
    streamed = dict(actor.stream_weights())
    saved = load_file(out / "model.safetensors")
    assert streamed.keys() == saved.keys()
    actor.save_training(out.parent / f"run-{out.name}")
    actor.update(make_batch(), policy_loss)
    actor.load_training(out.parent / f"run-{out.name}")
    again = dict(actor.stream_weights())
    assert all(torch.equal(again[key], tensor) for key, tensor in saved.items())


def test_by_default_they_are_kept_as_they_are(
    ranks: RankPool, expected: Callable[[str], Expected], tmp_path: Path
) -> None:
    path = expected("glm4-moe").path
    before = load_file(path / "model.safetensors")
    trained = {}
    for factor in (0.0, 0.5):
        out = tmp_path / str(factor)
        ranks.run(step, path, ParallelDims(pp=2), factor, out, world=2, timeout=120)
        after = load_file(out / "model.safetensors")
        assert after.keys() == before.keys()
        # The embedding and the head learn, and the layers share them.
        first = f"model.layers.{LAYERS}."
        for copy, source in (
            (f"{first}embed_tokens.weight", "model.embed_tokens.weight"),
            (f"{first}shared_head.head.weight", "lm_head.weight"),
        ):
            assert torch.equal(after[copy], after[source])
            assert not torch.equal(after[source], before[source])
        own = [key for key in before if key.startswith(first) and "embed_tokens" not in key and "head.head" not in key]
        trained[factor] = {key for key in own if not torch.equal(after[key], before[key])}
    assert trained[0.0] == set()
    assert {f"{first}enorm.weight", f"{first}eh_proj.weight", f"{first}mlp.gate.weight"} <= trained[0.5]


def test_an_actor_critic_learns_and_generates_with_them(expected: Callable[[str], Expected]) -> None:
    wanted = expected("glm4-moe")
    actor = ActorCritic.from_pretrained(wanted.path, device="cpu", mtp_loss_scaling_factor=FACTOR)
    options: dict[str, Any] = {"call": "update", "aggregation": "token-mean", "temperature": 0.8}

    def loss(inputs: LossInputs) -> LossTerms:
        return policy_loss(inputs) + LossTerms(0 * inputs.values)

    metrics = accumulate(actor.engine, make_batch(), loss, 20, **options)
    assert metrics == pytest.approx({"loss": wanted.loss, "mtp_loss": wanted.mtp_loss}, rel=1e-5)
    drawn = actor.generate([[1, 2, 3], [4]], max_new_tokens=4, temperature=0.0)
    scored = actor.log_probs(drawn).log_probs
    torch.testing.assert_close(drawn["log_probs"][drawn.mask], scored[drawn.mask], rtol=0, atol=1e-5)


def test_they_draft_for_an_actor_an_engine_and_a_run(
    expected: Callable[[str], Expected], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same responses in fewer steps, which batches and the metrics of a run count."""
    path, how = expected("glm4-moe").path, {"max_new_tokens": 20, "temperature": 0.5, "top_k": 2, "n": 3}
    actor = Actor.from_pretrained(path, device="cpu")
    drawn, plain = (actor.generate([[1, 2, 3], [4]], **how, drafts=drafts) for drafts in (2, 0))
    assert torch.equal(drawn.tokens, plain.tokens)
    steps = [int(row.sum()) for row in drawn.split("decoding_steps")]
    assert sum(steps) < int(drawn.mask.sum())
    assert DECODING_STEPS not in plain.fields

    engine, sampling = Native(path, device="cpu", drafts=2), SamplingOptions(**how)
    requests: list[Any] = [SimpleNamespace(prompt=[1, 2, 3], seed=7, images=())]
    (answer,) = engine.begin(requests, sampling)()
    engine.add(0, requests[0], sampling)
    complete: list[Any] = []
    while not complete:
        complete = engine.step().complete
    ((_, streamed),) = complete
    assert [response.tokens for response in streamed] == [response.tokens for response in answer]
    assert [response.steps for response in streamed] == [response.steps for response in answer]
    assert 0 < sum(response.steps for response in answer) <= 60
    engine.close()
    state = load_file(path / "model.safetensors")
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.json").write_text((path / "config.json").read_text())
    kept = {key: tensor for key, tensor in state.items() if not key.startswith(f"model.layers.{LAYERS}.")}
    save_file(kept, tmp_path / "none/model.safetensors")
    with pytest.raises(ValueError, match="drafts=1 needs multi-token-prediction layers"):
        Native(tmp_path / "none", device="cpu", drafts=1)

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text("def zero(prompt, response, row):\n    return 0.0\n")
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [3, 4]}\n{"tokens": [5]}\n')
    given: dict[str, Any] = {"model": path, "prompts": tmp_path / "prompts.jsonl", "reward": "own_rewards:zero"}
    given |= {"out": tmp_path / "run", "steps": 1, "prompts_per_step": 2, "samples": 2, "max_new_tokens": 20}
    given |= {"device": "cpu", "stop_ids": "", "save_every": 0, "rollouts.drafts": 2}
    checked_run = check_run(TrainOptions(**given))
    layers = LAYERS + 1  # keys and values, heads, size of a head, bytes, tokens of a block
    assert checked_run.cache == (4 + 1) * layers * 2 * 2 * 8 * 4 * 64
    assert 1 <= train(checked_run)["tokens_per_decoding_step"] <= 3


def test_adapters_leave_them_as_they_are(expected: Callable[[str], Expected], tmp_path: Path) -> None:
    path = expected("glm4-moe").path
    lora = LoraOptions(rank=2, alpha=4, targets="all-linear")
    actor = Actor.from_pretrained(path, device="cpu", lora=lora, optimizer=OptimizerOptions(learning_rate=1e-2))
    assert not any(name.startswith("mtp.") for name, p in actor.engine.module.named_parameters() if p.requires_grad)
    actor.update(make_batch(), policy_loss)
    actor.save_pretrained(tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "merged"))
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    assert changed
    assert not any(key.startswith(f"model.layers.{LAYERS}.") for key in changed)


def test_what_cannot_be_is_refused_or_said(expected: Callable[[str], Expected], tmp_path: Path) -> None:
    path = expected("glm4-moe").path
    with pytest.raises(ValueError, match=r"mtp_loss_scaling_factor=0.3 trains .* none for role='value'; leave it out"):
        Critic.from_pretrained(path, device="cpu", mtp_loss_scaling_factor=0.3)
    with pytest.raises(ValueError, match="mtp_loss_scaling_factor"):
        Actor.from_pretrained(path, device="cpu", mtp_loss_scaling_factor=-1)
    with pytest.raises(ValueError, match="not offered with schedule='zero-bubble'"):
        Actor.from_pretrained(path, device="cpu", mtp_loss_scaling_factor=0.3, pipeline=PipelineOptions("zero-bubble"))
    with pytest.warns(UserWarning, match="backend='transformers' leaves out the 1 multi-token-prediction layers"):
        Actor.from_pretrained(path, backend="transformers", device="cpu")
    state = load_file(path / "model.safetensors")
    state[f"model.layers.{LAYERS}.embed_tokens.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.warns(UserWarning, match=rf"model.layers.{LAYERS}.embed_tokens.weight differs from model.embed_tokens"):
        actor = Actor.from_pretrained(tmp_path, device="cpu")
    # The model shares its own embedding, as in inference engines.
    actor.save_pretrained(tmp_path / "saved")
    for name, tensor in load_file(tmp_path / "saved/model.safetensors").items():
        assert torch.equal(tensor, load_file(path / "model.safetensors")[name])
