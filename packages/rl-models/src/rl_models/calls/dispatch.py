"""Division of the methods of actors and critics over ranks, and joining of their results.

A method declares its division where it is defined, by `@dispatched(...)`; so do the methods of a user's subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from parallel_layers.data import split_micro_batches
from parallel_layers.head import check_token_ids
from parallel_models.generation import PrefixAffinity
from rl_models.batch.batch import Batch, require_batch, token_rows
from rl_models.batch.prompts import prompt_rows

F = TypeVar("F", bound=Callable[..., Any])
# For each dp rank, the numbers of its sequences.
Division = list[list[int]]
# The results of ranks, in order -> the result of the whole.
Join = Callable[[list[Any]], Any]
# (first argument, dp, vocabulary) -> each dp rank's part, and the function that joins their results.
Split = Callable[[Any, int, int], tuple[list[Any], Join]]


@dataclass(frozen=True)
class Method:
    """The division of one method over ranks, and a decorator that declares it, under the name `dispatched`.

    `WholeBatches` and `rl_train.RayModelGroup` call the method accordingly. A method that overrides a declared one
    inherits the declaration.

    Attributes:
        split: Divides the first argument over dp, and returns the parts and the function that joins their results.
            None: every rank gets the same arguments; without `gather` either, the first rank's result is returned.
        gather: Joins the results of all ranks, in order of rank.
        changes: Whether the method changes the state of a rank. After a failure on some ranks alone the ranks then no
            longer hold one model.
        needs: The tensors that must be on the device, where models take turns there. "optimizer" includes the weights.
    """

    split: Split | None = None
    _: KW_ONLY
    gather: Join | None = None
    changes: bool = False
    needs: Literal["nothing", "weights", "optimizer"] = "weights"

    def split_of(self, options: Mapping[str, Any], affinity: PrefixAffinity) -> Split | None:
        """Return `split` for a call: with `keep_cache=True` by the caches of earlier calls, which other calls end."""
        if self.split is per_prompt and options.get("keep_cache"):
            return partial(per_prompt, affinity=affinity)
        affinity.forget()
        return self.split

    def __call__(self, function: F) -> F:
        """Declare a method."""
        function.dispatch = self  # type: ignore[attr-defined]  # read by `methods_of`
        return function


dispatched = Method


def methods_of(worker_class: type) -> dict[str, Method]:
    """Return the declared methods of a worker's class, by name; the class overrides its bases.

    The class attribute `inherited` declares methods that another package defines.
    """
    methods: dict[str, Method] = {}
    for base in worker_class.__mro__:
        declared = {name: getattr(value, "dispatch", None) for name, value in vars(base).items()}
        for name, method in (*declared.items(), *vars(base).get("inherited", {}).items()):
            if isinstance(method, Method):
                methods.setdefault(name, method)
    return methods


def divide(lengths: Sequence[int], dp: int, units: Sequence[int] | None = None) -> Division:
    """Divide sequences into parts of about equal work, in ascending order; surplus parts are empty.

    Sequences with equal numbers in `units` come into one part.
    """
    return split_micro_batches(lengths, max(1, sum(lengths)), units=units, min_count=dp)


def per_token(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """Split a batch, for a method that returns `[T, ...]` tensors: one, a dict, or a named tuple of them."""
    parts, division = _split(batch, dp, vocab_size)
    positions = [batch.positions(indices).cpu() for indices in division]

    def join(results: list[Any]) -> Any:
        first_result, count = results[0], batch.num_tokens
        if isinstance(first_result, Tensor):
            return _scatter(results, positions, count)
        if isinstance(first_result, dict):
            return {name: _scatter([result[name] for result in results], positions, count) for name in first_result}
        return type(first_result)(*(_scatter(tensors, positions, count) for tensors in zip(*results, strict=True)))

    return parts, join


def per_sequence(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """Split a batch, for a method that returns an `[N]` tensor."""
    parts, division = _split(batch, dp, vocab_size)
    return parts, lambda results: _scatter(results, division, len(batch))


def _scatter(tensors: Sequence[Tensor], positions: Sequence[Tensor | list[int]], count: int) -> Tensor:
    """Return `count` rows: the rows of the tensors at their places."""
    joined = tensors[0].new_zeros(count, *tensors[0].shape[1:])
    for indices, tensor in zip(positions, tensors, strict=True):
        joined[indices] = tensor
    return joined


def for_all(batch: Any, dp: int, vocab_size: int) -> tuple[list[Any], Join]:
    """Split a batch, for a method with the same result on all ranks."""
    return _split(batch, dp, vocab_size)[0], lambda results: results[0]


def per_prompt(
    prompts: Any, dp: int, vocab_size: int, affinity: PrefixAffinity | None = None
) -> tuple[list[Any], Join]:
    """Split prompts, for a method that returns a batch with the same number of sequences for each prompt.

    With `affinity` a prompt goes to the rank that has drawn its beginning, and the results are remembered. Results
    travel without images; the joined batch has the images of the prompts.
    """
    # Checked here: an error on one dp rank alone would leave the other ranks waiting.
    batch = prompts.to("cpu") if isinstance(prompts, Batch) else None
    visual = () if batch is None else batch.visual
    if unclear := [n for n, images in enumerate(visual) if images is not None and images.mm_token_type_ids is None]:
        raise ValueError(
            f"prompts {unclear[:8]} have images without mm_token_type_ids, which say which tokens stand for them; pass "
            "all tensors that the processor returns"
        )
    rows = prompt_rows([row.cpu() for row in token_rows(prompts, "prompt")], vocab_size)
    lengths = [len(row) for row in rows]
    begun = affinity.divide([row.tolist() for row in rows], lengths, dp) if affinity is not None and dp > 1 else None
    division = begun or divide(lengths, dp)

    def join(results: list[Any]) -> Any:
        if affinity is not None and dp > 1:
            for rank, result in enumerate(results):
                for sequence in result.split():
                    affinity.remember(sequence.tolist(), rank)
        joined = Batch.concatenate(results)
        n = len(joined) // max(1, len(rows))
        order = [prompt for indices in division for prompt in indices]
        index_of = {prompt: i for i, prompt in enumerate(order)}
        ordered = joined.select([index_of[prompt] * n + k for prompt in range(len(rows)) for k in range(n)])
        return replace(ordered, visual=tuple(images for images in visual for _ in range(n)))

    parts = [[rows[i] for i in indices] if batch is None else batch.select(indices) for indices in division]
    return parts, join


def _split(batch: Any, dp: int, vocab_size: int) -> tuple[list[Batch], Division]:
    require_batch(batch)
    batch = batch.to("cpu")
    # Checked here: an error on one dp rank alone would leave the other ranks waiting.
    check_token_ids(batch.tokens, vocab_size)
    division = divide(batch.lengths, dp, batch.units("group", "pair"))
    return [batch.select(indices) for indices in division], division


def on_cpu(value: Any) -> Any:
    """Return a value with the tensors in its tuples, lists, dicts and batches detached, on the CPU, without images."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Batch):
        return replace(value.to("cpu"), visual=())
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [on_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
