"""The same bits on GPUs: bf16 on Triton kernels and each flash attention, at tp 1 and 2 and in many packs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    invariant,
    linear_log_probs,
    next_token_labels,
)
from parallel_layers.attention.backends import available_backends
from parallel_layers.invariant import INVARIANT_BACKENDS, tp_invariant
from parallel_layers.linear.execution import Placement
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(
    hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=1408, attention_bias=True,
    qk_norm="head",
)  # fmt: skip
VOCABULARY = 2056
LENGTHS = [300, 1, 77, 513, 16]


def build(config: DecoderConfig, group: ProcessGroup | None, sequence_parallel: bool) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    place = {"group": group, "dtype": torch.bfloat16, "device": "cuda"}
    divided = {**place, "sequence_parallel": sequence_parallel}
    layer = {"placement": Placement(group, sequence_parallel), "dtype": torch.bfloat16, "device": "cuda"}
    return torch.nn.ModuleList(
        [
            VocabParallelEmbedding(VOCABULARY, config.hidden_size, **divided),
            DecoderLayer(config, **layer),
            DecoderLayer(config, **layer),
            RMSNorm(config.hidden_size, **divided),
            VocabParallelEmbedding(VOCABULARY, config.hidden_size, **place),
            RotaryEmbedding(config.head_dim, device="cuda"),
        ]
    )


def log_probs(
    model: torch.nn.ModuleList, packed: PackedSequence, group: ProcessGroup | None, sequence_parallel: bool, of: object
) -> Tensor:
    """`[2, T]`: log-probs and entropies."""
    embed, *layers, norm, head, rotary = model
    x = embed(packed.input_ids)
    for layer in layers:
        x = layer(x, rotary(packed.position_ids), packed.cu_seqlens, packed.max_seqlen)
    return torch.stack(
        of(
            norm(x), head.weight * 0.02, next_token_labels(packed), group=group, sequence_parallel=sequence_parallel,
            vocab_size=VOCABULARY,
        )
    )  # fmt: skip


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).cuda() for n in LENGTHS]


@torch.no_grad()
def score_in_many_packs(backend: str, group: ProcessGroup | None, sequence_parallel: bool) -> list[list[Tensor]]:
    model = tp_invariant(build(replace(CONFIG, attention_backend=backend), group, sequence_parallel))
    multiple = group.size() if group is not None and sequence_parallel else 1

    def score(rows: list[Tensor], multiple_of: int = 1) -> list[Tensor]:
        packed = PackedSequence.from_sequences(rows, multiple_of=multiple_of * multiple)
        found = log_probs(model, packed, group, sequence_parallel, invariant.linear_log_probs)
        return [part.cpu() for part in packed.split(found.T)]

    rows = sequences()
    neighbour = torch.arange(1000, device="cuda") % VOCABULARY
    return [
        score(rows),
        [score([row])[0] for row in rows],
        score(rows[::-1])[::-1],
        score([neighbour, *rows], 64)[1:],
        score(rows[:2], 7) + score(rows[2:], 8),
    ]


def _score(group: ProcessGroup, backend: str) -> list[list[Tensor]]:
    return [found for divided in (False, True) for found in score_in_many_packs(backend, group, divided)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", INVARIANT_BACKENDS)
def test_bitwise_equal_in_every_pack(backend: str) -> None:
    if backend not in available_backends():
        pytest.skip(f"needs {backend}")
    first, *others = score_in_many_packs(backend, None, False)
    for found in others:
        for ours, theirs in zip(found, first, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["auto", "varlen"])
def test_bitwise_equal_at_tp_1_and_2(nccl_ranks: RankPool, backend: str) -> None:
    first = score_in_many_packs(backend, None, False)[0]
    for rank in nccl_ranks.run(_score, backend, world=2):
        for found in rank:
            for ours, theirs in zip(found, first, strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_values_and_gradients_are_the_ordinary_ones() -> None:
    """Within bf16 rounding of the ordinary layers."""
    packed = PackedSequence.from_sequences(sequences())
    model = build(CONFIG, None, False)
    parameters = list(model.parameters())
    results = []
    for one, of in ((tp_invariant(model), invariant.linear_log_probs), (model, linear_log_probs)):
        out = log_probs(one, packed, None, False, of)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), parameters)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).float().norm() <= 0.05 * theirs.float().norm()


def training_step(seed: int) -> list[Tensor]:
    """The loss and every gradient of the ordinary model."""
    torch.manual_seed(seed)
    packed = PackedSequence.from_sequences(sequences())
    model = build(CONFIG, None, False)
    loss = -log_probs(model, packed, None, False, linear_log_probs)[0].sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.gpu
def test_deterministic_steps_are_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with torch's deterministic algorithms: what `rl-train train --deterministic` turns on."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        first = training_step(0)
        for _ in range(3):
            for ours, theirs in zip(training_step(0), first, strict=True):
                assert torch.equal(ours, theirs)
    finally:
        torch.use_deterministic_algorithms(False)
