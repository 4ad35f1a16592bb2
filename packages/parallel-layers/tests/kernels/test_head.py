"""The gradient of logits from saved exponentials, tile by tile; `tests/head/test_fused.py` has the head as a whole."""

import pytest
import torch

from parallel_layers.head import fused
from parallel_layers.kernels import head_triton
from parallel_layers.kernels.runtime import tl, triton


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    return tl.log2(x)


@pytest.mark.parametrize(
    ("first", "entries", "overwrite"), [(0, 40, False), (0, 40, True), (16, 24, False), (16, 9, False)]
)
def test_kept_gradient(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, first: int, entries: int, overwrite: bool
) -> None:
    """Compare a slice of the vocabulary whose tokens and entries do not divide the tiles, or its exponentials."""
    if device.type == "cpu":  # the interpreter has no hardware logarithm
        monkeypatch.setattr(head_triton, "_fast_log2", _log2)
    monkeypatch.setattr(fused, "BLOCK_V", 16)
    torch.manual_seed(0)
    tokens, size = 37, 40
    logits = 2 * torch.randn(tokens, size, device=device)
    tiles = logits.split(16, dim=1)
    maxima = [tile.amax(1) for tile in tiles]
    parts = torch.stack([maximum.expand(3, -1) for maximum in maxima])
    exponentials = torch.cat([(z - m[:, None]).exp() for z, m in zip(tiles, maxima, strict=True)], dim=1)
    log_probs = logits.log_softmax(1)
    entropies = -(log_probs.exp() * log_probs).sum(1)
    labels = torch.randint(size, (tokens,), device=device)
    grad_log_prob, grad_entropy = torch.randn(2, tokens, device=device)
    rows = (labels, None, grad_log_prob, grad_entropy, logits.logsumexp(1), entropies)
    gradient = exponentials if overwrite else torch.empty(tokens, entries, device=device)
    fused.saved_gradient(fused.SavedTiles(exponentials, parts), gradient, rows, (1.0, 0.0, 1.0), first)
    is_label = torch.nn.functional.one_hot(labels, size)
    expected = grad_log_prob[:, None] * (is_label - log_probs.exp())
    expected -= grad_entropy[:, None] * log_probs.exp() * (log_probs + entropies[:, None])
    torch.testing.assert_close(gradient, expected[:, first : first + entries], rtol=1e-4, atol=1e-5)
