"""`Actor`: a policy that computes log-probs, generates and learns."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Unpack

from torch import Tensor

from ckpt import Checkpoint
from parallel_layers.head import TokenStatistics
from parallel_models import GenerationKeywords, Role
from parallel_models.engine import located
from rl_models.api.worker import Worker
from rl_models.batch.batch import Batch
from rl_models.calls.dispatch import dispatched, per_prompt, per_token
from rl_models.calls.distillation import load_teacher_head
from rl_models.calls.generation import generate
from rl_models.calls.passes import predict


class TokenLogProbs(NamedTuple):
    """Both `[T]` fp32, aligned with the batch's tokens; zero for the first token of each sequence."""

    log_probs: Tensor
    entropy: Tensor


class Actor(Worker):
    """A causal language model on a grid of ranks. Make one with `from_pretrained`; every rank of the grid calls it.

    The loss of `update` reads `log_probs` and `entropy` of its `LossInputs`.
    """

    role: ClassVar[Role] = "causal_lm"

    @dispatched(per_token)
    def log_probs(self, batch: Batch, *, temperature: float = 1.0, adapters: bool = True) -> TokenLogProbs:
        """Return the log-probability of every token given the tokens before it, and the entropy, without gradients.

        Args:
            batch: This data-parallel rank's part.
            temperature: The logits are divided by this number: give the temperature that the tokens were drawn with.
            adapters: As for `predict`.

        Warns:
            UserWarning: A sequence goes beyond the model's positions (`max_position_embeddings`); once.

        Raises:
            ValueError: As for `predict`.
        """
        outputs = self.predict(batch, temperature=temperature, adapters=adapters)
        return TokenLogProbs(outputs["log_probs"], outputs["entropy"])

    @dispatched(per_token)
    def token_statistics(
        self, batch: Batch, *, top_n: int = 20, temperature: float = 1.0, adapters: bool = True
    ) -> TokenStatistics:
        """Return the statistics of every token, from one pass: `log_probs`, the token's rank, and the likeliest tokens.

        Row t has the distribution that token t comes from, of `batch.sampling_mask` if the batch has one; the row of a
        first token has no ids. As the fields `teacher_ids` and `teacher_log_probs` of a batch, the lists teach another
        actor.

        Args:
            batch, temperature, adapters: As for `log_probs`.
            top_n: N, the number of most likely tokens.

        Raises:
            ValueError: The backend is not "parallel", the model is tp-invariant, or `top_n` is not between 1 and the
                size of the vocabulary; or as for `predict`.
        """
        self._require("a forward pass")
        with self._with_adapters(adapters) as without:
            (columns,) = predict(
                self.engine,
                batch,
                self.max_tokens_per_micro_batch,
                call=f"{type(self).__name__}.token_statistics{without}",
                temperature=temperature,
                record_routing=False,
                top_n=top_n,
            )
        self._warn_of_length(batch)
        statistics, first = TokenStatistics.from_columns(columns), batch.first.to(columns.device)[:, None]
        return statistics._replace(
            top_ids=statistics.top_ids.masked_fill(first, -1),
            top_log_probs=statistics.top_log_probs.masked_fill(first, -math.inf),
        )

    @dispatched(per_token)
    def states(self, batch: Batch, *, adapters: bool = True) -> Tensor:
        """Return the final hidden state that predicts each token, `[T, H]` in the model's dtype; 0 for first tokens.

        As the field `teacher_states` of a batch they teach an actor that holds the head of this model.

        Args:
            batch: This data-parallel rank's part.
            adapters: As for `predict`; without adapters the head is that of the base.

        Raises:
            ValueError: The backend is not "parallel", or prompts are shared; or as for `predict`.
        """
        self._require("a forward pass")
        with self._with_adapters(adapters) as without:
            (states,) = predict(
                self.engine,
                batch,
                self.max_tokens_per_micro_batch,
                call=f"{type(self).__name__}.states{without}",
                temperature=1.0,
                record_routing=False,
                states=True,
            )
        self._warn_of_length(batch)
        return states

    @dispatched(changes=True, needs="nothing")
    def load_teacher_head(self, path: str | os.PathLike[str]) -> None:
        """Hold the head of a teacher's checkpoint, divided as this model's, for batches with `teacher_states`.

        Every rank of the grid calls this method.

        Raises:
            ValueError: The checkpoint is broken, or its vocabulary has another size; on every rank alike.
        """
        checkpoint = Checkpoint(located(path, self.grid.everyone))
        head = load_teacher_head(checkpoint, self.grid, self.engine.options.dtype)
        if (size := head.vocab_size) != self.engine.vocab_size:
            raise ValueError(
                f"{path} has a vocabulary of {size} entries, and the policy one of {self.engine.vocab_size}; take a "
                "teacher with the policy's vocabulary"
            )
        self.teacher_head = head

    @dispatched(per_prompt)
    def generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]] | Batch,
        *,
        adapters: bool = True,
        **options: Unpack[GenerationKeywords],
    ) -> Batch:
        """Continue every prompt, by continuous batching over a paged KV cache.

        Ranks that differ in tp or pp alone work on the same prompts; cp ranks on a part of them each.

        Args:
            prompts: The prompts of this data-parallel rank, each with at least one token; a `Batch` of them may have
                images (`Batch.visual`), which the responses keep.
            adapters: As for `predict`.
            **options: Fields of `parallel_models.GenerationOptions`: `max_new_tokens`, and on request others.

        Returns:
            Prompts with their n responses, which are in the mask. The field `log_probs` `[T]` holds the log-prob of
            each response token at this temperature, equal to the result of `log_probs`; 0 elsewhere. With `keep_cache`
            the field `prompt_tokens_computed` `[T]` holds, at the first token of each response, the number of tokens
            that the model computed before it. With `drafts` the field `decoding_steps` `[T]` holds there the number of
            steps of the model that drew the response.

        Warns:
            UserWarning: A response goes beyond the model's positions, as for `log_probs`.

        Raises:
            ValueError: A prompt is empty, a token is outside the vocabulary, an option is out of its range, ranks that
                differ in tp, cp or pp alone got other prompts or options, or logits are NaN or infinite; on every rank
                alike.
        """
        self._require("generate", ends_sessions=False)
        with self._with_adapters(adapters) as without:
            batch = generate(
                self.engine,
                prompts,
                options,
                call=f"{type(self).__name__}.generate{without}",
                max_tokens=self.max_tokens_per_micro_batch,
                positions=self.positions,
            )
        self._warn_of_length(batch)
        return batch
