"""Continuous batching: sequences take free slots of a batch as soon as others stop (Orca, OSDI 2022).

Shape legend: R responses, L most tokens of a response, N slots; D: see `generation.session`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import PackedSequence
from parallel_layers.data import pad_to
from parallel_layers.head import SamplingMask
from parallel_layers.inference import OutOfBlocks
from parallel_models.engine.vision import Visual
from parallel_models.generation.decoding import Progress, unwatched
from parallel_models.generation.session import STEPS, GenerationSession

_FEWEST_SLOTS = 8
# Of a pass over a part of the prompts: with fewer, reading the weights takes longer than computing the tokens.
_FEWEST_TOKENS = 512


class Responses(NamedTuple):
    """Drawn tokens `[R, L]`, their log-probs `[R, L]`, the numbers of tokens, and their sampling mask on request.

    The mask has a row for each drawn token, one response after another.

    `computed` are the numbers of tokens that went through the model before the first step of each response, `steps` the
    numbers of steps that drew its tokens: fewer than tokens where drafts stayed.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: list[int]
    mask: SamplingMask | None
    computed: list[int]
    steps: list[int]


class ContinuousBatching:
    """The responses to prompts, drawn at the N slots of a session.

    A prompt's tokens but the last are computed once for its responses, which share their blocks; what earlier sequences
    began with is not computed again (`PrefixReuse`). Each step then takes the last token of every slot and draws the
    next one, on the device. Every `STEPS` steps the host frees the slots that have stopped and gives them to waiting
    responses. When the pool of blocks is full, the response with the fewest tokens waits again and keeps its tokens.

    Prompts with images are not cached: equal tokens may stand for other images.

    Args:
        session: The model, which draws in the way of the call already.
        prompts: The prompt of each of the R responses, on the device. Equal prompts are computed once.
        uniforms: `[R, L]`, the number that decides each token, whenever and wherever it is drawn.
        limits: Maximum number of tokens of each response, at most L.
        max_tokens: Maximum number of prompt tokens in one forward pass; a longer prompt with images has a pass of its
            own.
        multiple_of: A divisor of the tokens of a pass, and of the slots of each group of `StageRing`.
        together: Ranks that run every forward pass together, because they share experts.
        visual, offsets: The images of each response's prompt, and the offset of `Engine.prompt_images`; empty without.
        progress: Called with the numbers of responses and tokens that are drawn, at each look.
    """

    def __init__(
        self,
        session: GenerationSession,
        prompts: Sequence[Tensor],
        uniforms: Tensor,
        limits: Sequence[int],
        *,
        max_tokens: int,
        multiple_of: int,
        together: ProcessGroup | None,
        visual: Visual = (),
        offsets: Sequence[int] = (),
        progress: Progress = unwatched,
    ) -> None:
        self.session, self.decoding = session, session.decoding
        self.max_tokens, self.multiple_of, self.together = max_tokens, multiple_of, together
        self.progress, self.visual = progress, visual
        self._groups = 1 if self.decoding.ring is None else self.decoding.ring.size
        self.tables, self.reuse = self.decoding.caches[0].blocks, session.reuse
        responses, self.longest = uniforms.shape
        # On the host: the responses that wait, the response at each slot, and for each response its largest and its
        # present number of tokens, the number of computed tokens before its steps, its steps, and its prompt with the
        # tokens that it had when it last left its slot.
        self.waiting = deque(range(responses))
        self.slots: list[int | None] = [None] * len(self.tables.lengths)
        self.limits = list(limits)
        self.drawn, self.computed, self.steps = ([0] * responses for _ in range(3))
        self._differs = False
        ids = {key: prompt.tolist() for key, prompt in {id(prompt): prompt for prompt in prompts}.items()}
        self._ids = [[] if self._images(n) is not None else ids[id(prompt)] for n, prompt in enumerate(prompts)]
        # Responses to equal prompts have one tensor, too.
        equal = {tuple(row): prompt for row, prompt in zip(self._ids, prompts, strict=True) if row}
        self.prompts = [equal.get(tuple(row), prompt) for row, prompt in zip(self._ids, prompts, strict=True)]
        # On the device: the sampling masks of each response's tokens, and tokens and log-probs, whose last row takes
        # the draws of slots that have stopped.
        self._uniforms = torch.cat((uniforms, uniforms.new_zeros(1, self.longest)))
        shape = self._uniforms.shape
        self._masks: list[list[SamplingMask]] = [[] for _ in range(responses)]
        self._results = [rows.new_zeros(shape) for rows in session.draws[:2]]
        self._offsets = session.token.new_tensor([*(offsets or [0] * responses), 0])
        self._ends = torch.cat([*(prompt[-1:] for prompt in prompts), session.token.new_zeros(1)])

    def run(self) -> Responses:
        """Draw all responses. A response whose logits are not finite ends with a token of log-prob NaN.

        Raises:
            RuntimeError: Tensor-parallel ranks have drawn different tokens; also on ranks that share experts with them.
        """
        while self.advance():
            pass
        tokens, log_probs = (rows[:-1] for rows in self._results)
        mask = None
        if len(self.session.draws) > 2:
            empty = SamplingMask.from_rows([], tokens.device)
            mask = SamplingMask.concatenate([empty, *(part for parts in self._masks for part in parts)])
        return Responses(tokens, log_probs, self.drawn, mask, self.computed, self.steps)

    def advance(self) -> bool:
        """Draw at most `STEPS` tokens of each response at work; return whether there was a response, on any rank."""
        if not self._fill():
            return False
        steps, size = self._largest(self._reserve(), self._smallest_size())
        self._gather(size)
        rows, columns = self._bring()
        self.session.run_steps(steps, size)
        self._look(rows, columns)
        return True

    def _fill(self) -> bool:
        """Give free slots to waiting responses; return whether there are tokens to draw, on any rank."""
        leaders, followers = self._admit()
        passes = self._passes(leaders)
        count, going, differs = self._largest(len(passes), bool(self._busy()), self._differs)
        if differs:
            raise RuntimeError(
                "ranks of one tensor-parallel group have drawn different tokens, or by different numbers; their "
                "weights or kernels differ, so load the model anew, or draw with tp=1"
            )
        for pieces in passes + [{}] * (count - len(passes)):
            self._prefill(pieces)
        if not self.reuse.shares_later:
            for slot, _ in leaders:
                if (response := self.slots[slot]) is not None and not self.drawn[response]:
                    self.reuse.keep(slot, self._ids[response][:-1])
        for cache in self.decoding.caches:
            for source, slot, length in followers:
                cache.share(source, [slot], length)
        return bool(going)

    def _busy(self) -> list[tuple[int, int]]:
        """Return (slot, response) of all responses at work."""
        return [(slot, response) for slot, response in enumerate(self.slots) if response is not None]

    def _admit(self) -> tuple[list[tuple[int, Tensor]], list[tuple[int, int, int]]]:
        """Give free slots to waiting responses.

        Return (slot, tokens) of responses that compute these tokens but the last, and (source, slot, number of tokens)
        of responses that share them.
        """
        leaders, followers = [], []
        holders = {id(self.prompts[response]): slot for slot, response in self._busy()}
        sources = dict(holders) if self.reuse.shares_later else {}
        # Every response at work may need a new block before the next look.
        free = self.tables.num_free - len(holders)
        for slot in [slot for slot, response in enumerate(self.slots) if response is None]:
            if not self.waiting:
                break
            response = self.waiting[0]
            prompt, drawn = self.prompts[response], self.drawn[response]
            source = sources.get(id(prompt))
            shares = source is not None and not drawn and len(prompt) > 1
            begun = [] if shares else self.reuse.find(self._ids[response][:-1])
            free -= 1 if shares else (len(prompt) + drawn) // self.tables.block_size + 1 - self.reuse.num_used(begun)
            while free < 0 and (released := self.reuse.release(begun)) is not None:
                free += released
            if free < 0 and holders:
                break
            self.slots[slot] = self.waiting.popleft()
            if source is not None and shares:
                followers.append((source, slot, len(prompt) - 1))
                continue
            holders[id(prompt)] = slot
            if self.reuse.shares_later or not drawn:
                sources[id(prompt)] = slot
            self.reuse.start(slot, begun)
            while free < 0 and self.reuse.release() is not None:
                pass  # nothing else is at work, and the pool has room for one sequence
            tokens = torch.cat((prompt, self._results[0][response, :drawn]))[self.tables.lengths[slot] :]
            self.computed[response] += len(tokens) - 1
            leaders.append((slot, tokens))
        return leaders, followers

    def _passes(self, leaders: Sequence[tuple[int, Tensor]]) -> list[dict[int, Tensor]]:
        """Divide the tokens of the leaders into forward passes, each as slot -> tokens; keep images whole.

        A pass computes the tokens but the last, with which the next pass begins. Pipeline stages work on several passes
        at a time: there are two for each stage, or more, unless the passes would be short.
        """
        passes, room, most = list[dict[int, Tensor]](), 0, self.max_tokens
        if self._groups > 1:
            share = -(-sum(len(tokens) - 1 for _, tokens in leaders) // (2 * self._groups))
            most = min(most, max(share, _FEWEST_TOKENS))
        for slot, tokens in leaders:
            has_images = self._images(self.slots[slot]) is not None
            if has_images and len(tokens) - 1 > room:
                room = 0
            while len(tokens) > 1:
                if room <= 0:
                    passes.append({})
                    room = most
                length = len(tokens) - 1 if has_images else min(room, len(tokens) - 1)
                passes[-1][slot], tokens = tokens[: length + 1], tokens[length:]
                room -= length
        return passes

    def _images(self, response: int | None) -> Any:
        """Return the images of a response's prompt."""
        return self.visual[response] if self.visual and response is not None else None

    def _prefill(self, pieces: dict[int, Tensor]) -> None:
        """Add tokens to the caches; a pass without tokens computes padding, for ranks that share experts."""
        rows = [pieces.get(slot, self._ends[:0]) for slot in range(len(self.slots))]
        packed = PackedSequence.from_sequences([row[:-1] for row in rows], multiple_of=self.multiple_of)
        if not packed.num_tokens:
            packed = pad_to(packed, self.multiple_of)
        starts = packed.cu_seqlens.new_tensor([*self.tables.lengths, *[0] * (packed.padding > 0)]).long()
        counts = packed.cu_seqlens.diff().long()
        shift = torch.repeat_interleave(starts, counts, output_size=packed.num_tokens)
        packed = replace(packed, position_ids=packed.position_ids + shift)
        if self.decoding.drafter is not None:
            following = F.pad(torch.cat([row[1:] for row in rows]), (0, packed.padding))
            self.decoding.drafter.read(packed, self.decoding.caches[0], following)
            return
        visual = tuple(self._images(x) if slot in pieces else None for slot, x in enumerate(self.slots))
        visual = visual if any(visual) else ()
        self.decoding.forward(packed, self.decoding.caches, logits=False, visual=visual)

    def _reserve(self) -> int:
        """Take blocks for the next steps; return the number of steps."""
        while True:
            remaining = [
                0 if response is None else self.limits[response] - self.drawn[response] for response in self.slots
            ]
            most = STEPS * (self.session.options.drafts + 1)
            try:
                for cache in self.decoding.caches:
                    cache.reserve([min(most, tokens) for tokens in remaining])
            except OutOfBlocks:
                if self.reuse.release() is not None:
                    continue
                slot, response = min(self._busy(), key=lambda entry: self.drawn[entry[1]])
                self._leave({slot})
                self.waiting.appendleft(response)
            else:
                return min(STEPS, max(remaining))

    def _leave(self, slots: Collection[int]) -> None:
        """Free these slots; later sequences can go on with theirs."""
        leaving = [(slot, response) for slot, response in self._busy() if slot in slots]
        if not leaving:
            return
        most = max(self.drawn[response] for _, response in leaving)
        drawn_ids = self._results[0][torch.tensor([response for _, response in leaving]), :most].tolist()
        for (slot, response), ids in zip(leaving, drawn_ids, strict=True):
            if self._ids[response]:
                self._ids[response] = self._ids[response][: len(self.prompts[response])] + ids[: self.drawn[response]]
            self.reuse.keep(slot, self._ids[response])
            for cache in self.decoding.caches:
                cache.free([slot])
            self.slots[slot] = None

    def _largest(self, *numbers: int) -> list[int]:
        return largest_of_ranks(self.together, self._ends.device, *numbers)

    def _smallest_size(self) -> int:
        """Return the smallest number of slots of a step that has room for this rank's responses."""
        busy, size, multiple_of = len(self._busy()), len(self.slots), self.multiple_of * self._groups
        while max(busy, _FEWEST_SLOTS) <= (half := -(-(size // 2) // multiple_of) * multiple_of) < size:
            size = half
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

    def _bring(self) -> tuple[Tensor, Tensor]:
        """Bring the state of all slots to the device; return the rows `[N, 1]`, columns `[N, D]` of their results."""
        nobody, session = len(self.drawn), self.session
        numbers = [nobody if response is None else response for response in self.slots]
        drawn_of, limit_of = [*self.drawn, 0], [*self.limits, 0]
        state = torch.tensor([[n, drawn_of[n], limit_of[n] - drawn_of[n]] for n in numbers])
        response, drawn, room = state.to(self._ends.device).unbind(1)
        ahead = torch.arange(session.uniforms.shape[1], device=drawn.device)
        columns = (drawn[:, None] + ahead).clamp(max=self.longest - 1)
        last_tokens = self._results[0][response, (drawn - 1).clamp(min=0)]
        session.token.copy_(torch.where(drawn > 0, last_tokens, self._ends[response]))
        session.offset.copy_(self._offsets[response])
        session.room.copy_(room)
        session.active.copy_(response < nobody)
        session.uniforms.copy_(self._uniforms[response[:, None], columns])
        session.drawn.zero_()
        session.steps.zero_()
        return response[:, None], columns

    def _look(self, rows: Tensor, columns: Tensor) -> None:
        """Count the tokens of each response, and free the slots of stopped responses."""
        session = self.session
        is_drawn = torch.arange(columns.shape[1], device=rows.device) < session.drawn[:, None]
        session.score(is_drawn)
        for results, draws in zip(self._results, session.draws[:2], strict=True):
            results[torch.where(is_drawn, rows, len(self.drawn)), columns] = draws
        state = torch.stack((session.active.long(), session.drawn, session.steps))
        largest, least = self._checksum(is_drawn, state).tolist()
        self._differs |= largest != -least
        active, counts, steps = state.tolist()
        for bits in session.draws[2:]:
            parts = SamplingMask.from_bits(bits[is_drawn]).split(counts)
            for slot, response in self._busy():
                self._masks[response].append(parts[slot])
        for slot, response in self._busy():
            self.drawn[response] += counts[slot]
            self.steps[response] += steps[slot]
        for cache in self.decoding.caches:
            cache.advance_by(counts)
        self._leave({slot for slot, _ in self._busy() if not active[slot]})
        remaining = len(self.waiting) + len(self._busy())
        self.progress("responses", len(self.drawn) - remaining, len(self.drawn))
        self.progress("tokens", sum(self.drawn), 0)

    def _checksum(self, is_drawn: Tensor, state: Tensor) -> Tensor:
        """Return a sum over what was drawn since the last look, and its negative; with tp the largest of all ranks."""
        session, sums = self.session, state.new_zeros(2)
        if self.decoding.group is not None:
            rows = torch.stack((session.draws[0], session.uniforms.view(torch.int32).long()))
            numbers = torch.cat((rows.where(is_drawn, 0).flatten(), state.flatten()))
            total = (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
            sums = torch.stack((total, -total))
            dist.all_reduce(sums, dist.ReduceOp.MAX, group=self.decoding.group)
        return sums


def largest_of_ranks(group: ProcessGroup | None, device: torch.device, *numbers: int) -> list[int]:
    """Return the largest of each number over ranks that run every forward pass together; None: the numbers."""
    if group is None:
        return list(numbers)
    largest = torch.tensor(numbers, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    found: list[int] = largest.tolist()
    return found
