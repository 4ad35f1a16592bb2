"""`ResponseStream`: draw responses to prompts that arrive meanwhile, with weights that change between two looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel_layers.head import SamplingMask
from parallel_models.engine.engine import Engine
from parallel_models.generation.continuous_batching import ContinuousBatching
from parallel_models.generation.decoding import CacheOptions
from parallel_models.generation.draw import ranks_together, slots_for
from parallel_models.generation.options import GenerationOptions
from parallel_models.generation.session import GenerationSession


class StreamedResponse(NamedTuple):
    """The tokens of a response, their log-probs, the sampling masks, the versions of the weights that drew them, and
    the steps of the model that drew them.
    """

    tokens: list[int]
    log_probs: list[float]
    kept: list[list[int]] | None
    versions: list[int]
    steps: int


class _Place(NamedTuple):
    """The response of a row: its key, its number, and the first token that each version of the weights draws."""

    key: int
    number: int
    begins: list[tuple[int, int]]


class ResponseStream(ContinuousBatching):
    """Continuous batching whose rows take other responses when theirs have ended, and whose weights may change.

    At most `options.max_sequences` responses are drawn at a time; others start as soon as there is room. Sequences of
    one version share the blocks of equal beginnings. All ranks of a model make the same calls, with the same prompts.

    Args:
        engine: The model.
        options: How tokens are drawn; `n` and `seed` have no effect.
        max_length: Maximum number of tokens of a prompt with its response.
        max_tokens: Maximum number of prompt tokens in one forward pass.
        version: The version of the weights.

    Raises:
        ValueError: The options round weights to FP8 or gather experts, in copies that `renew` would leave as they are.
    """

    def __init__(
        self, engine: Engine, options: GenerationOptions, max_length: int, max_tokens: int, version: int
    ) -> None:
        if options.float8:
            raise ValueError("float8=True rounds weights for one call, and a stream outlives them; leave float8 out")
        if options.experts == "gather":
            raise ValueError("experts='gather' copies experts, and a stream outlives the copies; take 'exchange'")
        self.options, self.max_length, self._version = options, max_length, version
        device, multiple_of = engine.grid.device, engine.tokens_multiple_of
        rows = slots_for(engine, options.max_sequences)
        how = options.exact, options.float8, options.float8_cache, options.drafts
        sizes = CacheOptions(rows, max_length, options.cache_gib, *how, experts="exchange")
        session = GenerationSession(sizes, engine.decoding(sizes), engine.module, device)
        session.sample_by(options, engine.vocab_size)
        super().__init__(
            session,
            [torch.zeros(1, dtype=torch.int64, device=device)] * rows,
            torch.zeros(rows, options.max_new_tokens, device=device),
            [0] * rows,
            max_tokens=max_tokens,
            multiple_of=multiple_of,
            together=ranks_together(engine.grid),
            progress=engine.progress,
        )
        self.waiting.clear()
        # The key, number, prompt, uniforms and limit of responses without a row, and the responses of the rows.
        self._asked: deque[tuple[int, int, list[int], Tensor, int]] = deque()
        self._places: dict[int, _Place] = {}
        # By key: the prompt, and the responses that have ended.
        self._prompts: dict[int, Tensor] = {}
        # By tokens: the prompts since the last `renew`.
        self._equal = WeakValueDictionary[tuple[int, ...], Tensor]()
        self._responses: dict[int, list[StreamedResponse | None]] = {}

    def __len__(self) -> int:
        """Return the number of keys whose responses are not complete."""
        return len(self._prompts)

    def add(self, key: int, prompt: Sequence[int], uniforms: Tensor, limit: int) -> None:
        """Ask for responses to a prompt, of at most `limit` tokens, decided by `uniforms` `[n, L]`."""
        tensor = self._equal.get(tuple(prompt))
        if tensor is None:
            tensor = self._equal[tuple(prompt)] = torch.tensor(prompt, device=self._uniforms.device)
        self._prompts[key] = tensor
        self._responses[key] = [None] * len(uniforms)
        on_device = uniforms.to(self._uniforms.device)
        self._asked.extend((key, number, list(prompt), row, limit) for number, row in enumerate(on_device))

    def cancel(self, key: int) -> None:
        """Draw no more for a key, whose responses are lost; no effect where they are complete."""
        if self._prompts.pop(key, None) is None:
            return
        del self._responses[key]
        self._asked = deque(asked for asked in self._asked if asked[0] != key)
        rows = {row for row, place in self._places.items() if place.key == key}
        self._leave({slot for slot, row in self._busy() if row in rows})
        self.waiting = deque(row for row in self.waiting if row not in rows)
        for row in rows:
            del self._places[row]

    @torch.no_grad()
    def step(self) -> tuple[list[int], list[tuple[int, list[StreamedResponse]]]]:
        """Draw some tokens; return the keys that begin, and those whose responses are complete, with the responses.

        Raises:
            ValueError: Logits are NaN or infinite.
        """
        free = [row for row in range(len(self.limits)) if row not in self._places][: len(self._asked)]
        begun = [key for key, number, *_ in islice(self._asked, len(free)) if number == 0]
        for row in free:
            self._put(row, *self._asked.popleft())
        self.advance()
        working = {row for _, row in self._busy()} | set(self.waiting)
        return begun, self._take([row for row in self._places if row not in working])

    def renew(self, version: int, *, recompute: bool) -> None:
        """Go on with the weights of this version, which the parameters have by now.

        Responses go on with the keys and values of the weights that drew them, or with `recompute` from their tokens.
        Responses that begin later share neither.
        """
        self._version = version
        for row, place in self._places.items():
            place.begins.append((self.drawn[row], version))
        busy = self._busy()
        if recompute:
            self._leave({slot for slot, _ in busy})
            self.waiting.extendleft(row for _, row in reversed(busy))
        self.session.reuse.forget(for_good=False)
        for _, row in () if recompute else busy:
            self._ids[row] = []  # tokens of several versions are not found again
        self._equal.clear()
        # Responses share the keys of one tensor of a prompt.
        self._prompts = {key: prompt.clone() for key, prompt in self._prompts.items()}
        for row in self.waiting:
            self.prompts[row] = self._prompts[self._places[row].key]

    def close(self) -> None:
        """Give the memory back; responses that are not complete are lost."""
        self.session.end()

    def _put(self, row: int, key: int, number: int, ids: list[int], uniforms: Tensor, limit: int) -> None:
        """Let a response wait for a slot, in a row whose response has ended."""
        self._places[row] = _Place(key, number, [(0, self._version)])
        prompt = self.prompts[row] = self._prompts[key]
        self._ids[row], self.limits[row], self.drawn[row], self.steps[row] = ids, limit, 0, 0
        self._masks[row] = []
        self._uniforms[row], self._ends[row] = uniforms, prompt[-1]
        self.waiting.append(row)

    def _take(self, rows: Sequence[int]) -> list[tuple[int, list[StreamedResponse]]]:
        """Take the responses of rows that have ended; return the keys that are complete now."""
        complete = []
        index = torch.tensor(rows, dtype=torch.int64, device=self._uniforms.device)
        tokens, log_probs = (results[index].tolist() for results in self._results)
        for row, ids, values in zip(rows, tokens, log_probs, strict=True):
            (key, number, begins), length = self._places.pop(row), self.drawn[row]
            if any(value != value for value in values[:length]):
                raise ValueError(
                    f"the model gives NaN or infinite logits after {length} tokens: it has diverged, or its checkpoint "
                    "is broken; go back to an earlier checkpoint, and check the learning rate and the loss"
                )
            kept = SamplingMask.concatenate(self._masks[row]).tolist() if self.options.keep_sampling_mask else None
            versions = list[int]()
            for begin, version in begins:
                versions[begin:] = [version] * (length - begin)
            self._responses[key][number] = StreamedResponse(
                ids[:length], values[:length], kept, versions, self.steps[row]
            )
            responses = [response for response in self._responses[key] if response is not None]
            if len(responses) == len(self._responses[key]):
                complete.append((key, responses))
                del self._prompts[key], self._responses[key]
        return complete
