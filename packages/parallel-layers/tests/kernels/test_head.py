"""The gradient of logits from saved exponentials, tile by tile; `tests/head/test_fused.py` has the head as a whole."""

import math

import pytest
import torch

from parallel_layers.head import chunked, fused, fused_ranking, token_statistics
from parallel_layers.head.chunked import LogitTransform
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.kernels import head_triton
from parallel_layers.kernels.runtime import tl, triton
from parallel_layers.kernels.sampling_mask import label_counts


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


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: None = None) -> None:
    out.copy_(a.float() @ b.float().T)


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_sampling_mask(device: torch.device, monkeypatch: pytest.MonkeyPatch, softcap: float, keep: bool) -> None:
    """Rows that keep all entries, one, none, or those of one tile, in slices of the vocabulary, beside plain torch."""
    dtype = torch.bfloat16
    if device.type == "cpu":  # the interpreter multiplies no bf16 and has no hardware logarithm
        dtype = torch.float32
        monkeypatch.setattr(head_triton, "_fast_log2", _log2)
        monkeypatch.setattr(fused, "add_product_", lambda out, a, b: out.add_(a.float() @ b.float().T))
        monkeypatch.setattr(fused, "multiply_into", _multiply)
    monkeypatch.setattr(fused, "_MASK_BITS", 1)
    monkeypatch.setattr(fused, "_BITS_OF_ID", 0)
    monkeypatch.setattr(fused, "_MIN_SLICE", 256)
    torch.manual_seed(0)
    tokens, size, hidden_size = 130, 600, 64
    hidden = torch.randint(-2, 3, (tokens, hidden_size), device=device).to(dtype)
    weight = torch.randint(-2, 3, (size, hidden_size), device=device).to(dtype) / 16
    counts = [size, 0, 1, *torch.randint(1, 300, (tokens - 3,)).tolist()]
    rows = [torch.randperm(size)[:count] for count in counts]
    rows[3] = torch.arange(256, 512)
    mask = SamplingMask.from_rows(rows, device)
    labels = torch.tensor([int(row[0]) if len(row) else -100 for row in rows], device=device)
    transform = LogitTransform(0.7, softcap, torch.linspace(0.5, 2, tokens, device=device))
    has_row = labels >= 0
    expected = chunked.head_statistics(hidden.float(), weight.float(), labels, transform, mask)
    saved = fused.new_kept(hidden, tokens, size) if keep else None
    actual = fused.head_statistics(hidden, weight, labels, transform, mask, saved)
    results = [[x[has_row] for x in chunked.finish_statistics(statistics)] for statistics in (actual, expected)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    grads = torch.randn(2, tokens, device=device) * has_row
    _, entropy, logsumexp = (x.masked_fill(~has_row, 0) for x in chunked.finish_statistics(expected))
    upstream = chunked.UpstreamGradients(grads[0], grads[1], logsumexp, entropy)
    gradients = []
    for module, inputs, options in (
        (chunked, (hidden.float(), weight.float()), {}),
        (fused, (hidden, weight), {"saved": saved}),
    ):
        pair = torch.zeros(tokens, hidden_size, device=device), torch.zeros(size, hidden_size, device=device)
        module.head_gradients(
            *inputs, labels, transform, upstream, mask, grad_hidden_TH=pair[0], grad_weight_VH=pair[1], **options
        )
        gradients.append(pair)
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=3e-2)
    assert not gradients[1][0][~has_row].any()


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("softcap", "top_n", "size"), [(0.0, 5, 600), (3.0, 20, 600), (0.0, 33, 40)])
def test_ranking(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, softcap: float, top_n: int, size: int, masked: bool
) -> None:
    """Small integers, of which most logits tie, beside plain torch; fewer entries than are listed, in slices."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16
    monkeypatch.setattr(fused, "_MASK_BITS", 1)
    monkeypatch.setattr(fused, "_BITS_OF_ID", 0)
    monkeypatch.setattr(fused, "_MIN_SLICE", 256)
    torch.manual_seed(0)
    tokens, hidden_size = 70, 64
    hidden = torch.randint(-2, 3, (tokens, hidden_size), device=device).to(dtype)
    weight = torch.randint(-2, 3, (size, hidden_size), device=device).to(dtype) / 16
    rows = [torch.randperm(size)[:count] for count in [size, 1, *torch.randint(1, 30, (tokens - 2,)).tolist()]]
    mask = SamplingMask.from_rows(rows, device) if masked else None
    labels = torch.tensor([int(row[0]) for row in rows], device=device)
    transform = LogitTransform(0.7, softcap, torch.linspace(0.5, 2, tokens, device=device))
    inputs = hidden.float(), weight.float()
    of_labels = token_statistics._label_logits(*inputs, labels, transform)
    expected = token_statistics.local_statistics(*inputs, labels, of_labels, transform, mask, top_n)
    log2_logits = fused_ranking.label_logits(hidden, weight, labels, transform)
    torch.testing.assert_close(log2_logits * math.log(2), of_labels, rtol=1e-5, atol=1e-5)
    actual = fused_ranking.ranked_statistics(hidden, weight, labels, log2_logits, transform, mask, top_n)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[1].long(), expected[1])
    torch.testing.assert_close(actual[2].logits, expected[2].logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[2].ids, expected[2].ids)


def test_sampling_masks_labels_are_counted(device: torch.device) -> None:
    """Rows longer than a block, repeated labels, ids outside the vocabulary, and an empty row; labels with strides."""
    rows = [[3] * 1500 + [7, 9], [], [50, -1, 2], [4, 4]]
    mask, labels = SamplingMask.from_rows(rows, device), torch.tensor([[3, 0], [5, 0], [2, 0], [6, 0]], device=device)
    counted, outside = label_counts(mask.ids, mask.offsets, labels[:, 0], 50)
    assert (counted.tolist(), outside.tolist()) == ([1500, 0, 1, 0], [0, 0, 2, 0])
