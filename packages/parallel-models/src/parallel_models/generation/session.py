"""`GenerationSession`: a model that draws tokens at N slots, with its caches and CUDA graphs, over several calls.

Shape legend: N slots, M <= N slots of a forward pass, k drafts, D most tokens of a slot between two looks and k more,
V vocabulary, B bytes of a sampling mask's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_layers import PackedSequence
from parallel_layers.device import Graph, gpu
from parallel_layers.head import SamplingMask
from parallel_layers.inference import DecodeSteps, sample, sample_with_mask
from parallel_layers.linear import LowRank
from parallel_models.generation.decoding import CacheOptions, Decoding
from parallel_models.generation.options import SamplingOptions
from parallel_models.generation.prefix_affinity import PrefixAffinity
from parallel_models.generation.prefix_reuse import CachedBlocks, Checkpoints, PrefixReuse

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
        reuse: The sequences that later ones go on with.
        token, offset: `[N]`, the last token of each slot, and the offset of its positions.
        drafts: `[N, k]`, the tokens that may follow. Drafts of a slot's earlier response do no harm.
        active: `[N]` int32, whether each slot goes on.
        drawn, room: `[N]`, the tokens that each slot has drawn since the last look, and may draw.
        steps: `[N]`, the steps that have drawn them.
        affinity: Which context-parallel rank has the keys and values of a sequence.
        uniforms: `[N, D]`, the numbers that decide the next tokens.
        states: `[N, D, H]`, the hidden states that the next tokens are drawn from, where `Decoding.scorer` scores them.
        draws: Tokens and log-probs `[N, D]`, on request bits of sampling masks `[N, D, B]` uint8, which were drawn
            since the last look.
    """

    def __init__(
        self,
        options: CacheOptions,
        decoding: AbstractContextManager[Decoding],
        module: nn.Module,
        device: torch.device,
    ) -> None:
        self.options, self.running, self._module = options, False, module
        self.affinity = PrefixAffinity()
        self._stack = ExitStack()
        self.decoding = self._stack.enter_context(decoding)
        caches, is_recurrent = self.decoding.caches, self.decoding.recurrent
        self.reuse: PrefixReuse = Checkpoints(caches) if is_recurrent else CachedBlocks(caches)
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
            if (scorer := self.decoding.scorer) is not None:
                self.states = torch.zeros(
                    *self.uniforms.shape, scorer.hidden_size, dtype=caches[0].dtype, device=device
                )
            self._slots = torch.arange(options.sequences + 1, device=device)
        self._sampling: object = None
        self._graphs: dict[tuple[object, ...], Graph | None] = {}
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
            self.reuse.forget()
        else:
            self._graphs.clear()
            self._stack.close()

    def sample_by(self, options: SamplingOptions, vocab_size: int) -> None:
        """Draw tokens of a vocabulary in this way from now on. Graphs that draw in another way are dropped."""
        self._temperature = options.temperature or 1.0
        how = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
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
            if options.keep_sampling_mask:
                shape = *self.uniforms.shape, -(-vocab_size // 32) * 4
                self.draws.append(self.uniforms.new_zeros(shape, dtype=torch.uint8))
            if self.decoding.stages is not None:
                width = 2 + sum(bits.shape[-1] // 4 for bits in self.draws[2:])
                self._table = torch.zeros(len(self.token), width, dtype=torch.int32, device=self.token.device)

    def run_steps(self, count: int, size: int) -> None:
        """Draw `count` tokens at each of the first `size` slots; where there is a ring, in as many groups as stages."""
        if (ring := self.decoding.ring) is None:
            for _ in range(count):
                self._run(self._step, 0, size)
            return
        rows = size // ring.size
        ring.run(
            count,
            self._table[:size].split(rows),
            lambda group, chunk: self._run(self._visit, group * rows, rows, chunk),
            lambda group: self._run(self._finish, group * rows, rows),
        )

    def _run(self, part: Callable[..., None], *where: int) -> None:
        """Run a part of a step: the first time as it is, then by a CUDA graph."""
        key = part.__name__, *where
        if not self.decoding.capturable or key not in self._graphs:
            part(*where)
            self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            captured = [other_graph.pool() for other_graph in self._graphs.values() if other_graph is not None]
            graph = self._graphs[key] = Graph()
            with gpu.graph(graph, pool=captured[0] if captured else None):
                part(*where)
        graph.replay()

    def _step(self, first: int, size: int) -> None:
        """Draw the token after the last token of each slot, and after each draft for as long as drafts stay."""
        decoding = self.decoding
        packed, caches = self._batch(first, size)
        if decoding.drafter is not None:
            logits: Tensor | None = decoding.drafter.verify(packed, caches[0])
        else:
            logits = decoding.forward(packed, caches, logits=True)
        if decoding.stages is None:
            assert logits is not None
            self._add(first, size, self._draws_of(first, size, logits), packed, caches)
            return
        if logits is not None and decoding.stages.rank() == decoding.stages.size() - 1:
            self._write(first, size, logits)
        dist.broadcast(self._table[first : first + size], group=decoding.stages, group_src=decoding.stages.size() - 1)
        self._finish(first, size)

    def _visit(self, first: int, size: int, chunk: int) -> None:
        """Compute one chunk of a pipeline for some slots, and draw behind the last chunk."""
        assert self.decoding.ring is not None
        logits = self.decoding.ring.compute(chunk, *self._batch(first, size))
        if logits is not None:
            self._write(first, size, logits)

    def _batch(self, first: int, size: int) -> tuple[PackedSequence, list[DecodeSteps]]:
        """Return the last token and the drafts of each slot, and the caches that take them."""
        slots, width, exact = slice(first, first + size), len(self._ahead), self.decoding.exact
        live = self.active[slots] > 0 if self.decoding.recurrent else None
        caches = [
            DecodeSteps(x, x.lengths[slots], width, first=first, exact=exact, live=live) for x in self.decoding.caches
        ]
        positions = (caches[0].lengths.long() + self.offset[slots])[:, None] + self._ahead
        bounds = (self._slots[: size + 1] * width).int()
        tokens = torch.cat((self.token[slots, None], self.drafts[slots]), 1)
        return PackedSequence(tokens.flatten(), positions.flatten(), bounds, width), caches

    def _draws_of(self, first: int, size: int, logits: Tensor) -> tuple[Tensor, ...]:
        """Draw a token for each row of logits."""
        slots = slice(first, first + size)
        columns = self.drawn[slots, None] + self._ahead
        if (scorer := self.decoding.scorer) is not None:
            self.states[self._slots[slots, None], columns] = scorer.states.unflatten(0, columns.shape)
        numbers = self.uniforms[slots].gather(1, columns).flatten()
        tokens, log_probs, *masks = self._sample(logits, numbers)
        # Ranks with padding gather more bits than the vocabulary has tokens.
        return tokens, log_probs, *(bits[:, : rows.shape[-1]] for bits, rows in zip(masks, self.draws[2:], strict=True))

    def _write(self, first: int, size: int, logits: Tensor) -> None:
        """Draw a token for each slot, and write the draws to the table that travels, bit for bit."""
        tokens, log_probs, *masks = self._draws_of(first, size, logits)
        words = [bits.contiguous().view(torch.int32) for bits in masks]
        columns = tokens.int()[:, None], log_probs.view(torch.int32)[:, None], *words
        self._table[first : first + size] = torch.cat(columns, 1)

    def _finish(self, first: int, size: int) -> None:
        """Add the draws of the table."""
        table = self._table[first : first + size]
        words = table[:, 2:].contiguous()
        draws = table[:, 0].long(), table[:, 1].view(torch.float32), words.view(torch.uint8)
        self._add(first, size, draws[: len(self.draws)])

    def _add(
        self,
        first: int,
        size: int,
        draws: Sequence[Tensor],
        packed: PackedSequence | None = None,
        steps: Sequence[DecodeSteps] = (),
    ) -> None:
        """Add the draws of some slots to their results, count them, and draft the next tokens behind `packed`.

        `steps` are the caches of the step that gave the logits.
        """
        slots, caches, drafter = slice(first, first + size), self.decoding.caches, self.decoding.drafter
        active, drawn = self.active[slots], self.drawn[slots]
        columns = drawn[:, None] + self._ahead
        draws = [values.unflatten(0, columns.shape) for values in draws]
        for rows, values in zip(self.draws, draws, strict=True):
            rows[self._slots[slots, None], columns] = values
        tokens, log_probs, *_ = draws
        stops = log_probs.isnan() | (columns + 1 >= self.room[slots, None])
        if len(self._stop):
            # Not `torch.isin`: for many ids it reads a size on the host, which a CUDA graph cannot.
            stops |= (tokens[..., None] == self._stop).any(-1)
        counts, token, ended = active, tokens[:, 0], stops[:, 0]
        if drafter is not None:
            stays = (tokens[:, :-1] == self.drafts[slots]) & ~stops[:, :-1]
            last = stays.long().cumprod(1).sum(1)
            if packed is not None:

                def draw(logits: Tensor, number: int) -> Tensor:
                    numbers = self.uniforms[slots].gather(1, (drawn + last + 1 + number)[:, None])
                    return self._sample(logits, numbers[:, 0])[0]

                self.drafts[slots] = drafter.draft(packed, caches[0], tokens, last, draw)
            counts = active * (last + 1)
            token, ended = (x.gather(1, last[:, None])[:, 0] for x in (tokens, stops))
        for step in steps:
            step.accept(counts)
        for cache in caches:
            cache.lengths[slots] += counts
        self.token[slots] = token
        drawn += counts
        self.steps[slots] += active
        active.masked_fill_(ended, 0)

    def score(self, is_drawn: Tensor) -> None:
        """Give the tokens `[N, D]` drawn since the last look the log-probs of `Decoding.scorer`; NaN stays.

        Communication in a pipeline: a broadcast from the last stage.
        """
        if (scorer := self.decoding.scorer) is None:
            return
        tokens, log_probs, *bits = (rows[is_drawn] for rows in self.draws)
        stages = self.decoding.stages
        if len(tokens) and (stages is None or stages.rank() == stages.size() - 1):
            mask = SamplingMask.from_bits(bits[0]) if bits else None
            # The token of a row of NaN is arbitrary; the mask may lack it.
            labels = tokens.masked_fill(log_probs.isnan(), -100)
            scored = scorer.log_probs(self.states[is_drawn], labels, self._temperature, mask)
            log_probs = torch.where(log_probs.isnan(), log_probs, scored)
        if stages is not None:
            dist.broadcast(log_probs, group=stages, group_src=stages.size() - 1)
        self.draws[1][is_drawn] = log_probs


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
