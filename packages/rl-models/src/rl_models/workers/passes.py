"""Passes of a whole batch through an engine: outputs per token, or gradients and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_layers.head.embedding import check_token_ids
from rl_models.batch import Batch, require_batch
from rl_models.engines import Engine, Outputs
from rl_models.engines.micro_batch import MicroBatch
from rl_models.losses import LossTerms
from rl_models.losses.aggregation import token_weights, total_weight
from rl_models.numbers import require_number
from rl_models.workers.agreement import Given, Told, agree_on_call
from rl_models.workers.digests import described_lengths, digests
from rl_models.workers.division import Division, shift_to_own_token
from rl_models.workers.routing import ROUTING, recorded, require_routing

# (*outputs of the engine, each [T] and aligned with its token, micro-batch) -> terms [T]
PartLoss = Callable[..., LossTerms]


@dataclass(frozen=True)
class _Entered:
    """A batch that all ranks have agreed on.

    Attributes:
        batch: On the engine's device.
        counts: The masked tokens of each sequence.
        micro_batches: Their number.
        total: The sum of `total_weight` over all data-parallel ranks.
    """

    batch: Batch
    counts: list[int]
    micro_batches: int
    total: int

    def divide(self, engine: Engine, max_tokens: int, temperature: float, *, record: bool = False) -> Division:
        """Return the micro-batches of this rank."""
        return Division.of(
            self.batch, self.counts, engine, max_tokens, self.micro_batches, temperature=temperature, record=record
        )


def predict(
    engine: Engine, batch: Batch, max_tokens: int, *, call: str, temperature: float, record_routing: bool
) -> tuple[Tensor, ...]:
    """Return the engine's outputs without gradients, each `[T]`, aligned with their token, in the batch's order.

    With `record_routing` the last result is the routing `[T, M, k]`.
    """
    entered = _enter(engine, batch, max_tokens, call, temperature, record_routing=record_routing)
    division = entered.divide(engine, max_tokens, temperature, record=record_routing)
    micro_batches, num_tokens = division.micro_batches, entered.batch.num_tokens
    outputs = engine.forward(micro_batches)
    results = tuple(torch.zeros(num_tokens, device=engine.grid.device) for _ in outputs[0])
    for where, micro_batch, output in zip(division.positions, micro_batches, outputs, strict=True):
        assert micro_batch.batch is not None
        for result, column in zip(results, output, strict=True):
            result[where] = shift_to_own_token(column, micro_batch.batch)
    if record_routing:
        return *results, recorded([each.replay for each in micro_batches], division.positions, num_tokens)
    return results


def accumulate(
    engine: Engine,
    batch: Batch,
    loss: PartLoss,
    max_tokens: int,
    *,
    aggregation: str,
    temperature: float,
    call: str = "update",
) -> dict[str, float]:
    """Add the gradient of  sum_t w_t loss_t  over all tokens of all ranks, with the weights w of `token_weights`.

    Returns:
        The weighted means of the loss and of its metrics, the same on every rank.
    """
    entered = _enter(engine, batch, max_tokens, call, temperature, aggregation=aggregation)
    batch = entered.batch.with_fields(_weight=token_weights(entered.batch, aggregation, entered.total))
    division = replace(entered, batch=batch).divide(engine, max_tokens, temperature)
    total = _Total(loss)
    engine.forward_backward(division.micro_batches, total)
    return _means(agree_on_call(engine.grid, f"{call} (after its backward)", total.finish))


def _enter(engine: Engine, batch: Batch, max_tokens: int, call: str, temperature: float, **options: object) -> _Entered:
    """Check a call on every rank; see `agree_on_call`.

    Raises:
        ValueError: On some rank the temperature is no number above 0, a token on the CPU is outside the vocabulary,
            `batch` is no `Batch`, a sequence is too long for a micro-batch, or ranks that differ in tp, cp or pp alone
            were given other sequences or fields.
    """
    aggregation = str(options.get("aggregation", "token-mean"))
    placed, counts = batch, list[int]()
    shared = engine.grid.dims.world_size > engine.grid.dims.dp  # else each rank has its own sequences

    def prepare() -> Given:
        nonlocal placed, counts
        require_batch(batch)
        require_number("temperature", temperature, above=0)
        check_token_ids(batch.tokens, engine.vocab_size)
        require_routing(engine, batch, record=bool(options.get("record_routing")))
        placed = batch.to(engine.grid.device)
        tensors = {"tokens": placed.tokens, "mask": placed.mask, **placed.fields} if shared else {}
        found, (counts,) = digests(tensors, placed.masked_counts)
        told = {
            "micro_batches": Division.least(batch.lengths, engine, max_tokens),
            "weight": total_weight(counts, aggregation),
        }
        return Given({"batch": described_lengths(batch.lengths), **found, "temperature": temperature}, told=told)

    options["routing"] = ROUTING in getattr(batch, "fields", ())
    told = agree_on_call(engine.grid, call, prepare, **options)
    by_place = {one.place: one.value for one in told}.values()
    return _Entered(
        placed, counts, max(value["micro_batches"] for value in by_place), sum(value["weight"] for value in by_place)
    )


class _Total:
    """A caller's loss in the form of an engine: weighted, summed, and zero after its first error.

    After an error the passes continue, since other ranks take part in them; `finish` raises the error. The loss is
    called for micro-batches with tokens in their mask.
    """

    def __init__(self, loss: PartLoss) -> None:
        self.loss = loss
        self.sums: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def __call__(self, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        """Return the weighted sum of the loss over one micro-batch."""
        if self.error is None and micro_batch.masked:
            try:
                return self._of_part(micro_batch, outputs)
            except Exception as error:
                self.error = error
        return torch.stack([output.sum() for output in outputs]).sum() * 0

    def _of_part(self, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        part = micro_batch.batch
        assert part is not None
        # Tokens outside the mask are constants and give no gradient, for any loss.
        own = tuple(torch.where(part.mask, shift_to_own_token(output, part), 0) for output in outputs)
        terms = self.loss(*own, part)
        reported = _reported(terms, part)
        if self.sums and self.sums.keys() != reported.keys():
            raise ValueError(
                f"the loss reports {sorted(reported)} of one micro-batch and {sorted(self.sums)} of another; report "
                "the same metrics of all micro-batches, 0 for a metric without a value"
            )
        if not terms.loss.requires_grad:
            raise ValueError(
                f"the loss of {micro_batch.masked} tokens in the mask is a constant, without a gradient; compute the "
                "loss from its arguments, without detach() or no_grad()"
            )
        for name, value in reported.items():
            self.sums[name] = self.sums.get(name, 0) + _weighted_sum(value, part)
        return _weighted_sum(terms.loss, part)

    def finish(self) -> Given:
        """Raise the loss's error, or return the sums of this rank, by name."""
        if self.error is not None:
            raise self.error
        values = torch.stack(list(self.sums.values())).tolist() if self.sums else []
        return Given(told=dict(zip(self.sums, values, strict=True)))


def _means(told: list[Told]) -> dict[str, float]:
    """Add the sums of the data-parallel parts; the first rank with losses speaks for its part.

    Raises:
        ValueError: The data-parallel ranks report different metrics.
    """
    by_place: dict[int, Told] = {}
    for one in told:
        if one.value:
            by_place.setdefault(one.place, one)
    first, *others = by_place.values()
    for other in others:
        if other.value.keys() != first.value.keys():
            raise ValueError(
                f"metrics differs between ranks: {sorted(first.value)} on rank {first.rank}, {sorted(other.value)} on "
                f"rank {other.rank}; report the same metrics on every rank"
            )
    return {name: sum(one.value[name] for one in by_place.values()) for name in first.value}


def _reported(terms: LossTerms, part: Batch) -> dict[str, Tensor]:
    """Return the loss and its metrics, without gradients, each `[T]` or one number.

    Raises:
        ValueError: The loss returns something else.
    """
    if not isinstance(terms, LossTerms):
        raise ValueError(
            f"the loss must return rl_models.losses.LossTerms(loss, metrics), got {type(terms).__name__}; wrap a "
            "tensor of one number per token: LossTerms(tensor)"
        )
    if terms.loss.shape != part.tokens.shape:
        raise ValueError(f"the loss must be one number per token, [{part.num_tokens}], got {terms.loss.shape}")
    reported = {"loss": terms.loss.detach()}
    for name, value in terms.metrics.items():
        metric = torch.as_tensor(value, device=terms.loss.device).detach()
        if metric.shape not in ((), terms.loss.shape):
            raise ValueError(
                f"the metric {name!r} must be one number, or one per token, [{part.num_tokens}], got {metric.shape}"
            )
        reported[name] = metric
    return reported


def _weighted_sum(per_token: Tensor, part: Batch) -> Tensor:
    weight = part["_weight"]
    return torch.where(weight > 0, weight * per_token, 0).sum()
