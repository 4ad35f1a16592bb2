"""Log-probs within given tokens, against a log-softmax of materialised logits in which all other tokens are -inf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import linear_log_probs
from parallel_layers.head import chunked
from parallel_layers.testing import RankPool

IGNORE = -100
TOKENS, HIDDEN, VOCABULARY, WIDTH = 37, 16, 51, 6


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels, up to six tokens of each row with its label, and upstream gradients `[2, T]`.

    Every fifth row has no label and no tokens.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) / 2
    within = torch.full((TOKENS, WIDTH), -1)
    for row in range(TOKENS):
        ids = torch.randperm(VOCABULARY, generator=generator)[: 1 + row % WIDTH]
        within[row, : len(ids)] = ids.sort().values
    labels = within[torch.arange(TOKENS), torch.arange(TOKENS) % WIDTH // 2].clone()
    labels[::5], within[::5] = IGNORE, -1
    return hidden, weight, labels, within, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def run(
    function: Callable[..., Any], hidden: Tensor, weight: Tensor, *args: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Values and gradients; the last of `args` is the upstream gradients."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    labels, within, upstream = args
    log_probs, entropy = function(hidden, weight, labels, within_TK=within, **options)
    torch.autograd.backward((log_probs, entropy), tuple(upstream))
    grads = {"hidden": hidden.grad, "weight": weight.grad}
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), **grads}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-12) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=0, atol=atol)


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    within_TK: Tensor,
    *,
    temperature: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float = torch.inf,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T * logit_scale
    logits = logits if logit_softcap == torch.inf else (logits / logit_softcap).tanh() * logit_softcap
    logits = logits if temperature is None else logits / temperature.unsqueeze(1)
    log_probs, entropies = [], []
    for row, label, ids in zip(logits, labels.tolist(), within_TK, strict=True):
        kept = ids[ids >= 0]
        own = row[kept].log_softmax(0)
        log_probs.append(own[kept == label].sum())
        entropies.append(-(own.exp() * own).sum())
    return torch.stack(log_probs), torch.stack(entropies)


OPTIONS = {
    "plain": {},
    "everything": {"temperature": torch.linspace(0.5, 2.0, TOKENS), "logit_softcap": 4.0, "logit_scale": 0.8},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_materialised_logits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked.TILE_ELEMENTS, "cpu", 250)
    actual = run(linear_log_probs, *problem(), **options)
    assert_same(actual, run(reference, *problem(), **options))
    assert not actual["log_probs"][::5].any()
    assert not actual["entropy"][::5].any()


def test_bf16_inputs_give_fp32_results() -> None:
    hidden, weight, labels, within, upstream = problem()
    rounded = hidden.bfloat16(), weight.bfloat16()
    actual = run(linear_log_probs, *rounded, labels, within, upstream.float())
    expected = run(reference, *(x.double() for x in rounded), labels, within, upstream)
    assert_same(actual, {name: expected[name] for name in ("log_probs", "entropy")}, 1e-5)
    assert_same(actual, expected, 2e-2)


def on_ranks(group: ProcessGroup, sequence_parallel: bool) -> dict[str, Tensor]:
    """This rank's results; its rows of a padded head, and with sequence parallelism its hidden states."""
    hidden, weight, labels, within, upstream = (x[:36] if len(x) == TOKENS else x for x in problem())
    rank, size = group.rank(), group.size()
    padded = torch.cat([weight, weight.new_full((-VOCABULARY % size, HIDDEN), 7.0)])
    own = hidden.chunk(size)[rank] if sequence_parallel else hidden
    return run(
        linear_log_probs, own, padded.chunk(size)[rank], labels, within, upstream[:, :36],
        group=group, vocab_size=VOCABULARY, sequence_parallel=sequence_parallel,
    )  # fmt: skip


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, False), (4, True)])
def test_sharded(ranks: RankPool, world: int, sequence_parallel: bool) -> None:
    found = ranks.run(on_ranks, sequence_parallel, world=world)
    hidden, weight, labels, within, upstream = problem()
    expected = run(reference, hidden[:36], weight, labels[:36], within[:36], upstream[:, :36])
    whole = {"weight": torch.cat([result.pop("weight") for result in found])}
    assert not whole["weight"][VOCABULARY:].any()
    whole["weight"] = whole["weight"][:VOCABULARY]
    if sequence_parallel:
        whole["hidden"] = torch.cat([result.pop("hidden") for result in found])
    for result in found:
        assert_same(whole | result, expected)


def test_mistakes_are_refused() -> None:
    hidden, weight, labels, within, _ = problem()
    mistakes = [(within[1:], 0), (within.float(), 0), (within[:, 0], 0), (within, 2)]
    for given, blocks in mistakes:
        with pytest.raises(ValueError, match=r"within_TK must be integers \[37, K\], and blocks=0"):
            linear_log_probs(hidden, weight, labels, within_TK=given, blocks=blocks)
