"""`EngineOnRanks`: a `RolloutEngine` from one-process engines on all or some of the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt import Checkpoint, agree
from ckpt.transfer import rank_in
from parallel_layers.head import SamplingMask
from parallel_layers.module import hashed_seed
from parallel_models import SamplingOptions, model_config
from rl_models import Batch, Policy, VisualInputs
from rl_models.batch import Visual, described, prompt_rows, token_rows
from rl_models.calls import DECODING_STEPS, ROUTING, CallArguments, agree_on_call
from rl_train.data.prompts import vocabulary_size
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.in_flight import Drawing, InFlightPool
from rl_train.engines.interface import VERSION, LocalEngine, Request, Responses, WeightsLostError
from rl_train.weight_sync.buckets import BUCKET_BYTES, NamedTensors, WeightFormat, complete
from rl_train.weight_sync.transport import BucketMissed

# A batch whose engines are lost is repeated at most this number of times.
MOST_REPEATS = 3


class EngineOnRanks:
    """A `RolloutEngine` on the ranks of an actor: each rank's engine answers a part of the prompts.

    Weights come from `actor.stream_weights` in buckets; ranks without an engine take part in the collectives. Each
    prompt has its own seed, so responses do not depend on the number of engines.

    Args:
        actor: An `Actor` or `WholeBatches`; its grid has the ranks of the engine.
        model: The folder of the checkpoint; its config says which tensors a weight sync has.
        start: Starts this rank's engine, with the weights of `model`.
        ranks: The ranks of the grid that have an engine (default: all ranks).
        sleeps: Whether the engines sleep after each `generate`, until the next call.
        bucket_bytes: The bytes of one bucket; the extra memory of a weight sync.
        weight_format: The format of each weight sync (default: all weights, as the actor has them).

    Raises:
        ValueError: `ranks` are not of the grid, or `start` raises on a rank; on every rank.
        RuntimeError: The first weight sync of an engine that starts empty failed.
    """

    def __init__(
        self,
        actor: Policy,
        model: str | Path,
        start: Callable[[], LocalEngine],
        *,
        ranks: Sequence[int] | None = None,
        sleeps: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self.version, self._actor, self._grid = 0, actor, actor.grid
        self._everyone, size = self._grid.everyone, self._grid.dims.world_size
        self._rank = rank_in(self._everyone)
        self._ranks = list(range(size)) if ranks is None else sorted(set(ranks))
        if not self._ranks or not set(self._ranks) <= set(range(size)):
            raise ValueError(f"ranks={ranks} must be ranks of the grid, 0 to {size - 1}")
        self._sleeps, self._bucket_bytes = sleeps, bucket_bytes
        self._weight_format = weight_format or WeightFormat.of_weights(model)
        self._model, self._vocab_size = Path(model), vocabulary_size(Path(model))
        self._broken = ""
        self._local: LocalEngine | None = agree(lambda: start() if self._rank in self._ranks else None, self._everyone)
        if self._weight_format.starts_empty:
            try:
                self._sync("the first weight sync", self.version)
            except BaseException:
                self.close()
                raise

    @property
    def pool(self) -> InFlightPool:
        """Return the engines in flight, on a rank that has them."""
        assert isinstance(self._local, InFlightPool)
        return self._local

    def generate(self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions) -> Batch:
        """See `RolloutEngine`; the batch is on the CPU."""
        return self.generate_async(prompts, sampling).result()

    def generate_async(
        self, prompts: Sequence[Tensor | Sequence[int]] | Batch, sampling: SamplingOptions
    ) -> Future[Batch]:
        """See `RolloutEngine`.

        Every rank waits by `result` or `exception`, in the same order on all ranks; a timeout has no effect.
        """
        requests: list[Request] = []
        visual = prompts.visual if isinstance(prompts, Batch) else ()

        def prepare() -> CallArguments:
            nonlocal requests
            if self._broken:
                raise RuntimeError(
                    f"the engine does not generate: {self._broken}; call update_weights, or build the engine again"
                )
            on_cpu = [row.cpu() for row in token_rows(prompts, "prompt")]
            rows = [row.tolist() for row in prompt_rows(on_cpu, self._vocab_size)]
            seeds = [hashed_seed(sampling.seed, number, size=7, byteorder="big") for number in range(len(rows))]
            requests = [
                request_of(row, seed, inputs)
                for row, seed, inputs in zip(rows, seeds, visual or [None] * len(rows), strict=True)
            ]
            arguments = {"prompts": zlib.crc32(repr(rows).encode()), "images": described(visual)}
            return CallArguments(everywhere={**arguments, **vars(sampling)})

        agree_on_call(self._grid, "EngineOnRanks.generate", prepare)
        waiting, version = self._begin(requests, sampling), self.version
        drawing = waiting if isinstance(waiting, Drawing) else None
        return BatchFuture(lambda future: self._collect(future, waiting, version, requests, sampling, visual), drawing)

    def update_weights(self, actor: Policy, version: int) -> None:
        """See `RolloutEngine`."""
        self._actor = actor
        self._sync(f"the update to version {version}", version)
        self.version = version

    def repeat_sync(self) -> None:
        """Give the engines, all of which were lost, the weights of this version again; all ranks call this."""
        self._sync("the weight sync after a restart", self.version)

    def close(self) -> None:
        """See `RolloutEngine`."""
        if self._local is not None:
            self._local.close()
        self._local, self._broken = None, "the engine was closed"

    def _begin(self, requests: list[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """Start on this rank's prompts; the returned function waits, and raises errors of the start as well."""
        if self._local is None:
            return list
        rank_requests = requests[self._ranks.index(self._rank) :: len(self._ranks)]
        try:
            if self._sleeps:
                self._local.wake()
            return self._local.begin(rank_requests, sampling)
        except Exception as error:
            failed: Future[Responses] = Future()
            failed.set_exception(error)
            return failed.result

    def _collect(
        self,
        future: BatchFuture,
        waiting: Callable[[], Responses],
        version: int,
        requests: list[Request],
        sampling: SamplingOptions,
        visual: Visual,
    ) -> Batch:
        """Wait for all engines, and return the whole batch on every rank."""

        def responses() -> Responses | None:
            try:
                return waiting()
            except WeightsLostError:
                return None

        for _ in range(1 + MOST_REPEATS):
            local_responses = agree(responses, self._everyone)
            responses_by_rank: list[Responses | None] = [local_responses]
            if self._everyone is not None:
                responses_by_rank = [None] * self._everyone.size()
                dist.all_gather_object(responses_by_rank, local_responses, group=self._everyone)
            if None not in responses_by_rank:
                break
            # No engine with these weights is left. Draw the whole batch again: all of it comes from one version.
            self.repeat_sync()
            future.drawn_anew, version = True, self.version
            waiting = self._begin(requests, sampling)
        else:
            raise RuntimeError(f"the engines were lost {1 + MOST_REPEATS} times while they drew one batch")
        if self._sleeps and self._local is not None:
            self._local.sleep()
        answers = [iter(responses_by_rank[rank] or []) for rank in self._ranks]
        sequences, log_probs, lengths, kept = list[list[int]](), list[Tensor](), list[int](), list[list[int]]()
        versions, steps, routing = list[list[int]](), list[Tensor](), list[Tensor | None]()
        for number, row in enumerate(request.prompt for request in requests):
            for response in next(answers[number % len(answers)]):
                sequences.append(row + response.tokens)
                log_probs.append(torch.tensor([0.0] * len(row) + response.log_probs))
                versions.append([-1] * len(row) + (response.versions or [version] * len(response.tokens)))
                lengths.append(len(response.tokens))
                steps.append(torch.zeros(len(sequences[-1])).index_fill(0, torch.tensor(len(row)), response.steps))
                routing.append(response.routing)
                kept += [*([] for _ in row), *(response.kept or [])]
        fields: dict[str, Any] = {"log_probs": log_probs, VERSION: versions}
        fields |= {DECODING_STEPS: steps} if all(row.any() for row in steps) else {}
        if (reported := next((row for row in routing if row is not None), None)) is not None:
            rows = (reported[:0] if row is None else row for row in routing)
            fields[ROUTING] = [
                _padded_routing(row, len(tokens), self._routed) for row, tokens in zip(rows, sequences, strict=True)
            ]
        visual_of_responses = tuple(inputs for inputs in visual for _ in range(sampling.n))
        return Batch.from_sequences(
            sequences,
            response_lengths=lengths,
            device="cpu",
            visual=visual_of_responses,
            sampling_mask=SamplingMask.from_rows(kept) if sampling.keep_sampling_mask else None,
            **fields,
        )

    @cached_property
    def _routed(self) -> list[bool]:
        """Say of each layer whether it has routed experts."""
        return [mixture is not None for mixture in model_config(Checkpoint(self._model)).moe]

    def _sync(self, what: str, version: int) -> None:
        """Stream the actor's weights into the engines; RuntimeError if the weight sync failed on some rank."""
        if isinstance(self._local, EnginePool):
            self._local.version = version
        self._broken = f"{what} has not ended"
        for _ in range(1 + MOST_REPEATS):
            try:
                self._stream()
            except WeightsLostError:
                continue
            except Exception as error:
                self._broken = f"{what} failed: {error}"
                raise RuntimeError(self._broken) from error
            self._broken = ""
            return
        raise RuntimeError(f"{self._broken}: the engines were lost {1 + MOST_REPEATS} times")

    def _stream(self) -> None:
        """Load this rank's engine.

        Raises:
            WeightsLostError: Some engine was lost; on all ranks.
            Exception: The first error of any rank, on all ranks; an error of the stream itself, on this rank.
        """
        failure = self._send()

        def outcome() -> CallArguments:
            # A bucket that did not arrive is the consequence of another rank's error, if there is one.
            if failure is not None and not isinstance(failure, (WeightsLostError, BucketMissed)):
                raise failure
            return CallArguments(report=[type(failure).__name__, str(failure)])

        outcomes = [message.value for message in agree_on_call(self._grid, "EngineOnRanks.update_weights", outcome)]
        if any(kind == "WeightsLostError" for kind, _ in outcomes):
            raise WeightsLostError("engines were lost during the weight sync")
        for kind, text in outcomes:
            if kind == "BucketMissed":
                raise BucketMissed(text)

    def _send(self) -> Exception | None:
        """Run this rank's part of a weight sync, and return the error of the engine."""
        load = None if self._local is None else self._local.load
        return stream_to_engine(self._actor, load, self._weight_format, to=self._ranks, bucket_bytes=self._bucket_bytes)


def stream_to_engine(
    actor: Policy,
    load: Callable[[NamedTensors], None] | None,
    weight_format: WeightFormat,
    *,
    to: Sequence[int],
    bucket_bytes: int,
) -> Exception | None:
    """Run a rank's part of an actor's weight stream to its end, and return the error of `load`.

    `load` takes the whole tensors; it is None on ranks that are not in `to`.

    Raises:
        Exception: The error of the stream itself. The other ranks do not get it: they may be inside a collective.
    """
    ended = False

    def stream() -> NamedTensors:
        nonlocal ended
        yield from actor.stream_weights(to=to, bucket_bytes=bucket_bytes, **weight_format.stream_options)
        ended = True

    named_tensors = stream()
    failure: Exception | None = None
    try:
        if load is not None:
            checked = complete(named_tensors, weight_format.expected)
            load(checked)
            for name, _ in checked:
                raise ValueError(f"the engine did not take {name}")
    except Exception as error:  # any error: the other ranks must not wait for this rank
        failure = error
    for _ in named_tensors:
        pass
    if failure is not None and not ended:
        raise failure
    return failure


class Pending(Protocol):
    """Responses in flight, on the rank that knows of them."""

    def done(self) -> bool:
        """Say whether the responses are complete, or cannot be without a call on all ranks."""

    def version(self) -> int | None:
        """Return the oldest version of the weights that draws the responses; None before the first token."""


class BatchFuture(Future[Batch]):
    """A future whose first `result` or `exception` waits for the engines and exchanges the responses of all ranks.

    Attributes:
        drawn_anew: The engines were lost; the responses come from the weights that the actor had at this `result`.
        drawing: The responses in flight, on a rank with such an engine.
    """

    def __init__(self, collect: Callable[[BatchFuture], Batch], drawing: Pending | None = None) -> None:
        super().__init__()
        self._collect, self.drawn_anew, self.drawing = collect, False, drawing

    def result(self, timeout: float | None = None) -> Batch:
        """Return the batch, or raise the error of an engine."""
        if not self.done():
            try:
                self.set_result(self._collect(self))
            except Exception as error:
                self.set_exception(error)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of an engine; None for responses."""
        with suppress(Exception):
            self.result()
        return super().exception()


def request_of(prompt: list[int], seed: int, visual: VisualInputs | None) -> Request:
    """Return a request; ValueError for images that an engine cannot take."""
    return Request(prompt, seed, *(((), ()) if visual is None else _with_images(prompt, visual)))


def _with_images(prompt: list[int], visual: VisualInputs) -> tuple[tuple[Any, ...], list[int]]:
    """Return the images of a prompt, and the prompt with one token in place of each image.

    Raises:
        ValueError: The prompt has a video, whose frames vLLM would choose again, or lacks its images or their
            positions.
    """
    if visual.video_grid_thw is not None:
        raise ValueError(
            "the prompt has a video, and vLLM gets images alone; use --rollouts native, or leave the video out"
        )
    if not visual.images or visual.mm_token_type_ids is None:
        raise ValueError(
            "an engine on ranks runs its own image processor, and needs VisualInputs.images (PIL images) and "
            "VisualInputs.mm_token_type_ids of every prompt with images; set them"
        )
    types = [*visual.mm_token_type_ids.tolist(), *[0] * len(prompt)][: len(prompt)]
    first = [kind == 0 or before == 0 for before, kind in zip([0, *types], types, strict=False)]
    return visual.images, [token for token, keep in zip(prompt, first, strict=True) if keep]


def _padded_routing(routing: Tensor, length: int, routed: Sequence[bool]) -> Tensor:
    """Return the experts `[L, M, k]` of L tokens in the M layers with routed experts; -1 where no expert is known.

    An engine knows no experts of the last token, which it draws and does not compute.

    Raises:
        ValueError: The experts are those of more tokens, or of another number of layers.
    """
    rows, layers, _ = routing.shape
    if rows > length or layers not in (len(routed), sum(routed)):
        raise ValueError(
            f"an engine reports experts {list(routing.shape)} for a sequence of {length} tokens in a model of "
            f"{len(routed)} layers, {sum(routed)} of them with routed experts; it must be [tokens, layers, k]"
        )
    if layers == len(routed):
        routing = routing[:, list(routed)]
    return torch.cat([routing, routing.new_full((length - rows, *routing.shape[1:]), -1)])
