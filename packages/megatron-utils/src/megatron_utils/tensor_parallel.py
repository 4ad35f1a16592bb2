"""Log-probs and entropies under Megatron's tensor parallelism, and the response tokens of a batch.

parallel-layers computes; this module passes Megatron's tensor-parallel group and selects tokens. The output at token t
predicts token t + 1 of the same sequence, so the log-prob of the response token at place p stands at place p - 1. This
module shifts once, on the whole packed batch.

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
    vocab_parallel_log_probs,
)


def tensor_parallel_group() -> ProcessGroup | None:
    """Return Megatron's tensor-parallel group, or None if it has one rank, as parallel-layers takes it.

    Raises:
        RuntimeError: No Megatron grid is active.
    """
    # Imported here, because the import takes seconds and callers with their own group do not need it.
    from megatron.core import parallel_state

    group: ProcessGroup | None = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if group is None:
        raise RuntimeError("no Megatron grid is active; enter megatron_grid(dims) or pass a group")
    return group if group.size() > 1 else None


def response_positions(packed: PackedSequence, response_lengths: Sequence[int]) -> list[Tensor]:
    """Return the positions that predict the response tokens of each sequence: int64 `[R_i]`, increasing.

    The response is the end of its sequence. In a sequence of L_i tokens with R_i response tokens, the positions are
    those of tokens L_i - R_i - 1 to L_i - 2.

    Raises:
        ValueError: The number of lengths differs from the number of sequences, or a response has no token before it.
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
    """Return the rows of response tokens `[R_i, ...]` from outputs per token `[T, ...]` (log-probs, entropies, values).

    Raises:
        ValueError: As `response_positions`, or `values_T` does not have one row per token.
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
    """Return log-probs and entropies of the response tokens only, without work for prompts.

    Give either `logits_TV` `[T, V]`, or `hidden_TH` `[T, H]` (all tokens, replicated over the group) with the head's
    `weight_VH`, which makes no logits.

    Returns:
        `LogProbs` of `[R_i]` for each sequence.

    Raises:
        ValueError: As `response_positions`; both or neither of logits and hidden states are given; or a temperature is
            given with logits, which the caller must divide.
    """
    if (logits_TV is None) == (hidden_TH is None or weight_VH is None):
        raise ValueError("give either logits_TV, or hidden_TH and weight_VH")
    positions = response_positions(packed, response_lengths)
    rows = torch.cat(positions) if positions else packed.cu_seqlens.new_empty(0, dtype=torch.int64)
    labels = next_token_labels(packed)[rows]
    if logits_TV is not None:
        if temperature != 1.0:
            raise ValueError(f"temperature={temperature} applies to hidden_TH; divide the logits where they are made")
        result = vocab_parallel_log_probs(logits_TV[rows], labels, group=group, vocab_size=vocab_size, entropy=entropy)
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
