"""A whole batch through an engine: every token's numbers, or gradients and metrics, however the batch is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt import agree, all_gather_json
from ckpt.transfer.agreement import require_same
from parallel_layers.head.embedding import check_token_ids
from rl_models.batch import Batch
from rl_models.engines import Engine, Outputs
from rl_models.grid import Grid
from rl_models.losses import LossTerms
from rl_models.losses.aggregation import token_weights
from rl_models.workers.agreement import described, require_same_call
from rl_models.workers.division import Division, shift_to_own_token
from rl_models.workers.routing import ROUTING, recorded, routed

# (*the engine's outputs, each [T] and aligned with its own token, micro-batch) -> terms [T]
PartLoss = Callable[..., LossTerms]


def predict(
    engine: Engine, batch: Batch, max_tokens: int, *, temperature: float, record_routing: bool
) -> tuple[Tensor, ...]:
    """The engine's outputs without gradients, each `[T]`, aligned with their own token, in the batch's order.

    With `record_routing` the routing `[T, M, k]` follows them.
    """
    batch = _checked(batch, engine, temperature, record_routing=record_routing)
    division = Division.of(batch, engine, max_tokens)
    if not division.parts:
        raise ValueError("the batch has no sequences, on any rank")
    with routed(engine, division.parts, division.packed, record=record_routing) as replays:
        outputs = engine.forward(division.packed, temperature=temperature)
    results = tuple(torch.zeros(batch.num_tokens, device=engine.grid.device) for _ in outputs[0])
    for where, part, output in zip(division.positions, division.parts, outputs, strict=True):
        if len(where):
            for result, column in zip(results, output, strict=True):
                result[where] = shift_to_own_token(column, part)
    if record_routing:
        return *results, recorded(replays, division.parts, division.positions, batch.num_tokens)
    return results


def accumulate(
    engine: Engine, batch: Batch, loss: PartLoss, max_tokens: int, *, aggregation: str, temperature: float
) -> dict[str, float]:
    """Add the gradient of  sum_t w_t loss_t  over all tokens of all ranks, w being `token_weights`.

    Returns:
        The weighted means of the loss and of its metrics, the same on every rank.
    """
    batch = _checked(batch, engine, temperature, aggregation=aggregation)
    batch = batch.with_fields(_weight=token_weights(batch, aggregation, engine.grid.group("dp")))
    division = Division.of(batch, engine, max_tokens)
    sums: dict[str, Tensor] = {}

    def total(number: int, outputs: Outputs) -> Tensor:
        part = division.parts[number]
        # What is outside the mask is a constant: whatever a loss does there, no gradient can come of it.
        own = tuple(torch.where(part.mask, shift_to_own_token(output, part), 0) for output in outputs)
        terms = loss(*own, part)
        reported = _reported(terms, part)
        if sums and sums.keys() != reported.keys():
            raise ValueError(
                f"the loss reports {sorted(reported)} of one micro-batch and {sorted(sums)} of another; report the "
                "same metrics of all, 0 where there is nothing to say"
            )
        for name, value in reported.items():
            sums[name] = sums.get(name, 0) + _weighted_sum(value, part)
        if terms.loss.requires_grad:
            return _weighted_sum(terms.loss, part)
        return _nothing(own, part)

    with routed(engine, division.parts, division.packed):
        engine.forward_backward(division.packed, total, temperature=temperature)
    return _reduce(sums, engine.grid)


def _checked(batch: Batch, engine: Engine, temperature: float, **options: object) -> Batch:
    """The batch on the engine's device, when every rank knows that all of them can go on with what they were given.

    Raises:
        ValueError: on some rank the temperature is not positive, or a token (which is looked for where that does not
            stall the device) is outside the vocabulary; or as `require_same_call`.
    """

    def check() -> None:
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive")
        check_token_ids(batch.tokens, engine.vocab_size)

    agree(check, engine.grid.everyone)
    options["routing"] = ROUTING in batch.fields
    given = {"batch": described(batch.lengths, batch.tokens, batch.mask), "temperature": temperature}
    require_same_call(engine.grid, given, **options)
    return batch.to(engine.grid.device)


def _reported(terms: LossTerms, part: Batch) -> dict[str, Tensor]:
    """The loss and its metrics, without gradients, each `[T]` or one number.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(terms, LossTerms):
        raise ValueError(
            f"the loss must return rl_models.losses.LossTerms(loss, metrics), got {type(terms).__name__}; put a tensor "
            "of one number per token into one: LossTerms(tensor)"
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


def _nothing(own: Outputs, part: Batch) -> Tensor:
    """Zero, with a graph for the backward that the ranks run together, of a loss that is a constant.

    Raises:
        ValueError: it is one although the micro-batch has tokens to learn from.
    """
    if bool(part.mask.any()):
        raise ValueError(
            f"the loss of {int(part.mask.sum())} tokens in the mask is a constant, without a gradient; compute it from "
            "what it is given, and without detach() or no_grad()"
        )
    return torch.stack([output.sum() for output in own]).sum()


def _weighted_sum(per_token: Tensor, part: Batch) -> Tensor:
    weight = part["_weight"]
    return torch.where(weight > 0, weight * per_token, 0).sum()


def _reduce(sums: Mapping[str, Tensor], grid: Grid) -> dict[str, float]:
    """Sum over dp, all numbers in one all-reduce; the other pipeline stages learn them from the last.

    Raises:
        ValueError: the data-parallel ranks report other metrics.
    """
    pipeline, data_parallel = grid.group("pp"), grid.group("dp")
    own: list[str] = all_gather_json(list(sums), pipeline)[-1]
    told = [names for names in all_gather_json(own, data_parallel) if names]
    names = own or told[0]  # a rank without sequences may have had nothing to report of
    ordered = sorted(names)
    require_same(data_parallel, metrics=ordered)
    zero = torch.zeros((), device=grid.device)
    values = torch.stack([sums.get(name, zero) for name in ordered]).double()
    for group in (data_parallel, pipeline):
        if group is not None:
            dist.all_reduce(values, group=group)
    means = dict(zip(ordered, values.tolist(), strict=True))
    return {name: means[name] for name in names}
