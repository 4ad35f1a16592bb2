"""Passes of a whole batch through an engine: outputs per token, or gradients and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers.data import pack_micro_batches, split_micro_batches
from parallel_layers.head import Distillation, SamplingMask, TeacherHead, check_token_ids
from parallel_layers.moe import RouterReplay
from parallel_layers.rotary import require_length
from parallel_models import Engine, Grid, MicroBatch, Outputs
from parallel_models.engine import OUTPUTS, require_number
from rl_models.batch.batch import Batch, require_batch
from rl_models.calls.agreement import CallArguments, RankReport, agree_on_call
from rl_models.calls.distillation import Divergence, require_teacher, teachers
from rl_models.calls.prefixes import Prompts, require_shareable
from rl_models.calls.routing import ROUTING, recorded, replays, require_routing
from rl_models.calls.sampling_mask import masks_of_next_tokens, require_sampling_mask
from rl_models.calls.tensor_digests import described_sequences
from rl_models.losses.aggregation import token_weights, total_weight
from rl_models.losses.inputs import LossInputs
from rl_models.losses.terms import LossTerms

# The names of the numbers that `Worker.update` adds to the metrics of a loss.
_RETURNED = ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped_steps")

# The terms `[T]` of a micro-batch, without metrics a tensor.
LossFunction = Callable[[LossInputs], LossTerms | Tensor]


class MaskedSequences(NamedTuple):
    """The sequences of a micro-batch with their fields, and the number of tokens in their mask."""

    batch: Batch
    masked: int


def predict(
    engine: Engine,
    batch: Batch,
    max_tokens: int,
    *,
    call: str,
    temperature: float,
    record_routing: bool,
    states: bool = False,
    top_n: int | None = None,
    values_only: bool = False,
) -> tuple[Tensor, ...]:
    """Return the engine's outputs without gradients, fp32, aligned with their token, in the batch's order.

    Each is `[T]`, and the values of several labels are `[T, num_labels]`. With `record_routing` the last result is the
    routing `[T, M, k]`. With `states` the only result is the hidden states `[T, H]` that predict each token, in the
    model's dtype; with `top_n` the statistics of `MicroBatch.top_n`; with
    `values_only` the values are the last result, and on backend="parallel" no log-probs are computed.
    """
    options: dict[str, Any] = {"states": states, "top_n": top_n, "values_only": values_only}
    divided = _Pass(engine, batch, max_tokens, temperature, record_routing=record_routing, **options).divide(call)
    outputs = engine.forward(divided.micro_batches)
    results = tuple(
        torch.zeros(
            batch.num_tokens, *column.shape[1:], device=engine.grid.device, dtype=column.dtype if states else None
        )
        for column in outputs[0]
    )
    for positions, micro_batch, output in zip(divided.positions, divided.micro_batches, outputs, strict=True):
        for result, column in zip(results, output, strict=True):
            result[positions] = _shift_to_own_token(column, micro_batch.inputs.batch).to(result.dtype)
    results = results if states or top_n else _by_head(results, engine.num_labels)
    if record_routing:
        tables = [micro_batch.replay for micro_batch in divided.micro_batches]
        return *results, recorded(tables, divided.positions, batch.num_tokens)
    return results


def accumulate(
    engine: Engine,
    batch: Batch,
    loss: LossFunction,
    max_tokens: int,
    *,
    aggregation: str,
    temperature: float,
    call: str,
    divergence: Divergence | None = None,
    teacher_head: TeacherHead | None = None,
) -> dict[str, float]:
    """Add the gradient of  sum_t w_t loss_t  over all tokens of all ranks, with the weights w of `token_weights`.

    Returns:
        The weighted sum of the loss and the weighted means of its metrics, the same on every rank.
    """
    whole = _Pass(engine, batch, max_tokens, temperature, aggregation, divergence=divergence, teacher_head=teacher_head)
    divided = whole.divide(call)
    total = _LossSum(loss, engine, len(divided.micro_batches))
    engine.forward_backward(divided.micro_batches, total)
    sums = _sums(agree_on_call(engine.grid, f"{call} (after its backward)", total.finish))
    return {name: value if name == "loss" else value / divided.weight for name, value in sums.items()}


class DividedBatch(NamedTuple):
    """A batch in micro-batches, in equal number on all dp ranks (an empty one holds padding alone).

    `positions` says where in the batch the tokens of each micro-batch stand, `weight` is the sum of the weights of all
    tokens of all ranks.
    """

    micro_batches: list[MicroBatch]
    positions: list[Tensor]
    weight: float


@dataclass
class _Pass:
    """One pass of a batch through an engine: checks the batch, and divides it into parts of about equal work.

    With `aggregation` the micro-batches have the field `_weight`, the result of `token_weights`, and the floating-point
    fields come from the first rank among the ranks that work on the same sequences.
    """

    engine: Engine
    batch: Batch
    max_tokens: int
    temperature: float
    aggregation: str | None = None
    record_routing: bool = False
    states: bool = False
    top_n: int | None = None
    values_only: bool = False
    divergence: Divergence | None = None
    teacher_head: TeacherHead | None = None
    prompts: Prompts | None = None
    counts: list[int] = field(default_factory=list)

    def divide(self, call: str) -> DividedBatch:
        """Check the call on every rank, see `agree_on_call`, and divide the batch."""
        options: dict[str, Any] = {"aggregation": self.aggregation, "record_routing": self.record_routing}
        options |= {"divergence": self.divergence, "states": self.states, "top_n": self.top_n}
        options["values_only"] = self.values_only
        options[ROUTING] = ROUTING in getattr(self.batch, "fields", ())
        options["sampling_mask"] = getattr(self.batch, "sampling_mask", None) is not None
        reports = agree_on_call(self.engine.grid, call, self._check, **options)
        by_place = {report.place: report.value for report in reports}.values()
        total = sum(value["weight"] for value in by_place)
        if self.aggregation is not None:
            self.batch = _with_fields_of_first_peer(self.batch, self.engine.grid)
            self.batch = self.batch.with_fields(_weight=token_weights(self.batch, self.aggregation, total))
        tokens = sum(value["tokens"] for value in by_place)
        weight = tokens / total if self.aggregation == "sequence-sum" else 1.0
        # Megatron's layers refuse an input without tokens.
        groups = self._split(max(value["micro_batches"] for value in by_place))
        return self._pack([[i for i in group if self.batch.lengths[i]] for group in groups], weight)

    def _check(self) -> CallArguments:
        """Check this rank's batch, and move it to the device."""
        engine, batch = self.engine, self.batch
        require_batch(batch)
        require_number("temperature", self.temperature, positive=True)
        require_length(max(batch.lengths, default=0), engine.longest_sequence)
        check_token_ids(batch.tokens, engine.vocab_size)
        require_routing(engine, batch, record=self.record_routing)
        require_sampling_mask(engine, batch)
        if self.states and not engine.distils:
            raise ValueError("hidden states need backend='parallel' and share_prefixes=False")
        if self.top_n is not None:
            require_top_n(engine, self.top_n)
        if self.divergence is not None:
            require_teacher(engine, batch, self.teacher_head)
        engine.require_visual(batch.split(), batch.visual)
        require_shareable(engine, batch, record_routing=self.record_routing)
        self.prompts = Prompts.of(batch, self.max_tokens) if engine.shares_prefixes else None
        self.batch = batch = batch.to(engine.grid.device)
        alone = engine.grid.dims.world_size == engine.grid.dims.dp  # each rank has its own sequences
        self.counts = batch.masked_counts.tolist()
        weight = total_weight(self.counts, self.aggregation or "token-mean")
        return CallArguments(
            {} if alone else {**described_sequences(batch), "temperature": self.temperature},
            report={"micro_batches": len(self._split()), "weight": weight, "tokens": sum(self.counts)},
        )

    def _split(self, min_count: int = 1) -> list[list[int]]:
        """Return the numbers of the sequences of each micro-batch."""
        lengths: Sequence[int] = self.batch.lengths
        units = self.batch.units("pair")
        if self.prompts is not None:
            lengths, units = self.prompts.computed, self.prompts.units
        multiple = self.engine.micro_batches_multiple_of
        return split_micro_batches(
            lengths, self.max_tokens, units=units, count_multiple_of=multiple, min_count=min_count
        )

    def _pack(self, groups: list[list[int]], weight: float) -> DividedBatch:
        """Pack the sequences of each micro-batch with everything that a pass over them depends on."""
        engine, batch = self.engine, self.batch
        positions = [batch.positions(group) for group in groups]
        multiple, device = engine.tokens_multiple_of, engine.grid.device
        packs = pack_micro_batches(batch.split(), groups, multiple_of=multiple, device=device)
        routes: Sequence[RouterReplay | None] = [RouterReplay() if self.record_routing else None for _ in packs]
        if ROUTING in batch.fields:
            routes = replays(batch, positions, packs, engine)
        masks: Sequence[SamplingMask | None] = [None for _ in packs]
        if batch.sampling_mask is not None:
            masks = masks_of_next_tokens(batch.sampling_mask, positions, packs)
        distillations: Sequence[Distillation | None] = [None for _ in packs]
        if self.divergence is not None:
            distillations = teachers(batch, positions, packs, self.teacher_head, self.divergence, self.temperature)
        micro_batches = []
        for pack, route, mask, group, distillation in zip(packs, routes, masks, groups, distillations, strict=True):
            sequences = batch.select(group)
            prompts = () if self.prompts is None else self.prompts.of_micro_batch(group)
            inputs = MaskedSequences(sequences, sum(self.counts[i] for i in group))
            micro_batch = MicroBatch(pack, self.temperature, route, mask, sequences.visual, prompts, inputs=inputs)
            micro_batch = replace(micro_batch, distillation=distillation, returns_states=self.states, top_n=self.top_n)
            micro_batch = replace(micro_batch, values_only=self.values_only and engine.separates_values)
            micro_batches.append(micro_batch)
        return DividedBatch(micro_batches, positions, weight)


def require_top_n(engine: Engine, top_n: int) -> None:
    """Raise ValueError unless the engine lists this number of likely tokens."""
    require_number("top_n", top_n, at_least=1, integer=True)
    if top_n > engine.vocab_size:
        raise ValueError(f"top_n={top_n} must be in 1..{engine.vocab_size}, the size of the vocabulary")
    if not engine.lists_tokens:
        raise ValueError(
            "the ranks and most likely tokens need backend='parallel' and tp_invariant=False; log_probs has no such "
            "limit"
        )


def _with_fields_of_first_peer(batch: Batch, grid: Grid) -> Batch:
    """Return the batch with the floating-point fields of the first rank of this place in dp, to the same bits."""
    fields = {name: field.detach().clone() for name, field in batch.fields.items() if field.is_floating_point()}
    for group in filter(None, map(grid.group, ("tp", "cp", "pp"))):
        for name in sorted(fields):
            dist.broadcast(fields[name], group=group, group_src=0)
    return batch.with_fields(**fields)


def _by_head(outputs: Outputs, num_labels: int) -> Outputs:
    """Return the outputs with the values of several labels, the last ones, as one tensor `[T, num_labels]`."""
    if num_labels == 1:
        return outputs
    return *outputs[:-num_labels], torch.stack(outputs[-num_labels:], dim=-1)


def _shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """Return `result[t] = per_token[t - 1]`, and 0 for the first token of each sequence.

    A model's output at a token belongs to the next token. Padding at the end of `per_token` is dropped.
    """
    if not batch.num_tokens:
        return per_token[:0]
    shifted = torch.cat([torch.zeros_like(per_token[:1]), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first.view(-1, *[1] * (per_token.dim() - 1)), 0, shifted)


class _LossSum:
    """A caller's loss in the form of an engine: weighted, summed, and zero after its first error.

    After an error the passes continue, since other ranks take part in them; `finish` raises the error.
    """

    def __init__(self, loss: LossFunction, engine: Engine, count: int) -> None:
        self.loss, self._progress, self._count, self._begun = loss, engine.progress, count, 0
        self._num_labels = engine.num_labels
        self._further, self._mtp_factor = engine.further_outputs, engine.mtp_loss_scaling_factor
        self.sums: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def __call__(self, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        """Return the weighted sum of the loss over one micro-batch."""
        self._begun += 1
        self._progress("micro-batches", self._begun, self._count)
        if self.error is None and micro_batch.inputs.masked:
            try:
                return self._weighted_loss(micro_batch, outputs)
            except Exception as error:
                self.error = error
        return torch.stack([output.sum() for output in outputs]).sum() * 0

    def _weighted_loss(self, micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        batch = micro_batch.inputs.batch
        # Tokens outside the mask are constants and give no gradient, for any loss.
        role = len(outputs) - self._further
        if micro_batch.distillation is not None:
            role -= 1
            divergence = torch.where(batch.mask, _shift_to_own_token(outputs[role], batch), 0)
            batch = batch.with_fields(divergence=divergence)
        masked = tuple(torch.where(batch.mask, _shift_to_own_token(output, batch), 0) for output in outputs[:role])
        by_head = _by_head(masked, self._num_labels)
        names = next(names for names in OUTPUTS.values() if len(names) == len(by_head))
        terms = _require_terms(self.loss(LossInputs(batch, dict(zip(names, by_head, strict=True)))), batch)
        if self._further and terms.loss.requires_grad:
            terms += self._mtp_terms(outputs[len(outputs) - self._further :], batch)
        reported = _reported(terms, batch)
        if self.sums and self.sums.keys() != reported.keys():
            raise ValueError(
                f"the loss reports {sorted(reported)} of one micro-batch and {sorted(self.sums)} of another; report "
                "the same metrics of all micro-batches, 0 for a metric without a value"
            )
        if not terms.loss.requires_grad:
            raise ValueError(
                f"the loss of {micro_batch.inputs.masked} tokens in the mask is a constant, without a gradient; "
                "compute the loss from its arguments, without detach() or no_grad()"
            )
        for name, value in reported.items():
            self.sums[name] = self.sums.get(name, 0) + _weighted_sum(value, batch)
        # Ranks exchange the gradients of both heads, log-probs and values, also if a loss ignores one of them.
        heads = outputs[:role:2]
        return _weighted_sum(terms.loss, batch) + torch.stack([output.sum() for output in heads]).sum() * 0

    def _mtp_terms(self, further: Outputs, batch: Batch) -> LossTerms:
        """Return the mean over multi-token-prediction layers of -log p of each token (DeepSeek-V3, equation 24)."""
        shifted = []
        for distance, output in enumerate(further, start=2):
            for _ in range(distance):
                output = _shift_to_own_token(output, batch)
            shifted.append(output)
        loss = -torch.where(batch.mask, torch.stack(shifted).mean(0), 0)
        return LossTerms(self._mtp_factor * loss, {"mtp_loss": loss})

    def finish(self) -> CallArguments:
        """Raise the loss's error, or report the sums of this rank, by name."""
        if self.error is not None:
            raise self.error
        values = torch.stack(list(self.sums.values())).tolist() if self.sums else []
        return CallArguments(report=dict(zip(self.sums, values, strict=True)))


def _sums(reports: list[RankReport]) -> dict[str, float]:
    """Add the sums of the data-parallel parts; the first rank with losses speaks for its part."""
    by_place: dict[int, RankReport] = {}
    for report in reports:
        if report.value:
            by_place.setdefault(report.place, report)
    first, *other_reports = by_place.values()
    for other in other_reports:
        if other.value.keys() != first.value.keys():
            raise ValueError(
                f"the metrics differ between ranks: {sorted(first.value)} on rank {first.rank}, {sorted(other.value)} "
                f"on rank {other.rank}; report the same metrics on every rank"
            )
    return {name: sum(report.value[name] for report in by_place.values()) for name in first.value}


def _require_terms(terms: object, batch: Batch) -> LossTerms:
    """Return the result of a loss, a bare tensor without metrics; ValueError unless it is one number per token."""
    if isinstance(terms, Tensor):
        terms = LossTerms(terms)
    if not isinstance(terms, LossTerms):
        raise ValueError(
            "the loss must return one number per token, a tensor or rl_models.losses.LossTerms(tensor, metrics), got "
            f"{type(terms).__name__}"
        )
    if terms.loss.shape != batch.tokens.shape:
        raise ValueError(f"the loss must be one number per token, [{batch.num_tokens}], got {terms.loss.shape}")
    return terms


def _reported(terms: LossTerms, batch: Batch) -> dict[str, Tensor]:
    """Return the loss and its metrics, without gradients, each `[T]` or one number; ValueError for anything else."""
    if reserved := sorted(terms.metrics.keys() & set(_RETURNED)):
        raise ValueError(f"the loss reports {reserved}, which update returns itself; rename these metrics")
    reported = {"loss": terms.loss.detach()}
    for name, value in terms.metrics.items():
        metric = torch.as_tensor(value, device=terms.loss.device).detach()
        if metric.shape not in ((), terms.loss.shape):
            raise ValueError(
                f"the metric {name!r} must be one number, or one per token, [{batch.num_tokens}], got {metric.shape}"
            )
        reported[name] = metric
    return reported


def _weighted_sum(per_token: Tensor, batch: Batch) -> Tensor:
    weight = batch["_weight"]
    return torch.where(weight > 0, weight * per_token, 0).sum()
