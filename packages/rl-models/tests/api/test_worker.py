"""Actors and critics: results and updates do not depend on how the work was divided."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForTokenClassification,
)

import ckpt
from megatron_utils.testing import cpu_stand_in
from parallel_layers import LogProbs, PackedSequence, ParallelDims, linear_log_probs
from parallel_layers.testing import RankPool
from parallel_models import MicroBatch
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, losses
from rl_models.backends import BACKENDS

LENGTHS = (11, 1, 17, 6, 0, 9)


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def value_model(tiny: Callable[..., Path]) -> Path:
    return tiny("critic", tie_word_embeddings=True)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    names = ("old_log_probs", "advantages", "old_values", "returns")
    fields = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in names}
    return Batch.from_sequences(rows, response_lengths=[7, 0, 12, 5, 0, 3], **fields)


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    # The old log-probs are random: a wide clip keeps a gradient on most tokens.
    surrogate = losses.ppo_clip(
        inputs.log_probs, inputs["old_log_probs"] - 4, inputs["advantages"], clip_low=0.9, clip_high=50
    )
    return surrogate + losses.entropy_bonus(inputs.entropy, 0.1)


def value_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.value_clip(inputs.values, inputs["old_values"], inputs["returns"])


def my_part(group: ProcessGroup, dims: ParallelDims) -> list[int]:
    """The sequences of this data-parallel rank; unequal parts, and more micro-batches on one rank than on the other."""
    if dims.dp == 1:
        return list(range(len(LENGTHS)))
    return [[1, 3], [0, 2, 4, 5]][group.rank() // dims.tp]


def update_once(
    group: ProcessGroup, path: Path, kind: str, backend: str, dims: ParallelDims, max_tokens: int, aggregation: str
) -> dict[str, Any]:
    """One SGD-like look at the gradient: its norm, the metrics, and the parameters after a step of AdamW."""
    mesh = mesh_of(dims)
    worker_class = {"actor": Actor, "critic": Critic}[kind]
    worker: Any = worker_class.from_pretrained(
        path,
        backend=backend,
        dims=dims,
        mesh=mesh,
        device="cpu",
        # A large epsilon makes AdamW's step follow the size of the gradient, not its sign alone.
        optimizer=OptimizerOptions(learning_rate=0.1, eps=1.0, max_grad_norm=2.0, weight_decay=0.1),
        max_tokens_per_micro_batch=max_tokens,
    )
    indices = my_part(group, dims)
    part = make_batch().select(indices)
    before = worker.log_probs(part).log_probs if kind == "actor" else worker.values(part)
    loss = policy_loss if kind == "actor" else value_loss
    metrics = worker.update(part, loss, aggregation=aggregation)
    after = worker.log_probs(part).log_probs if kind == "actor" else worker.values(part)
    return {"indices": indices, "before": before, "after": after, "metrics": metrics}


def whole(results: list[dict[str, Any]], name: str) -> Tensor:
    """A per-token result in the order of the whole batch."""
    batch = make_batch()
    out = torch.full((batch.num_tokens,), torch.nan)
    for result in results:
        out[batch.positions(result["indices"])] = result[name]
    return out


DIVISIONS = [
    ("parallel", ParallelDims(), 17),
    ("parallel", ParallelDims(dp=2), 1000),
    ("transformers", ParallelDims(dp=2), 17),
]
MORE_DIVISIONS = [("parallel", ParallelDims(dp=2, tp=2), 17), ("transformers", ParallelDims(), 17)]


@pytest.mark.parametrize(
    ("kind", "aggregation", "divisions"),
    [
        ("actor", "token-mean", DIVISIONS),
        pytest.param("critic", "sequence-mean", DIVISIONS, marks=pytest.mark.slow),
        *(
            pytest.param(kind, aggregation, divisions, marks=pytest.mark.slow)
            for kind, aggregation, divisions in [
                ("actor", "token-mean", MORE_DIVISIONS),
                ("critic", "sequence-mean", MORE_DIVISIONS),
                ("actor", "sequence-mean", DIVISIONS + MORE_DIVISIONS),
                ("critic", "token-mean", DIVISIONS + MORE_DIVISIONS),
            ]
        ),
    ],
)
def test_an_update_is_the_same_however_the_batch_is_divided(
    ranks: RankPool,
    model: Path,
    value_model: Path,
    kind: str,
    aggregation: str,
    divisions: list[tuple[str, ParallelDims, int]],
) -> None:
    path = model if kind == "actor" else value_model
    (one,) = ranks.run(update_once, path, kind, "parallel", ParallelDims(), 1000, aggregation, world=1)
    assert one["metrics"]["grad_norm"] > 2.0, "the gradient is meant to be clipped"
    assert (one["after"] - one["before"]).abs().max() > 1e-3
    for backend, dims, max_tokens in divisions:
        results = ranks.run(
            update_once, path, kind, backend, dims, max_tokens, aggregation, world=dims.world_size, timeout=120
        )
        where = f"{backend} {dims} {max_tokens}"
        for name in ("before", "after"):
            torch.testing.assert_close(
                whole(results, name),
                one[name],
                rtol=1e-5,
                atol=2e-5,
                msg=lambda text, at=f"{where} {name}": f"{at}: {text}",
            )
        for result in results:
            assert result["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6), where


def two_grids(group: ProcessGroup, path: Path) -> dict[str, Tensor]:
    batch = make_batch()
    found = {}
    for name, dims, members in (("tp2", ParallelDims(tp=2), [1, 2]), ("tp4", ParallelDims(tp=4), [0, 1, 2, 3])):
        if group.rank() in members:
            mesh = dims.build_mesh("cpu", members)
            actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu")
            found[name] = actor.log_probs(batch).log_probs
    return found


def test_two_actors_on_different_grids_live_in_one_process_group(ranks: RankPool, model: Path) -> None:
    results = ranks.run(two_grids, model, world=4)
    (alone,) = ranks.run(two_grids_alone, model, world=1)
    for result in results:
        for log_probs in result.values():
            torch.testing.assert_close(log_probs, alone, rtol=0, atol=1e-5)
    assert [set(result) for result in results] == [{"tp4"}, {"tp2", "tp4"}, {"tp2", "tp4"}, {"tp4"}]


def two_grids_alone(group: ProcessGroup, path: Path) -> Tensor:
    return Actor.from_pretrained(path, device="cpu").log_probs(make_batch()).log_probs


def perturb(group: ProcessGroup, path: Path, backend: str) -> list[dict[str, Any]]:
    """Per sequence: its results, and the gradient of its own results, with and without another sequence changed."""
    dims = ParallelDims(tp=group.size())
    mesh = mesh_of(dims)
    worker = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu")
    batch = make_batch()
    tokens = batch.tokens.clone()
    tokens[batch.positions([2])] = (tokens[batch.positions([2])] + 7) % 61
    changed = Batch(tokens, batch.lengths, batch.mask, batch.fields)
    # Sequences 0, 3 and 5 stand before and behind the one that is changed.
    return [look_at(worker, each, [0, 3, 5]) for each in (batch, changed)]


def look_at(worker: Actor, batch: Batch, sequences: list[int]) -> dict[str, Any]:
    """The log-probs and entropies of some sequences, and the gradients of their sum."""
    own = batch.positions(sequences)
    seen: list[Tensor] = []

    def loss(micro_batch: MicroBatch, outputs: tuple[Tensor, ...]) -> Tensor:
        seen.append(torch.stack([output[own] for output in outputs]))
        return seen[-1].sum()

    worker.engine.drop_gradients()
    packed = PackedSequence.from_sequences(batch.split(), multiple_of=worker.engine.tokens_multiple_of)
    worker.engine.forward_backward([MicroBatch(packed)], loss)
    gradients = {name: parameter.grad for name, parameter in worker.engine.module.named_parameters()}
    return {"numbers": seen[0].detach(), "gradients": gradients}


@pytest.mark.parametrize(("backend", "tp"), [("parallel", 1), ("parallel", 2), ("transformers", 1)])
def test_one_sequence_does_not_touch_another(ranks: RankPool, model: Path, backend: str, tp: int) -> None:
    for before, after in ranks.run(perturb, model, backend, world=tp):
        assert torch.equal(before["numbers"], after["numbers"])
        for name, gradient in before["gradients"].items():
            assert torch.equal(gradient, after["gradients"][name]), name


def train_and_look(group: ProcessGroup, path: Path, out: Path) -> dict[str, Any]:
    """Ten sequence-parallel steps, then what is replicated over tp, and a save."""
    dims = ParallelDims(tp=group.size())
    mesh = mesh_of(dims)
    critic = Critic.from_pretrained(
        path, dims=dims, mesh=mesh, device="cpu", optimizer=OptimizerOptions(learning_rate=0.01)
    )
    for _ in range(10):
        critic.update(make_batch(), value_loss)
    critic.save_pretrained(out)
    state = critic.engine.module.state_dict()
    replicated = {name: tensor for name, tensor in state.items() if "norm" in name or name.startswith("score")}
    return {"replicated": replicated, "values": critic.values(make_batch())}


def test_replicated_parameters_stay_equal_to_the_bit_and_a_critic_is_saved_for_transformers(
    ranks: RankPool, value_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "critic"
    first, second = ranks.run(train_and_look, value_model, out, world=2)
    assert len(first["replicated"]) == 2 * 2 + 1 + 2
    for name, tensor in first["replicated"].items():
        assert torch.equal(tensor, second["replicated"][name]), name
    reloaded = LlamaForTokenClassification.from_pretrained(out).eval()
    assert reloaded.num_labels == 1
    with torch.no_grad():
        sequences = [tokens for tokens in make_batch().split() if len(tokens)]
        rows = [reloaded(tokens[None]).logits[0, :, 0] for tokens in sequences]
    expected = torch.cat([torch.cat([torch.zeros(1), row[:-1]]) for row in rows])
    torch.testing.assert_close(first["values"], expected, rtol=1e-5, atol=1e-5)


def reward_learn_and_save(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, out: Path
) -> tuple[list[int], Tensor, Tensor]:
    """Rewards of this rank's part, before and after a step."""
    mesh = mesh_of(dims)
    indices = my_part(group, dims)
    part = make_batch().select(indices)
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        critic = Critic.from_pretrained(
            path,
            backend=backend,
            dims=dims,
            mesh=mesh,
            device="cpu",
            max_tokens_per_micro_batch=20,
            optimizer=OptimizerOptions(learning_rate=0.01),
        )
        before = critic.rewards(part)
        critic.update(part, lambda inputs: losses.LossTerms((inputs.values - 3).square()))
        critic.save_pretrained(out)
        return indices, before, critic.rewards(part)


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ParallelDims(dp=2)),
        pytest.param("parallel", ParallelDims(dp=2, tp=2), marks=pytest.mark.slow),
        ("megatron", ParallelDims(tp=2)),
        ("transformers", ParallelDims()),
        pytest.param("transformers", ParallelDims(dp=2), marks=pytest.mark.slow),
    ],
)
def test_a_reward_model_gives_transformers_rewards_and_stays_one(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, backend: str, dims: ParallelDims
) -> None:
    path = tiny("reward", tie_word_embeddings=True)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    found = ranks.run(reward_learn_and_save, path, backend, dims, tmp_path / "out", world=dims.world_size)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    after, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for number, rewards in enumerate((rewards_of(model.eval()), rewards_of(after.eval()))):
        assert rewards.abs().max() > 0.1
        for indices, *given in found:
            torch.testing.assert_close(given[number], rewards[indices], rtol=1e-5, atol=1e-5)
    # transformers takes the same weights for token classification, with a new bias.
    as_tokens = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(as_tokens.score.weight, after.score.weight)


@torch.no_grad()
def rewards_of(model: Any) -> Tensor:
    """Return a value for each sequence of the batch; 0 for a sequence without tokens."""
    rows = [model(tokens[None]).logits[0, 0] if len(tokens) else torch.zeros(()) for tokens in make_batch().split()]
    return torch.stack(rows)


def test_save_is_bit_identical_to_what_was_loaded(model: Path, tmp_path: Path) -> None:
    Actor.from_pretrained(model, device="cpu").save_pretrained(tmp_path / "out")
    before, after = (ckpt.Checkpoint.open(path) for path in (model, tmp_path / "out"))
    assert before.tensors.keys() == after.tensors.keys()
    first, second = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def save_from_some_ranks(group: ProcessGroup, path: Path, out: Path, backend: str, dims: ParallelDims) -> None:
    members = list(range(1, 1 + dims.world_size))
    if group.rank() in members:
        mesh = dims.build_mesh("cpu", members)
        Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu").save_pretrained(out)


@pytest.mark.parametrize(("backend", "dims"), [("parallel", ParallelDims(tp=2)), ("transformers", ParallelDims(dp=2))])
def test_a_grid_without_the_first_rank_saves_what_it_loaded(
    ranks: RankPool, model: Path, tmp_path: Path, backend: str, dims: ParallelDims
) -> None:
    out = tmp_path / "out"
    ranks.run(save_from_some_ranks, model, out, backend, dims, world=4)
    before, after = (load_file(path / "model.safetensors") for path in (model, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def load_and_save(group: ProcessGroup, path: Path, out: Path, dims: ParallelDims) -> None:
    Actor.from_pretrained(path, dims=dims, mesh=dims.build_mesh("cpu"), device="cpu").save_pretrained(out)


def test_a_save_from_dp_and_tp_is_bit_identical_to_what_was_loaded(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    ranks.run(load_and_save, model, tmp_path / "out", ParallelDims(dp=2, tp=2), world=4)
    report = ckpt.verify(model, tmp_path / "out")
    assert report.equal, report.first
    assert report.tensors == len(load_file(model / "model.safetensors"))


def raise_alike(group: ProcessGroup, path: Path, what: str) -> str:
    dims = ParallelDims(tp=group.size())
    mesh = mesh_of(dims)
    try:
        actor = Actor.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", max_tokens_per_micro_batch=8)
        if what == "vocabulary":
            actor.log_probs(Batch.from_sequences([[1, 2], [3, 61]]))
        elif what == "budget":
            actor.log_probs(Batch.from_sequences([[1] * 3, [1] * 9]))
        elif what == "mask":
            actor.update(Batch.from_sequences([[1], [2]]), policy_loss)
        elif what == "loss":
            actor.update(Batch.from_sequences([[1, 2]]), lambda inputs: losses.LossTerms(inputs.log_probs.mean()))
        elif what == "nan":
            actor.update(
                Batch.from_sequences([[1, 2]]),
                lambda inputs: losses.LossTerms(inputs.log_probs * float("nan")),
            )
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("vocabulary", "token id 61 at index [3] is outside the vocabulary 0..60"),
        ("budget", "sample 1 has 9 tokens, more than max_tokens=8"),
        ("mask", "no token of the batch is in its mask"),
        ("loss", "the loss must be one number per token, [2], got torch.Size([])"),
        ("nan", "FloatingPointError: the gradient norm is nan"),
    ],
)
def test_mistakes_raise_on_every_rank_alike(ranks: RankPool, model: Path, what: str, message: str, tp: int) -> None:
    for said in ranks.run(raise_alike, model, what, world=tp, timeout=60):
        assert message in said


# What the backends call the last norm, and the value head.
NORMS = {"model.norm", "final_layernorm"}
HEADS = {"score", "output_layer"}


def bf16_values(group: ProcessGroup, path: Path, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The values of a bf16 critic whose head is not zero, its final hidden states, and the head's weight and bias."""
    seen: list[Tensor] = []
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        critic = Critic.from_pretrained(path, backend=backend, device="cpu", dtype=torch.bfloat16)
        modules = critic.engine.module.named_modules()
        named = {end: module for name, module in modules for end in NORMS | HEADS if f".{name}".endswith(f".{end}")}
        (norm,), (head,) = ([named[end] for end in ends & named.keys()] for ends in (NORMS, HEADS))
        with torch.no_grad():
            head.bias.fill_(0.3)
        norm.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
        values = critic.values(make_batch())
    return values, seen[-1].reshape(-1, 32), head.weight.detach(), head.bias.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bf16_critics_head_computes_in_fp32(ranks: RankPool, value_model: Path, backend: str) -> None:
    ((values, hidden, weight, bias),) = ranks.run(bf16_values, value_model, backend, world=1)
    assert weight.any()
    assert {hidden.dtype, weight.dtype, bias.dtype} == {torch.bfloat16}
    assert values.dtype == torch.float32
    expected, rounded = (
        # The value before each token: that after the one before it in its sequence.
        torch.cat([torch.cat((part.new_zeros(1), part))[: len(part)] for part in make_batch().split(after)])
        for after in (hidden.float() @ weight[0].float() + bias.float(), (hidden @ weight[0] + bias).float())
    )
    assert (rounded - expected).abs().max() > 1e-3
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_the_head_is_told_whether_to_keep_its_probabilities(
    model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping probabilities changes the head only; on a CPU it changes nothing."""
    module = {"parallel": "parallel_models.model.language_models", "transformers": "hf_patches.head"}[backend]
    kept: list[bool | str] = []

    def head(*args: Any, keep_probabilities: Any, **options: Any) -> LogProbs:
        kept.append(keep_probabilities)
        return linear_log_probs(*args, keep_probabilities=keep_probabilities, **options)

    monkeypatch.setattr(f"{module}.linear_log_probs", head)
    results = []
    for options in ({}, {"keep_probabilities": False}, {"keep_probabilities": True}):
        actor = Actor.from_pretrained(model, backend=backend, device="cpu", **options)
        results.append(actor.update(make_batch(), policy_loss))
    assert list(dict.fromkeys(kept)) == ["auto", False, True]
    assert results[0] == results[1] == results[2]


def update_without_sequences(group: ProcessGroup, path: Path, backend: str) -> tuple[dict[str, float], list[int]]:
    """An update in which the last of the ranks has no sequences; and how many log-probs each of them gets."""
    dims = ParallelDims(dp=group.size())
    mesh = mesh_of(dims)
    batch = make_batch()
    if group.rank() == 1:
        batch = batch.select([])
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu")
        return actor.update(batch, policy_loss), list(actor.log_probs(batch).log_probs.shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_data_parallel_rank_may_have_no_sequences(ranks: RankPool, model: Path, backend: str) -> None:
    ((whole, [tokens]),) = ranks.run(update_without_sequences, model, backend, world=1, timeout=60)
    (first, [every]), (second, [none]) = ranks.run(update_without_sequences, model, backend, world=2, timeout=60)
    assert (every, none) == (tokens, 0)
    assert first == second == pytest.approx(whole, rel=1e-5)
    assert {"loss", "entropy", "clip_fraction", "approx_kl"} <= first.keys()


def test_callers_mistakes_say_what_to_give(model: Path) -> None:
    actor = Actor.from_pretrained(model, device="cpu")
    padded: Any = torch.ones(2, 3, dtype=torch.int64)
    batch = Batch.from_sequences([[1, 2, 3]])
    for call, message in (
        (lambda: actor.log_probs(padded), r"expected a Batch, got Tensor \[2, 3\]; make one with Batch.from_sequences"),
        (lambda: actor.update(padded, policy_loss), r"expected a Batch, got Tensor \[2, 3\]"),
        (lambda: Critic.rewards(actor, padded), r"expected a Batch, got Tensor \[2, 3\]"),  # type: ignore[arg-type]
        (lambda: actor.log_probs(batch, temperature="1"), "temperature='1' must be a finite number, not str"),  # type: ignore[call-overload]
        (lambda: actor.stream_weights(to="vllm"), r"to='vllm' must be ranks of the grid, 0 to 0, such as \[0\]"),
        (lambda: actor.stream_weights(to=[1]), r"to=\[1\] must be ranks of the grid, 0 to 0"),
        (
            lambda: Actor.from_pretrained(model, device="cpu", max_tokens_per_micro_batch="9"),  # type: ignore[arg-type]
            "max_tokens_per_micro_batch='9' must be an integer, not str",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_an_update_without_an_optimizer_says_its_learning_rate_once(model: Path) -> None:
    actor, batch = Actor.from_pretrained(model, device="cpu"), Batch.from_sequences([[1, 2, 3]])
    with pytest.warns(UserWarning, match=r"no optimizer was given: updates take AdamW with learning_rate=1e-06; pass"):
        actor.update(batch, lambda inputs: losses.LossTerms(-inputs.log_probs))
    chosen = Actor.from_pretrained(model, device="cpu", optimizer=OptimizerOptions())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (actor, chosen):
            each.update(batch, lambda inputs: losses.LossTerms(-inputs.log_probs))


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_a_model_to_be_trained_in_fp16_is_refused_when_it_is_loaded(model: Path, tmp_path: Path, backend: str) -> None:
    half = Actor.from_pretrained(model, backend=backend, device="cpu", dtype=torch.float16)
    half.save_pretrained(tmp_path / "half")
    batch = Batch.from_sequences([[1, 2, 3]])
    assert half.log_probs(batch).log_probs.isfinite().all()
    for path, dtype in ((model, torch.float16), (tmp_path / "half", None)):
        with pytest.raises(ValueError, match=f"backend='{backend}' does not train a model in float16: .*bfloat16"):
            Actor.from_pretrained(path, backend=backend, device="cpu", dtype=dtype, optimizer=OptimizerOptions())
