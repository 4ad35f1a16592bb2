"""Plan the memory of the heads of the last stage beside the hidden states that they read."""

from __future__ import annotations

from collections.abc import Collection

import torch

from parallel_layers import ModelConfig
from parallel_layers.head import BLOCK_V, TILE_ELEMENTS, slice_entries, tile_shape
from rl_train.planner.memory import MemoryOptions

# Multiprocessors of an H100 or H200, which decide the slices of the fused head's backward.
MULTIPROCESSORS = 132


def head_bytes(
    model: ModelConfig,
    options: MemoryOptions,
    dtype: torch.dtype,
    outputs: Collection[str],
    *,
    trained: bool,
    learns: bool,
) -> int:
    """Return the bytes that the larger head needs while it runs; heads run one after the other, in fp32.

    `outputs` are the outputs of the last stage; empty on other stages. A `trained` model runs backward. The gradient of
    the weight of a head that `learns` counts elsewhere. bf16 on a GPU means the fused kernels of Hopper and newer.
    """
    tokens, hidden, size = options.computed, model.decoder.hidden_size, dtype.itemsize
    value_head = 4 * tokens * hidden if "values" in outputs else 0
    if "log_probs" not in outputs:
        return value_head
    vocab = -(-model.vocab_size // options.dims.tp)
    if options.mask_width:
        forward = backward = _within(tokens, hidden, vocab, options, size)
    elif options.device == "cuda" and dtype == torch.bfloat16:
        forward, backward = _fused(tokens, hidden, vocab, kept=options.keep_probabilities)
    else:
        capped = model.logit_softcap is not None
        forward, backward = _chunked(tokens, hidden, vocab, options.device, size, learns=learns, capped=capped)
    # Under sequence parallelism the head gathers the hidden states.
    gathered = size * tokens * hidden if options.dims.tp > 1 else 0
    return max(value_head, gathered + max(forward, backward * trained))


def _fused(tokens: int, hidden: int, vocab: int, *, kept: bool) -> tuple[int, int]:
    """Return the bytes of `parallel_layers.head.fused`, forward and backward."""
    blocks = -(-vocab // BLOCK_V)
    entries = min(slice_entries(tokens, vocab, hidden, MULTIPROCESSORS), blocks * BLOCK_V)
    # The gradients of a slice of logits; later a 16-bit copy of the hidden states' gradient.
    buffer = 0 if kept else 2 * tokens * entries
    # The forward has three fp32 statistics of each block of the vocabulary.
    return 4 * 3 * blocks * tokens, 4 * tokens * hidden + max(buffer, 2 * tokens * hidden)


def _chunked(
    tokens: int, hidden: int, vocab: int, device: str, size: int, *, learns: bool, capped: bool
) -> tuple[int, int]:
    """Return the bytes of `parallel_layers.head.chunked`, forward and backward."""
    rows, entries = tile_shape(tokens, vocab, hidden, device)
    tile, weight = rows * entries, entries * hidden
    # 16-bit operands are copied to fp32.
    copied = tokens * hidden + weight if size < 4 else 0
    # Logits, shifted logits and exponentials; then logits and their gradient. A soft-cap's derivative is a tile, too.
    forward = (3 + capped) * tile
    backward = (2 + capped) * tile + tokens * hidden + weight * learns
    return 4 * (copied + forward), 4 * (copied + backward)


def _within(tokens: int, hidden: int, vocab: int, options: MemoryOptions, size: int) -> int:
    """Return the bytes of `parallel_layers.head.masked_vocabulary`.

    fp32: rows of the head for a tile of tokens and their gradients, and rows for the next tile with a 16-bit copy;
    gradients of the hidden states and of a 16-bit head; for each kept token its row and four numbers.
    """
    width, low = options.mask_width, size < 4
    total = tokens * width * hidden
    rows = min(total, max(width * hidden, TILE_ELEMENTS[options.device]))
    tile = 2 * rows + (2 + low) * min(rows, total - rows) // 2
    return 4 * (tile + tokens * (hidden + 6 * width) + low * (vocab + tokens) * hidden)
