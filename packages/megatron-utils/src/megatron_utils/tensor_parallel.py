"""Log-probabilities and entropies under Megatron's tensor parallelism, and the part of a batch that is response.

The mathematics is parallel-layers': this module puts it on Megatron's tensor-parallel group and picks the tokens. A
model's output at token t predicts token t + 1 of the same sequence, so the log-probability of the response token at
place p is found at place p - 1. The shift is made here, once, on the whole packed batch.

Shape suffixes: T tokens, V this rank's part of the vocabulary, H hidden, R response tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import (
    LogProbs,
    PackedSequence,
    linear_log_probs,
    next_token_labels,
    vocab_parallel_entropy,
    vocab_parallel_log_probs,
)


def tensor_parallel_group() -> ProcessGroup | None:
    """Megatron's tensor-parallel group; None when it has one rank, as parallel-layers' functions take it.

    Raises:
        RuntimeError: no Megatron grid is active.
    """
    # Imported here: those who pass a group of their own do not pay the seconds that this import takes.
    from megatron.core import parallel_state

    group: ProcessGroup | None = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None:
        raise RuntimeError("no Megatron grid is active; enter megatron_grid(dims) or pass a group")
    return group if group.size() > 1 else None


def log_probs_from_logits(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    group: ProcessGroup | None,
    vocab_size: int | None = None,
    entropy: bool = True,
    ignore_index: int = -100,
) -> LogProbs:
    """Log-probability of each label, and entropy, from vocabulary-sharded logits. The logits are never written to.

    Forward: one all-gather of a few numbers a token for the log-probability and one for the entropy; backward: none.
    Nothing of the logits' size is made in the forward (chunks only); the backward makes their gradient.

    Args:
        logits_TV: `[T, V]`, this rank's columns; -inf is an entry of probability zero.
        labels_T: `[T]`, integer, of the whole vocabulary, already shifted.
        group: the tensor-parallel group (`tensor_parallel_group()` for Megatron's); None when the logits are whole.
        vocab_size: the true vocabulary; columns beyond it are padding.
        entropy: whether to compute the entropy.
        ignore_index: the label that means "no label".

    Raises:
        ValueError: shapes that do not fit, or (on every rank alike) a label outside the vocabulary.
    """
    log_probs = vocab_parallel_log_probs(
        logits_TV, labels_T, group=group, vocab_size=vocab_size, ignore_index=ignore_index
    )
    return LogProbs(
        log_probs, vocab_parallel_entropy(logits_TV, group=group, vocab_size=vocab_size) if entropy else None
    )


def response_positions(packed: PackedSequence, response_lengths: Sequence[int]) -> list[Tensor]:
    """Where the response tokens of each sequence are predicted: int64 `[R_i]`, increasing.

    The response is the end of its sequence: with L_i tokens, R_i of them response, the positions are those of the
    tokens L_i - R_i - 1 up to L_i - 2 of sequence i.

    Raises:
        ValueError: not one length for each sequence, or a response that has no token before it (named).
    """
    lengths = packed.lengths
    if len(response_lengths) != len(lengths):
        raise ValueError(f"{len(response_lengths)} response lengths for {len(lengths)} sequences")
    positions, start = [], 0
    for index, (length, response) in enumerate(zip(lengths, response_lengths, strict=True)):
        if not 0 <= response <= max(length - 1, 0):
            raise ValueError(
                f"sequence {index} has {length} tokens, so its response has 0 to {max(length - 1, 0)}, not {response}: "
                "a response's first token is predicted by the token before it"
            )
        first = start + length - response - 1
        positions.append(torch.arange(first, first + response, device=packed.cu_seqlens.device))
        start += length
    return positions


def response_slices(values_T: Tensor, packed: PackedSequence, response_lengths: Sequence[int]) -> list[Tensor]:
    """Of per-token outputs `[T, ...]` (log-probs, entropies, values), those of response tokens: `[R_i, ...]` each.

    Raises:
        ValueError: as `response_positions`, or `values_T` has another number of rows than the batch has tokens.
    """
    if len(values_T) != packed.num_tokens:
        raise ValueError(f"values of {len(values_T)} rows are not one row for each of {packed.num_tokens} tokens")
    return [values_T[positions] for positions in response_positions(packed, response_lengths)]


def response_log_probs(
    packed: PackedSequence,
    response_lengths: Sequence[int],
    *,
    group: ProcessGroup | None,
    logits_TV: Tensor | None = None,
    hidden_TH: Tensor | None = None,
    weight_VH: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    entropy: bool = True,
) -> list[LogProbs]:
    """Log-probs and entropies of the response tokens alone: prompts cost nothing.

    Give either `logits_TV` `[T, V]`, or `hidden_TH` `[T, H]` (all tokens, replicated over the group) with the head's
    `weight_VH`; then no logits are made at all.

    Returns:
        For each sequence, `LogProbs` of `[R_i]`.

    Raises:
        ValueError: as `response_positions`; both or neither of logits and hidden states; a temperature with logits,
            which are to be divided by it where they are made.
    """
    if (logits_TV is None) == (hidden_TH is None or weight_VH is None):
        raise ValueError("give either logits_TV, or hidden_TH and weight_VH")
    positions = response_positions(packed, response_lengths)
    rows = torch.cat(positions) if positions else packed.cu_seqlens.new_empty(0, dtype=torch.int64)
    labels = next_token_labels(packed)[rows]
    if logits_TV is not None:
        if temperature != 1.0:
            raise ValueError(f"temperature={temperature} applies to hidden_TH; divide the logits where they are made")
        result = log_probs_from_logits(logits_TV[rows], labels, group=group, vocab_size=vocab_size, entropy=entropy)
    else:
        assert hidden_TH is not None
        assert weight_VH is not None
        result = linear_log_probs(
            hidden_TH[rows],
            weight_VH,
            labels,
            group=group,
            temperature=temperature,
            entropy=entropy,
            vocab_size=vocab_size,
        )
    sizes = [len(part) for part in positions]
    entropies = result.entropy.split(sizes) if result.entropy is not None else [None] * len(sizes)
    return [LogProbs(*pair) for pair in zip(result.log_probs.split(sizes), entropies, strict=True)]
