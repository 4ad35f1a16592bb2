"""`Drafter`: multi-token-prediction layers guess the next tokens, which the model checks in one forward.

Self-speculative decoding (Leviathan et al. 2023, arXiv:2211.17192; DeepSeek-V3, arXiv:2412.19437, section 5.4.3). The
number that decides a token decides its draft, too, and a draft stays if it is the token that the model draws by this
number (Daliri et al. 2024, arXiv:2408.07978). So tokens and log-probs are those of a generation without drafts.

Shape legend: M sequences of a step, k drafts of each, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel_layers import PackedSequence
from parallel_layers.inference import DecodeSteps, PagedKVCache
from parallel_models.generation.scorer import Scorer
from parallel_models.model.language_models import CausalLM


class Drafter:
    """The layers of a model that draft k tokens of each sequence, one layer a token; the last layer repeats.

    Args:
        prompts, steps: The views of the model that compute prompts and steps.
        head: The head of `steps`.
        drafting: The view that drafts; every rank of it has all tokens.
        count: k.
        exact: See `CacheOptions`.
    """

    def __init__(
        self, prompts: CausalLM, steps: CausalLM, head: Scorer, drafting: CausalLM, count: int, *, exact: bool
    ) -> None:
        self.count, self._prompts, self._steps, self._head = count, prompts, steps, head
        self._drafting, self._exact = drafting, exact

    def read(self, packed: PackedSequence, cache: PagedKVCache, following: Tensor) -> None:
        """Add tokens of prompts to the cache; `following` `[T]` are the tokens after them."""
        self._prompts(packed, cache=cache, following=following)

    def verify(self, packed: PackedSequence, cache: DecodeSteps) -> Tensor:
        """Return the logits after the last token and the drafts of each sequence: `[M (k+1), V]`, this rank's part."""
        return self._head.logits(self._steps(packed, cache=cache), exact=self._exact)

    def draft(
        self,
        packed: PackedSequence,
        cache: PagedKVCache,
        tokens: Tensor,
        last: Tensor,
        draw: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        """Return the next drafts `[M, k]`, behind the tokens that stay after `verify`.

        The cache still has the lengths from before `verify`. Its entry of a later layer may belong to a draft that did
        not stay: that changes drafts alone.

        Args:
            packed: The batch of `verify`.
            cache: The cache.
            tokens: `[M, k+1]`, the tokens that the model has drawn.
            last: `[M]`, the column of the last token that stays.
            draw: Returns the tokens `[M]` of logits `[M, V]`, for the draft of this number, from 0.
        """
        model, layers, hidden = self._drafting, self._drafting.mtp, self._head.states
        assert layers is not None
        (sequences, width), starts = tokens.shape, cache.lengths[: len(tokens)]
        rows = torch.arange(sequences + 1, dtype=torch.int32, device=last.device)
        first, steps = packed.position_ids.view(sequences, width)[:, 0], DecodeSteps(cache, starts, width)
        state = draft = hidden
        drafts = list[Tensor]()
        for number in range(self.count):
            layer = min(number, len(layers.layers) - 1)
            if number == layer:
                # All tokens since the last step: their states and the tokens after them are known now.
                hidden = layers.layer_states(layer, model.model, hidden, packed, tokens.flatten(), steps)
                state = hidden.view(sequences, width, -1)[rows[:-1], last]
            else:
                # Behind the last token a layer that repeats reads its own state and draft.
                ahead = last + number - layer
                single = PackedSequence(draft, first + ahead, rows, 1)
                step = DecodeSteps(cache, starts + ahead.int())
                state = layers.layer_states(layer, model.model, state, single, draft, step)
            draft = draw(model.logits(state), number)
            tokens = tokens.roll(-1, 1).scatter(1, last[:, None], draft[:, None])
            drafts.append(draft)
        return torch.stack(drafts, 1)
