"""Continuous batching: sequences take free slots of a batch as soon as others stop (Orca, OSDI 2022).

Shape legend: R responses, L most tokens of a response, N slots, M <= N slots of a step, V vocabulary, K tokens of a
sampling mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence
from parallel_layers.data import pad_to
from parallel_layers.inference import DecodeSteps, OutOfBlocks
from parallel_models.engine.vision import Visual
from parallel_models.generation.decoding import Decoding, Progress, unwatched

STEPS = 16
"""Decoding steps between two looks at what has stopped; the host waits for the device at a look alone."""

_FEWEST_SLOTS = 8


# (logits [M, V], a number in [0, 1) for each row) -> tokens [M] and their log-probs [M], on request masks [M, K]; see
# `sample` and `sample_with_mask`
Draw = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Responses(NamedTuple):
    """Drawn tokens `[R, L]`, their log-probs `[R, L]`, the numbers of tokens, and sampling masks `[R, L, K]`."""

    tokens: Tensor
    log_probs: Tensor
    lengths: list[int]
    masks: Tensor | None


class ContinuousBatching:
    """The responses to prompts, drawn at the N slots of a decoding model.

    A prompt's tokens but the last are computed once for its responses, which share their blocks. Each step then takes
    the last token of every slot and draws the next one, on the device; a CUDA graph captures the step where the model
    allows. Every `STEPS` steps the host frees the slots that have stopped and gives them to waiting responses. When
    the pool of blocks is full, the response with the fewest tokens waits again and keeps its tokens.

    Args:
        decoding, draw: The model, and how a token is drawn for each slot.
        prompts: The prompt of each of the R responses, on the device. Responses that share a prompt have one tensor.
        uniforms: `[R, L]`, the number that decides each token, whenever and wherever it is drawn.
        limits: Maximum number of tokens of each response, at most L.
        stop: `[n]` int64, tokens that end a response.
        mask_width: K, if `draw` returns sampling masks.
        max_tokens, multiple_of: Maximum number of prompt tokens in one forward pass; a divisor of its tokens and of N.
        together: Ranks that run every forward pass together, because they share experts.
        visual, offsets: The images of each response's prompt, and the offset of `Engine.prompt_images`; empty without.
        progress: Called with the numbers of responses and tokens that are drawn, at each look.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Sequence[Tensor],
        uniforms: Tensor,
        limits: Sequence[int],
        draw: Draw,
        stop: Tensor,
        *,
        mask_width: int | None = None,
        max_tokens: int,
        multiple_of: int,
        together: ProcessGroup | None,
        visual: Visual = (),
        offsets: Sequence[int] = (),
        progress: Progress = unwatched,
    ) -> None:
        self.decoding, self.prompts, self.draw, self.stop = decoding, prompts, draw, stop
        self.max_tokens, self.multiple_of, self.together = max_tokens, multiple_of, together
        self.progress, self.visual = progress, visual
        self.tables = decoding.caches[0].blocks
        responses, self.longest = uniforms.shape
        self.limits = list(limits)
        slots = len(self.tables.lengths)
        # On the host: the responses that wait, the response at each slot, and the tokens of each response.
        self.waiting = deque(range(responses))
        self.slots: list[int | None] = [None] * slots
        self.drawn = [0] * responses
        # On the device: the results, whose last row takes the draws of slots that have stopped.
        self._uniforms = torch.cat((uniforms, uniforms.new_zeros(1, self.longest)))
        self._log_probs = torch.zeros_like(self._uniforms)
        self._results = torch.zeros_like(self._uniforms, dtype=torch.int64)
        self._masks: Tensor | None = None
        if mask_width is not None:
            self._masks = self._results.new_full((*self._results.shape, mask_width), -1, dtype=torch.int32)
        self._limits = self._results.new_tensor([*self.limits, self.longest])
        self._offsets = self._results.new_tensor([*(offsets or [0] * responses), 0])
        self._ends = torch.cat([*(prompt[-1:] for prompt in prompts), self._results.new_zeros(1)])
        # For each slot: its last token, its response, the tokens of this response, the offset of their positions, and
        # whether it goes on.
        self._token = self._results.new_zeros(slots)
        self._response, self._drawn, self._offset = (torch.zeros_like(self._token) for _ in range(3))
        self._active = torch.zeros_like(self._token, dtype=torch.int32)
        self._bounds = torch.arange(slots + 1, dtype=torch.int32, device=self._token.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}

    def run(self) -> Responses:
        """Draw all responses. A response whose logits are not finite ends with a token of log-prob NaN."""
        while self._fill():
            steps, size = self._largest(self._reserve(), self._smallest_size())
            self._gather(size)
            self._bring()
            for _ in range(steps):
                self._run_step(size)
            self._look()
        masks = None if self._masks is None else self._masks[:-1]
        return Responses(self._results[:-1], self._log_probs[:-1], self.drawn, masks)

    def _fill(self) -> bool:
        """Give free slots to waiting responses; return whether there are tokens to draw, on any rank."""
        leaders, followers = self._admit()
        passes = self._passes(leaders)
        count, going = self._largest(len(passes), bool(self._busy()))
        for pieces in passes + [{}] * (count - len(passes)):
            self._prefill(pieces)
        for cache in self.decoding.caches:
            for source, slot, length in followers:
                cache.share(source, [slot], length)
        return bool(going)

    def _busy(self) -> list[tuple[int, int]]:
        """Return (slot, response) of all responses at work."""
        return [(slot, response) for slot, response in enumerate(self.slots) if response is not None]

    def _admit(self) -> tuple[list[tuple[int, Tensor]], list[tuple[int, int, int]]]:
        """Give free slots to waiting responses.

        Return (slot, tokens before the last token) of responses that compute these tokens, and (source, slot, number
        of tokens) of responses that share them.
        """
        leaders, followers = [], []
        holders = {id(self.prompts[response]): slot for slot, response in self._busy()}
        # Every response at work may need a new block before the next look.
        free = self.tables.num_free - len(holders)
        for slot in [slot for slot, response in enumerate(self.slots) if response is None]:
            if not self.waiting:
                break
            response = self.waiting[0]
            prompt, drawn = self.prompts[response], self.drawn[response]
            source = holders.get(id(prompt))
            shares = source is not None and not drawn and len(prompt) > 1
            free -= 1 if shares else (len(prompt) + drawn) // self.tables.block_size + 1
            if free < 0 and holders:
                break
            self.slots[slot] = self.waiting.popleft()
            if source is not None and shares:
                followers.append((source, slot, len(prompt) - 1))
            else:
                holders[id(prompt)] = slot
                leaders.append((slot, torch.cat((prompt, self._results[response, :drawn]))[:-1]))
        return leaders, followers

    def _passes(self, leaders: Sequence[tuple[int, Tensor]]) -> list[dict[int, Tensor]]:
        """Divide the tokens of the leaders into forward passes, each as slot -> tokens; keep images whole."""
        passes, room = list[dict[int, Tensor]](), 0
        for slot, tokens in leaders:
            has_images = self._images(slot) is not None
            if has_images and len(tokens) > room:
                room = 0
            while len(tokens):
                if room <= 0:
                    passes.append({})
                    room = self.max_tokens
                length = len(tokens) if has_images else room
                passes[-1][slot], tokens = tokens[:length], tokens[length:]
                room -= len(passes[-1][slot])
        return passes

    def _images(self, slot: int) -> Any:
        """Return the images of the response at a slot."""
        response = self.slots[slot]
        return self.visual[response] if self.visual and response is not None else None

    def _prefill(self, pieces: dict[int, Tensor]) -> None:
        """Add tokens to the caches; a pass without tokens computes padding, for ranks that share experts."""
        rows = [pieces.get(slot, self._token[:0]) for slot in range(len(self.slots))]
        packed = PackedSequence.from_sequences(rows, multiple_of=self.multiple_of)
        if not packed.num_tokens:
            packed = pad_to(packed, self.multiple_of)
        starts = packed.cu_seqlens.new_tensor([*self.tables.lengths, *[0] * (packed.padding > 0)]).long()
        counts = packed.cu_seqlens.diff().long()
        shift = torch.repeat_interleave(starts, counts, output_size=packed.num_tokens)
        packed = replace(packed, position_ids=packed.position_ids + shift)
        visual = tuple(self._images(slot) if slot in pieces else None for slot in range(len(self.slots)))
        visual = visual if any(visual) else ()
        self.decoding.forward(packed, self.decoding.caches, logits=False, visual=visual)

    def _reserve(self) -> int:
        """Take blocks for the next steps; return the number of steps."""
        while True:
            remaining = [
                0 if response is None else self.limits[response] - self.drawn[response] for response in self.slots
            ]
            steps = [min(STEPS, tokens) for tokens in remaining]
            try:
                for cache in self.decoding.caches:
                    cache.reserve(steps)
            except OutOfBlocks:
                slot, response = min(self._busy(), key=lambda entry: self.drawn[entry[1]])
                self._leave([slot])
                self.waiting.appendleft(response)
            else:
                return max(steps)

    def _leave(self, slots: Sequence[int]) -> None:
        for cache in self.decoding.caches:
            cache.free(slots)
        for slot in slots:
            self.slots[slot] = None

    def _largest(self, *numbers: int) -> list[int]:
        return largest_of_ranks(self.together, self._token.device, *numbers)

    def _smallest_size(self) -> int:
        """Return the smallest number of slots of a step that has room for this rank's responses."""
        busy, size = len(self._busy()), len(self.slots)
        while size // 2 >= max(busy, _FEWEST_SLOTS) and size // 2 % self.multiple_of == 0:
            size //= 2
        return size

    def _gather(self, size: int) -> None:
        """Bring the last responses together at the first `size` slots."""
        outside = [slot for slot, _ in self._busy() if slot >= size]
        free = [slot for slot in range(size) if self.slots[slot] is None]
        pairs = list(zip(outside, free, strict=False))
        for cache in self.decoding.caches:
            cache.move(pairs)
        for source, target in pairs:
            self.slots[target], self.slots[source] = self.slots[source], None

    def _bring(self) -> None:
        """Bring the state of all slots to the device."""
        nobody = len(self.drawn)
        state = [(nobody, 0) if response is None else (response, self.drawn[response]) for response in self.slots]
        self._response.copy_(torch.tensor([response for response, _ in state]))
        self._drawn.copy_(torch.tensor([drawn for _, drawn in state]))
        self._active.copy_(self._response < nobody)
        self._offset.copy_(self._offsets[self._response])
        last_tokens = self._results[self._response, (self._drawn - 1).clamp(min=0)]
        self._token.copy_(torch.where(self._drawn > 0, last_tokens, self._ends[self._response]))

    def _run_step(self, size: int) -> None:
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
        token, active = self._token[:size], self._active[:size]
        response, drawn = self._response[:size], self._drawn[:size]
        steps = [DecodeSteps(cache, size, self._active, exact=self.decoding.exact) for cache in self.decoding.caches]
        positions = steps[0].lengths.long() + self._offset[:size]
        packed = PackedSequence(token, positions, self._bounds[: size + 1], 1)
        logits = self.decoding.forward(packed, steps, logits=True)
        column = drawn.clamp(max=self.longest - 1)
        drawn_tokens, log_probs, *masks = self._draw(logits, self._uniforms[response, column])
        slot = torch.where(active > 0, response, len(self.drawn)), column
        self._results[slot], self._log_probs[slot] = drawn_tokens, log_probs
        if self._masks is not None:
            (self._masks[slot],) = masks
        token.copy_(drawn_tokens)
        drawn += active
        stops = torch.isin(drawn_tokens, self.stop) | log_probs.isnan() | (drawn >= self._limits[response])
        active.masked_fill_(stops, 0)

    def _draw(self, logits: Tensor | None, uniforms: Tensor) -> tuple[Tensor, ...]:
        """Draw a token of each row on the last pipeline stage, and bring what was drawn to all stages."""
        stages = self.decoding.stages
        if stages is None:
            assert logits is not None
            return self.draw(logits, uniforms)
        width = 0 if self._masks is None else self._masks.shape[-1]
        # fp64 holds tokens, log-probs and masks as they are.
        table = torch.empty(len(uniforms), 2 + width, dtype=torch.float64, device=uniforms.device)
        last = stages.size() - 1
        if stages.rank() == last:
            assert logits is not None
            drawn = self.draw(logits, uniforms)
            table = torch.cat([x.double().view(len(x), -1) for x in drawn], 1)
        dist.broadcast(table, group=stages, group_src=last)
        tokens, log_probs, masks = table.split([1, 1, width], 1)
        drawn_here = tokens[:, 0].long(), log_probs[:, 0].to(self._log_probs.dtype)
        return drawn_here if self._masks is None else (*drawn_here, masks.to(self._masks.dtype))

    def _look(self) -> None:
        """Count the tokens of each response, and free the slots of stopped responses."""
        active, drawn = torch.stack((self._active.long(), self._drawn)).tolist()
        counts = [0] * len(self.slots)
        for slot, response in self._busy():
            counts[slot] = drawn[slot] - self.drawn[response]
            self.drawn[response] = drawn[slot]
        for cache in self.decoding.caches:
            cache.advance_by(counts)
        self._leave([slot for slot, _ in self._busy() if not active[slot]])
        remaining = len(self.waiting) + len(self._busy())
        self.progress("responses", len(self.drawn) - remaining, len(self.drawn))
        self.progress("tokens", sum(self.drawn), 0)


def largest_of_ranks(group: ProcessGroup | None, device: torch.device, *numbers: int) -> list[int]:
    """Return the largest of each number over ranks that run every forward pass together; None: the numbers."""
    if group is None:
        return list(numbers)
    largest = torch.tensor(numbers, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    found: list[int] = largest.tolist()
    return found
