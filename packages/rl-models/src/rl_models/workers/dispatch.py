"""How each method of actors and critics is spread over the ranks of a group and its results are joined.

N sequences of T tokens in all, dp data-parallel ranks. A division is, for each dp rank, the sequences of its part.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel_layers.data.micro_batches import split_micro_batches
from parallel_layers.head.embedding import check_token_ids
from rl_models.batch import Batch, token_ids

Division = list[list[int]]
# The results of ranks, in order -> that of the whole.
Join = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Method:
    """One row of `METHODS`.

    Attributes:
        split: from the first argument to each dp rank's part of it, and the function that joins their results. Without
            it every rank gets the same arguments; without `gather` either, the first rank's result is returned.
        gather: makes the result of all ranks' results, in order of rank.
        changes: whether it changes what a rank holds. If it fails on some ranks alone, they no longer hold one model.
    """

    split: Callable[[Any, int, int], tuple[list[Any], Join]] | None = None
    gather: Join | None = None
    changes: bool = False


def divide(lengths: Sequence[int], dp: int) -> Division:
    """Parts of about equal work: every sequence in one, in ascending order; a part is empty when sequences run out."""
    return split_micro_batches(lengths, max(1, sum(lengths)), min_count=dp)


def per_token(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """A batch, for a method that returns `[T, ...]` tensors: one, or a named tuple of them."""
    parts, division = _split(batch, dp, vocab_size)

    def whole(tensors: Sequence[Tensor]) -> Tensor:
        joined = tensors[0].new_zeros(batch.num_tokens, *tensors[0].shape[1:])
        for indices, tensor in zip(division, tensors, strict=True):
            joined[batch.positions(indices).cpu()] = tensor
        return joined

    def join(results: list[Any]) -> Any:
        if isinstance(results[0], Tensor):
            return whole(results)
        return type(results[0])(*(whole(tensors) for tensors in zip(*results, strict=True)))

    return parts, join


def per_sequence(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """A batch, for a method that returns an `[N]` tensor."""
    parts, division = _split(batch, dp, vocab_size)

    def join(results: list[Any]) -> Any:
        joined = results[0].new_zeros(len(batch))
        for indices, tensor in zip(division, results, strict=True):
            joined[indices] = tensor
        return joined

    return parts, join


def for_all(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """A batch, for a method whose result already is of all ranks together."""
    parts, _ = _split(batch, dp, vocab_size)
    return parts, lambda results: results[0]


def per_prompt(prompts: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """Prompts, for a method that returns a batch with equally many sequences for each."""
    rows = [token_ids(prompt, f"prompt {i}").cpu() for i, prompt in enumerate(prompts)]
    # On a rank of its own this would leave the others waiting for it.
    if empty := [i for i, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"prompts {empty} are empty; give each at least one token, such as beginning-of-text")
    for i, row in enumerate(rows):
        try:
            check_token_ids(row, vocab_size)
        except ValueError as mistake:
            raise ValueError(f"prompt {i}: {mistake}") from None
    division = divide([len(row) for row in rows], dp)

    def join(results: list[Any]) -> Any:
        together = Batch.concatenate(results)
        n = len(together) // max(1, len(rows))
        order = [prompt for indices in division for prompt in indices]
        place = {prompt: i for i, prompt in enumerate(order)}
        return together.select([place[prompt] * n + k for prompt in range(len(rows)) for k in range(n)])

    return [[rows[i] for i in indices] for indices in division], join


def unpickled(results: list[bytes]) -> list[Any]:
    """What a caller's function has returned on each rank."""
    return [pickle.loads(result) for result in results]


# Every public method of Actor, Critic and ActorCritic that a group has.
METHODS: dict[str, Method] = {
    "log_probs": Method(per_token),
    "values": Method(per_token),
    "estimate": Method(per_token),
    "rewards": Method(per_sequence),
    "generate": Method(per_prompt),
    "update": Method(for_all, changes=True),
    "save_pretrained": Method(),
    "save_training": Method(),
    "wait_for_save": Method(),
    "load_training": Method(changes=True),
    "offload": Method(gather=sum, changes=True),
    "onload": Method(changes=True),
    "apply": Method(gather=unpickled, changes=True),
    "load": Method(gather=list, changes=True),
}


def _split(batch: Any, dp: int, vocab_size: int) -> tuple[list[Batch], Division]:
    if not isinstance(batch, Batch):
        raise ValueError(f"expected a Batch of all sequences, got {type(batch).__name__}; the group splits it over dp")
    batch = batch.to("cpu")
    # On a rank of its own this would leave the others waiting for it.
    check_token_ids(batch.tokens, vocab_size)
    division = divide(batch.lengths, dp)
    return [batch.select(indices) for indices in division], division


def on_cpu(value: Any) -> Any:
    """The same value with all tensors, in whatever tuples, lists, dicts and batches, detached and on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Batch):
        return value.to("cpu")
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [on_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
