"""`Scorer`: the head of a decoding model, which gives the log-probs of drawn tokens that `log_probs` gives.

Shape legend: T tokens, H hidden size, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from parallel_layers.head import SamplingMask
from parallel_models.model.language_models import CausalLM


class Scorer:
    """The logits of a step, and the log-probs of the tokens that were drawn from them.

    Args:
        model: The view of the model that computes steps.

    Attributes:
        states: `[T, H]`, the hidden states behind the last logits.
    """

    states: Tensor

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._model.config.decoder.hidden_size

    @property
    def is_invariant(self) -> bool:
        """Whether `log_probs` gives the bits of training (`tp_invariant`); else the draws' own log-probs serve."""
        return self._model.tp_invariant

    def logits(self, states: Tensor, *, exact: bool) -> Tensor:
        """Return the logits `[T, V]` fp32 of every token; see `CausalLM.logits`."""
        self.states = self._model.every_state(states)
        return self._model.logits(self.states, exact=exact)

    def log_probs(
        self, states_TH: Tensor, tokens_T: Tensor, temperature: float, sampling_mask: SamplingMask | None
    ) -> Tensor:
        """Return the log-probs `[T]` fp32 of tokens that were drawn from these hidden states."""
        scoring = self._model.scoring(tokens_T, temperature, sampling_mask, entropy=False)
        return scoring(states_TH, self._model.head_weight).log_probs
