"""An actor learns from a teacher's hidden states and head, or from log-probs of K tokens, against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.head import SamplingMask
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LoraOptions, LossInputs, OptimizerOptions
from rl_models.api import WholeBatches
from rl_models.batch import OtherPrompts
from rl_models.calls import Divergence
from rl_models.losses import LossTerms

ROWS = [[1, 4, 5, 6], [7, 8, 2, 3, 9], [2, 3, 4, 5, 6, 7], [8, 9, 1]]
TEMPERATURE, LISTED = 0.7, 5
RATE, EPS = 0.1, 1.0


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> tuple[Path, Path]:
    """A student and a wider teacher; the second pair has tied heads."""
    student = tiny("llama", tie_word_embeddings=request.param)
    return student, tiny("llama", tie_word_embeddings=request.param, hidden_size=48, intermediate_size=32)


def learn(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs["divergence"] + 0.1 * inputs.entropy)


def dense(path: Path, row: list[int], temperature: float) -> Tensor:
    return (AutoModelForCausalLM.from_pretrained(path)(torch.tensor([row])).logits[0, :-1] / temperature).log_softmax(
        -1
    )


def listed(teacher: Path) -> tuple[list[Tensor], list[Tensor]]:
    """The K most likely tokens at each token, and their log-probs; the first token of a sequence has none."""
    ids, log_probs = [], []
    for row in ROWS:
        top = dense(teacher, row, TEMPERATURE).detach().topk(LISTED)
        ids.append(torch.cat((torch.full((1, LISTED), -1), top.indices)))
        log_probs.append(torch.cat((torch.zeros(1, LISTED), top.values)))
    return ids, log_probs


def reference(student: Path, teacher: Path, divergence: Divergence, top: bool) -> dict[str, Tensor]:
    """The weights after the first step of AdamW, which divides by |g| + eps."""
    model = AutoModelForCausalLM.from_pretrained(student)
    losses = []
    for row in ROWS:
        log_q = (model(torch.tensor([row])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        log_p = dense(teacher, row, TEMPERATURE).detach()
        entropy = -(log_q.exp() * log_q).sum(-1)
        if top:
            ids = log_p.topk(LISTED).indices
            tail = [torch.full_like(x, 1.0).scatter(1, ids, 0.0) * x.exp() for x in (log_p, log_q)]
            log_p, log_q = (
                torch.cat((x.gather(1, ids), rest.sum(1, keepdim=True).log()), 1)
                for x, rest in zip((log_p, log_q), tail, strict=True)
            )
        if divergence.name == "reverse_kl":
            value = (log_q.exp() * (log_q - log_p)).sum(-1)
        else:
            assert divergence == ("jensen_shannon", 0.5)
            mixture = ((log_p.exp() + log_q.exp()) / 2).log()
            value = sum(0.5 * (x.exp() * (x - mixture)).sum(-1) for x in (log_p, log_q))
        losses.append(value + 0.1 * entropy)
    torch.cat(losses).mean().backward()
    return {name: p.detach() - RATE * p.grad / (p.grad.abs() + EPS) for name, p in model.named_parameters()}


def on_grid(
    group: ProcessGroup, student: Path, teacher: Path, dims: ParallelDims, divergence: Divergence, top: bool, out: Path
) -> float:
    def load(path: Path) -> Any:
        optimizer = OptimizerOptions(learning_rate=RATE, eps=EPS, weight_decay=0.0, max_grad_norm=math.inf)
        options: dict[str, Any] = {"device": "cpu", "optimizer": optimizer, "max_tokens_per_micro_batch": 7}
        return WholeBatches(Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), **options))

    actor, batch = load(student), Batch.from_sequences(ROWS)
    if top:
        ids, log_probs = listed(teacher)
        batch = Batch.from_sequences(ROWS, teacher_ids=ids, teacher_log_probs=log_probs)
    else:
        batch = batch.with_fields(teacher_states=load(teacher).states(batch))
        actor.load_teacher_head(teacher)
    metrics: dict[str, float] = actor.update(batch, learn, temperature=TEMPERATURE, divergence=divergence)
    actor.save_pretrained(out)
    return metrics["loss"]


@pytest.mark.parametrize(
    ("dims", "divergence", "top"),
    [
        (ParallelDims(tp=2), Divergence("reverse_kl"), False),
        (ParallelDims(dp=2), Divergence("jensen_shannon", 0.5), True),
        (ParallelDims(pp=2), Divergence("reverse_kl"), False),
        pytest.param(ParallelDims(pp=2), Divergence("jensen_shannon", 0.5), True, marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, tp=2), Divergence("reverse_kl"), False, marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, cp=2), Divergence("reverse_kl"), True, marks=pytest.mark.slow),
        pytest.param(ParallelDims(), Divergence("reverse_kl"), False, marks=pytest.mark.slow),
        pytest.param(ParallelDims(cp=2), Divergence("jensen_shannon", 0.5), False, marks=pytest.mark.slow),
        pytest.param(ParallelDims(cp=2), Divergence("reverse_kl"), True, marks=pytest.mark.slow),
        pytest.param(ParallelDims(dp=2, tp=2), Divergence("reverse_kl"), False, marks=pytest.mark.slow),
        pytest.param(ParallelDims(cp=2, tp=2), Divergence("reverse_kl"), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_equals_that_of_materialised_logits(
    ranks: RankPool,
    models: tuple[Path, Path],
    dims: ParallelDims,
    divergence: Divergence,
    top: bool,
    tmp_path: Path,
) -> None:
    ranks.run(on_grid, *models, dims, divergence, top, tmp_path / "out", world=dims.world_size, timeout=60)
    actual = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, weight in reference(*models, divergence, top).items():
        torch.testing.assert_close(actual[name].detach(), weight, rtol=0, atol=2e-6, msg=name)


def test_a_policy_learns_from_its_base_that_reads_another_prompt(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Self-distillation: the teacher is the policy without its adapters, in another context."""
    optimizer, lora = OptimizerOptions(learning_rate=RATE), LoraOptions(rank=2, targets=".*_proj|lm_head")
    actor = Actor.from_pretrained(models[0], device="cpu", optimizer=optimizer, lora=lora)
    batch = Batch.from_sequences(ROWS, response_lengths=[2, 3, 4, 1])
    actor.update(batch, lambda inputs: -inputs.log_probs)  # else the adapters change nothing
    actor.save_pretrained(tmp_path / "learned")
    prompts = [[11, 12, 13], [14], [15, 16, 17, 18, 19], [20, 21]]
    other = OtherPrompts.of(batch, prompts)
    actor.load_teacher_head(models[0])
    states = other.aligned(actor.states(other.batch, adapters=False))
    seen = list[Tensor]()

    def loss(inputs: LossInputs) -> Tensor:
        seen.append(inputs["divergence"].detach())
        return inputs["divergence"]

    actor.forward_backward(
        batch.with_fields(teacher_states=states), loss, temperature=TEMPERATURE, divergence=Divergence("reverse_kl")
    )
    expected = []
    for row, count, prompt in zip(ROWS, [2, 3, 4, 1], prompts, strict=True):
        log_q = dense(tmp_path / "learned", row, TEMPERATURE)[-count:]
        log_p = dense(models[0], prompt + row[-count:], TEMPERATURE)[-count:]
        expected += [torch.zeros(len(row) - count), (log_q.exp() * (log_q - log_p)).sum(-1)]
    torch.testing.assert_close(seen[0], torch.cat(expected).detach(), rtol=0, atol=2e-6)


def test_with_a_sampling_mask_the_divergence_is_over_the_vocabulary(models: tuple[Path, Path]) -> None:
    actor = Actor.from_pretrained(models[0], device="cpu", optimizer=OptimizerOptions(learning_rate=RATE))
    ids, log_probs = listed(models[1])
    batch = Batch.from_sequences(ROWS, teacher_ids=ids, teacher_log_probs=log_probs)
    alone = SamplingMask.from_rows([[int(token)] for token in batch.tokens])
    seen = list[tuple[Tensor, Tensor]]()

    def loss(inputs: LossInputs) -> Tensor:
        seen.append((inputs.log_probs.detach(), inputs["divergence"].detach()))
        return inputs["divergence"]

    for drawn in (batch, replace(batch, sampling_mask=alone)):
        actor.forward_backward(drawn, loss, divergence=Divergence("forward_kl"))
    assert torch.equal(seen[0][1], seen[1][1])
    assert seen[0][0].lt(0).any()
    assert seen[1][0].eq(0).all()


def test_what_is_missing_is_named(models: tuple[Path, Path], tiny: Callable[..., Path]) -> None:
    student, teacher = models
    optimizer = OptimizerOptions(learning_rate=RATE)
    actor = Actor.from_pretrained(student, device="cpu", optimizer=optimizer)
    batch, divergence = Batch.from_sequences(ROWS), Divergence("reverse_kl")
    states = torch.zeros(batch.num_tokens, 48)
    with pytest.raises(ValueError, match=r"needs the field teacher_states \[T, H\], or teacher_ids and teacher_log"):
        actor.update(batch, learn, divergence=divergence)
    with pytest.raises(ValueError, match=r"teacher_states \[18, 48\] needs load_teacher_head\(folder\)"):
        actor.update(batch.with_fields(teacher_states=states), learn, divergence=divergence)
    actor.load_teacher_head(teacher)
    with pytest.raises(ValueError, match=r"teacher_states \[18, 32\] needs \[T, 48\], as the teacher's head"):
        actor.update(batch.with_fields(teacher_states=states[:, :32]), learn, divergence=divergence)
    with pytest.raises(ValueError, match="divergence='kl' is unknown"):
        actor.update(batch.with_fields(teacher_states=states), learn, divergence=Divergence("kl"))
    with pytest.raises(ValueError, match="has a vocabulary of 50 entries, and the policy one of 61; take a teacher"):
        actor.load_teacher_head(tiny("llama", vocab_size=50))
    other = Actor.from_pretrained(student, device="cpu", optimizer=optimizer, backend="transformers")
    with pytest.raises(ValueError, match="a divergence needs backend='parallel' and"):
        other.update(batch, learn, divergence=divergence)
    with pytest.raises(ValueError, match="hidden states need backend='parallel' and"):
        other.states(batch)
