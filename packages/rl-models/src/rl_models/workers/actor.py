"""`Policy` computes log-probs and generates; `Actor` also learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple, overload

from torch import Tensor

from rl_models.batch import Batch
from rl_models.engines import Role
from rl_models.losses import LossTerms
from rl_models.workers.dispatch import dispatched, for_all, per_prompt, per_token
from rl_models.workers.generation import SamplingOptions, generate
from rl_models.workers.worker import Worker

# (log_probs [T], entropy [T], batch) -> terms [T]
PolicyLoss = Callable[[Tensor, Tensor, Batch], LossTerms]


class TokenLogProbs(NamedTuple):
    """Both `[T]` fp32, aligned with the batch's tokens; zero for the first token of each sequence."""

    log_probs: Tensor
    entropy: Tensor


class RoutedLogProbs(NamedTuple):
    """`TokenLogProbs`, and the experts `[T, M, k]` int16 that each token went to in the M layers of a mixture."""

    log_probs: Tensor
    entropy: Tensor
    routing: Tensor


class Policy(Worker):
    """A worker whose model has a language-model head."""

    @overload
    def log_probs(
        self, batch: Batch, *, temperature: float = ..., record_routing: Literal[False] = ...
    ) -> TokenLogProbs: ...

    @overload
    def log_probs(self, batch: Batch, *, temperature: float = ..., record_routing: Literal[True]) -> RoutedLogProbs: ...

    @dispatched(per_token)
    def log_probs(
        self, batch: Batch, *, temperature: float = 1.0, record_routing: bool = False
    ) -> TokenLogProbs | RoutedLogProbs:
        """Return the log-probability of every token given the tokens before it, and the entropy, without gradients.

        Router replay (arXiv:2510.11370): a batch with the field `routing` `[T, M, k]`, which `record_routing` or an
        inference engine's export gives, sends its tokens to those experts, here and in `update`, whatever the backend;
        a row of -1 leaves the choice to the router.

        Args:
            batch: This data-parallel rank's part.
            temperature: The logits are divided by this number: give the temperature that the tokens were drawn with.
            record_routing: Return the experts of each token in a mixture of experts, too.

        Warns:
            UserWarning: A sequence goes beyond the model's positions (`max_position_embeddings`); once.

        Raises:
            ValueError: A token is outside the vocabulary, or an expert outside 0..E-1; the model has no routing; ranks
                that differ in tp, cp or pp alone got other sequences or temperatures; on every rank alike. In a batch
                on a GPU a token outside the vocabulary is a device assertion.
        """
        found = self.predict(batch, temperature=temperature, record_routing=record_routing)
        result = TokenLogProbs(found["log_probs"], found["entropy"])
        return RoutedLogProbs(*result, found["routing"]) if record_routing else result

    @dispatched(per_prompt)
    def generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        *,
        max_new_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop_ids: Iterable[int] = (),
        seed: int = 0,
        exact: bool = False,
        max_sequences: int = 512,
        cache_gib: float | None = None,
    ) -> Batch:
        """Continue every prompt, by continuous batching over a paged KV cache.

        Ranks that differ in tp or pp alone work on the same prompts; cp ranks on a part of them each.

        Args:
            prompts: The prompts of this data-parallel rank, each with at least one token.
            max_new_tokens: The largest number of tokens of a response.
            n: The number of responses for each prompt.
            temperature, top_k, top_p: See `parallel_layers.inference.sampling.sample`; temperature 0 is greedy.
            stop_ids: A response ends with the first of these tokens.
            seed: The seed of the draws; data-parallel ranks with the same seed still draw differently. A response's
                draws depend neither on the other responses nor on `max_sequences`.
            exact: Compute as `log_probs` does: the log-probs then agree with it to 1e-5 in fp32. The default takes a
                faster attention for single tokens and CUDA graphs; in bf16 its log-probs differ by rounding.
            max_sequences: The most responses that are drawn at a time; the others wait for a place.
            cache_gib: The most memory of keys and values on this rank, in GiB (default: 80 % of a GPU's free memory).
                Responses without room wait.

        Returns:
            Prompts with their n responses, which are in the mask. The field `log_probs` `[T]` holds the log-prob of
            each response token at this temperature, equal to the result of `log_probs`; 0 elsewhere.

        Warns:
            UserWarning: A response goes beyond the model's positions, as for `log_probs`.

        Raises:
            ValueError: A prompt is empty, a token is outside the vocabulary, an option is out of its range, ranks that
                differ in tp, cp or pp alone got other prompts or options, or logits are NaN or infinite; on every rank
                alike.
        """
        self._memory.require("generate")
        batch = generate(
            self.engine,
            prompts,
            lambda: SamplingOptions(
                max_new_tokens, n, temperature, top_k, top_p, stop_ids, seed, exact, max_sequences, cache_gib
            ),
            call=f"{type(self).__name__}.generate",
            max_tokens_per_pass=self.max_tokens_per_micro_batch,
            positions=self.positions,
        )
        self._warn_of_length(batch)
        return batch


class Actor(Policy):
    """A causal language model on a grid of ranks. Make one with `from_pretrained`; every rank of the grid calls it."""

    role: ClassVar[Role] = "causal_lm"

    @dispatched(for_all, changes=True, needs="optimizer")
    def update(
        self, batch: Batch, loss: PolicyLoss, *, temperature: float = 1.0, aggregation: str = "token-mean"
    ) -> dict[str, float]:
        """Take one optimizer step on the batch.

        A call that raises changes nothing, and the next call starts without its gradients. An error of the loss on
        one rank is raised on every rank.

        Args:
            batch: This data-parallel rank's part, with the fields that the loss reads.
            loss: A pure function of the log-probabilities, the entropies and the batch. It is called for each
                micro-batch with tokens in its mask; outside the mask its inputs are 0 and carry no gradient.
            temperature: As for `log_probs`.
            aggregation: How the terms are averaged (`rl_models.losses.aggregation.token_weights`).

        Returns:
            The means of `loss` and of the loss's metrics over the whole batch, all ranks together, `grad_norm`, and the
            `learning_rate` of the step.

        Raises:
            ValueError: The mask is empty, the loss is not one number per token, its metrics differ between
                micro-batches or ranks, ranks give other aggregations, or for the reasons of `log_probs`.
            FloatingPointError: The gradient is not finite.
            RuntimeError: Weights or optimizer state are offloaded.
        """
        return self.step(batch, loss, aggregation=aggregation, temperature=temperature)
