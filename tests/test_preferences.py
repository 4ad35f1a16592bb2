"""DPO of an `Actor` and Bradley-Terry of a `Critic` against transformers: losses and every gradient, over grids."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, losses
from rl_models.calls import accumulate, for_all
from rl_models.losses import LossTerms

VOCAB, BETA, PAIRS = 61, 0.7, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GRIDS = {name: ParallelDims.parse(name) for name in ("dp=2", "tp=2", "pp=2", "cp=2", "dp=2,tp=2", "dp=2,pp=2")}
# A pair is 12 to 32 tokens: two or three micro-batches on a rank.
MAX_TOKENS = 36


def make_pairs() -> Batch:
    generator = torch.Generator().manual_seed(3)

    def rows(least: int, most: int) -> list[Tensor]:
        lengths = torch.randint(least, most, (PAIRS,), generator=generator).tolist()
        return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]

    return Batch.from_pairs(rows(2, 6), rows(3, 9), rows(4, 11))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor, dict[str, Tensor]]]:
    """By kind: the checkpoint, the loss of each pair `[P]` and the gradients of their mean, by transformers."""
    folder, batch, found = tmp_path_factory.mktemp("preferences"), make_pairs(), {}
    for kind, architecture in (("actor", LlamaForCausalLM), ("critic", LlamaForSequenceClassification)):
        torch.manual_seed(1)
        model = architecture(LlamaConfig(**SIZES, num_labels=1)).eval()
        model.save_pretrained(folder / kind)
        rewards = []
        for tokens, mask, reference in zip(batch.split(), batch.split("mask"), reference_rows(batch), strict=True):
            logits = model(tokens[None]).logits[0]
            if kind == "critic":
                rewards.append(logits[0])
                continue
            log_probs = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            rewards.append(BETA * (log_probs - reference[1:])[mask[1:]].sum())
        chosen, rejected = torch.stack(rewards).view(-1, 2).unbind(1)
        terms = -logsigmoid(chosen - rejected)
        terms.mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder / f"{kind}-gradients")
        found[kind] = folder / kind, terms.detach(), load_file(folder / f"{kind}-gradients" / "model.safetensors")
    return found


def reference_rows(batch: Batch) -> list[Tensor]:
    """The log-probs of a reference policy, which the test draws."""
    generator = torch.Generator().manual_seed(4)
    return [-3 * torch.rand(length, generator=generator) for length in batch.lengths]


@cache
def mesh_of(dims: ParallelDims) -> DeviceMesh:
    return dims.build_mesh("cpu", list(range(dims.world_size)))


def run_native(
    group: ProcessGroup, path: Path, kind: str, dims: ParallelDims
) -> tuple[dict[int, float], dict[str, float], dict[str, Tensor]]:
    """The loss of each pair of this rank, the metrics, and on the first rank every gradient."""
    worker: Any = {"actor": Actor, "critic": Critic}[kind].from_pretrained(
        path, dims=dims, mesh=mesh_of(dims), device="cpu", max_tokens_per_micro_batch=MAX_TOKENS
    )
    batch = make_pairs().with_fields(reference_log_probs=torch.cat(reference_rows(make_pairs())))
    whole = batch if kind == "actor" else batch.with_ends()
    part = for_all(whole, dims.dp, VOCAB)[0][worker.grid.rank("dp")]
    terms: dict[int, float] = {}

    def loss(inputs: LossInputs) -> LossTerms:
        arguments = inputs["pair"], inputs.batch.mask, inputs.batch.lengths
        if kind == "actor":
            found = losses.dpo(inputs.log_probs, inputs["reference_log_probs"], *arguments, beta=BETA)
        else:
            found = losses.bradley_terry(inputs.values, *arguments)
        terms.update(zip(inputs["pair"].tolist(), found.loss.tolist(), strict=True))
        return found

    options = {"call": "update", "aggregation": "sequence-mean", "temperature": 1.0}
    metrics = accumulate(worker.engine, part, loss, MAX_TOKENS, **options)
    shards = worker.engine.shards()
    local = [
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in chunk.items()}
        for _, chunk in shards.chunks
    ]
    streamed = ckpt.stream_hf(local, shards.layout, worker.grid.everyone, shards.places, to=[0])
    return terms, metrics, {name: tensor.detach() for name, tensor in streamed}


QUICK = {("actor", "dp=2"), ("critic", "pp=2")}


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        pytest.param(kind, grid, marks=() if (kind, grid) in QUICK else pytest.mark.slow)
        for kind in ("actor", "critic")
        for grid in GRIDS
    ],
)
def test_preferences_equal_transformers(ranks: RankPool, references: Any, kind: str, grid: str) -> None:
    path, expected, wanted = references[kind]
    dims = GRIDS[grid]
    per_rank = ranks.run(run_native, path, kind, dims, world=dims.world_size, timeout=120)
    seen = {pair: loss for terms, _, _ in per_rank for pair, loss in terms.items()}
    torch.testing.assert_close(torch.tensor([seen[pair] for pair in range(PAIRS)]), expected, rtol=1e-5, atol=1e-5)
    for _, metrics, _ in per_rank:
        assert metrics["loss"] == pytest.approx(float(expected.mean()), rel=1e-5)
        # The loss of a pair is below log 2 where the chosen response has the larger reward.
        assert metrics["reward_accuracy"] == pytest.approx(float((expected < math.log(2)).float().mean()), rel=1e-5)
    gradients = per_rank[0][2]
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        message = f"{name}: ".__add__
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=2e-5 * scale, msg=message)
