"""`GenerationSession`: a model that draws tokens at N slots, with its caches and CUDA graphs, over several calls.

Shape legend: N slots, M <= N slots of a step, k drafts, D most tokens of a slot between two looks and k more,
V vocabulary, K tokens of a sampling mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_layers.inference import DecodeSteps, sample, sample_with_mask
from parallel_layers.linear import LowRank
from parallel_models.generation.decoding import CacheOptions, Decoding
from parallel_models.generation.options import SamplingOptions

STEPS = 16
"""Decoding steps between two looks at what has stopped; the host waits for the device at a look alone."""


class GenerationSession:
    """A decoding model, and the state of its N slots on the device, which CUDA graphs read and write.

    Cached blocks and graphs belong to weights and memory that stay as they are: a session ends when they change.

    Args:
        options: The sizes of the caches; N is `options.sequences`.
        decoding: Enters the model's decoding; `end` leaves it.
        module: The parameters.
        device: The device.

    Attributes:
        token, offset: `[N]`, the last token of each slot, and the offset of its positions.
        drafts: `[N, k]`, the tokens that may follow. Drafts of a slot's earlier response do no harm.
        active: `[N]` int32, whether each slot goes on.
        drawn, room: `[N]`, the tokens that each slot has drawn since the last look, and may draw.
        steps: `[N]`, the steps that have drawn them.
        uniforms: `[N, D]`, the numbers that decide the next tokens.
        draws: Tokens and log-probs `[N, D]`, on request masks `[N, D, K]`, which were drawn since the last look.
    """

    def __init__(
        self,
        options: CacheOptions,
        decoding: AbstractContextManager[Decoding],
        module: nn.Module,
        device: torch.device,
    ) -> None:
        self.options, self.running, self._module = options, False, module
        self._stack = ExitStack()
        self.decoding = self._stack.enter_context(decoding)
        with torch.inference_mode(False):  # a later call may write outside of inference mode
            self.token, self.offset, self.drawn, self.room, self.steps = torch.zeros(
                5, options.sequences, dtype=torch.int64, device=device
            )
            self.active = torch.zeros_like(self.token, dtype=torch.int32)
            self.drafts = self.token.new_zeros(options.sequences, options.drafts)
            self._ahead = torch.arange(options.drafts + 1, device=device)
            depth = STEPS * (options.drafts + 1) + options.drafts
            self.uniforms = torch.zeros(options.sequences, depth, dtype=torch.float32, device=device)
            self.draws = [torch.zeros_like(self.uniforms, dtype=torch.int64), torch.zeros_like(self.uniforms)]
            self._slots = torch.arange(options.sequences + 1, device=device)
        self._sampling: object = None
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._weights = self._versions()

    def fits(self, options: CacheOptions, most: int) -> bool:
        """Return whether the session serves a call with such caches, at least half of its slots, and at most `most`."""
        sizes = self.options
        same = replace(options, sequences=sizes.sequences, max_length=sizes.max_length) == sizes
        room = options.sequences / 2 <= sizes.sequences <= most and options.max_length <= sizes.max_length
        return same and room and self._weights == self._versions()

    def _versions(self) -> list[object]:
        """Return which tensors the parameters are, how often torch has written into each, and the adapters in use."""
        versions = [(id(x), 0 if x.is_inference() else x._version) for x in self._module.parameters()]
        return [*versions, *(x.enabled for x in self._module.modules() if isinstance(x, LowRank))]

    def end(self) -> None:
        """Give the memory back, or, while a call draws, forget the cached blocks: the call ends the session."""
        if self.running:
            for cache in self.decoding.caches:
                cache.blocks.forget()
        else:
            self._graphs.clear()
            self._stack.close()

    def sample_by(self, options: SamplingOptions) -> None:
        """Draw tokens in this way from now on. Graphs that draw in another way are dropped."""
        how = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        sampling = how, options.keep_sampling_mask, options.stop_ids
        if sampling == self._sampling:
            return
        self._sampling = sampling
        self._graphs.clear()
        draw: Any = sample_with_mask if options.keep_sampling_mask else sample
        self._sample: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = partial(draw, **how, group=self.decoding.group)
        with torch.inference_mode(False):
            del self.draws[2:]
            self._stop = self.token.new_tensor(options.stop_ids)
            if options.keep_sampling_mask and options.top_k is not None:
                shape = *self.uniforms.shape, options.top_k
                self.draws.append(self.uniforms.new_full(shape, -1, dtype=torch.int32))

    def run_step(self, size: int) -> None:
        """Draw a token at each of the first `size` slots: the first time as it is, then by a CUDA graph."""
        if not self.decoding.capturable or size not in self._graphs:
            self._step(size)
            self._graphs[size] = None
            return
        graph = self._graphs[size]
        if graph is None:
            captured = [other_graph.pool() for other_graph in self._graphs.values() if other_graph is not None]
            graph = self._graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=captured[0] if captured else None):
                self._step(size)
        graph.replay()

    def _step(self, size: int) -> None:
        """Draw the token after each slot's last token, and after each draft for as long as drafts stay."""
        token, active, drawn, drafter = self.token[:size], self.active[:size], self.drawn[:size], self.decoding.drafter
        width, caches = len(self._ahead), self.decoding.caches
        steps = [DecodeSteps(cache, cache.lengths[:size], width, exact=self.decoding.exact) for cache in caches]
        positions = (steps[0].lengths.long() + self.offset[:size])[:, None] + self._ahead
        bounds = (self._slots[: size + 1] * width).int()
        tokens = torch.cat((token[:, None], self.drafts[:size]), 1)
        packed = PackedSequence(tokens.flatten(), positions.flatten(), bounds, width)
        if drafter is None:
            logits = self.decoding.forward(packed, steps, logits=True)
        else:
            logits = drafter.verify(packed, steps[0])
        columns = drawn[:, None] + self._ahead
        draws = self._draw(logits, self.uniforms[:size].gather(1, columns).flatten())
        draws = tuple(values.unflatten(0, (size, width)) for values in draws)
        for rows, values in zip(self.draws, draws, strict=True):
            rows[self._slots[:size, None], columns] = values
        tokens, log_probs, *_ = draws
        # Not `torch.isin`: for many ids it reads a size on the host, which a CUDA graph cannot.
        stops = (tokens[..., None] == self._stop).any(-1) | log_probs.isnan() | (columns + 1 >= self.room[:size, None])
        stays = (tokens[:, :-1] == self.drafts[:size]) & ~stops[:, :-1]
        last = stays.long().cumprod(1).sum(1)
        if drafter is not None:

            def draw(logits: Tensor, number: int) -> Tensor:
                numbers = self.uniforms[:size].gather(1, (drawn + last + 1 + number)[:, None])
                return self._sample(logits, numbers[:, 0])[0]

            self.drafts[:size] = drafter.draft(packed, caches[0], tokens, last, draw)
        counts = active * (last + 1)
        for cache in caches:
            cache.lengths[:size] += counts
        token.copy_(tokens.gather(1, last[:, None])[:, 0])
        drawn += counts
        self.steps[:size] += active
        active.masked_fill_(stops.gather(1, last[:, None])[:, 0], 0)

    def _draw(self, logits: Tensor | None, uniforms: Tensor) -> tuple[Tensor, ...]:
        """Draw a token of each row on the last pipeline stage, and bring what was drawn to all stages."""
        stages = self.decoding.stages
        if stages is None:
            assert logits is not None
            return self._sample(logits, uniforms)
        width = sum(masks.shape[-1] for masks in self.draws[2:])
        # fp64 holds tokens, log-probs and masks as they are.
        table = torch.empty(len(uniforms), 2 + width, dtype=torch.float64, device=uniforms.device)
        last = stages.size() - 1
        if stages.rank() == last:
            assert logits is not None
            drawn = self._sample(logits, uniforms)
            table = torch.cat([x.double().view(len(x), -1) for x in drawn], 1)
        dist.broadcast(table, group=stages, group_src=last)
        columns = table[:, 0], table[:, 1], table[:, 2:]
        return tuple(x.to(rows.dtype) for x, rows in zip(columns, self.draws, strict=False))


class Keeper(Protocol):
    """An engine, which keeps a session between two calls."""

    session: GenerationSession | None


# The engines of this process that keep sessions.
_keepers: WeakSet[Keeper] = WeakSet()


def keep(keeper: Keeper, session: GenerationSession) -> None:
    """Let an engine keep a session until `end_sessions`."""
    keeper.session = session
    _keepers.add(keeper)


def end_sessions() -> None:
    """End all sessions that are kept in this process: weights change, or something else needs the memory."""
    for keeper in list(_keepers):
        session, keeper.session = keeper.session, None
        if session is not None:
            session.end()
