"""Options of a generation: how tokens are drawn, and how the draws are computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Required, TypedDict, get_args

from parallel_models.engine.checks import require_flags, require_number

# Logits up to 3e8 divided by this temperature are finite in fp32.
MIN_TEMPERATURE = 1e-30
MOST_DRAFTS = 16
Experts = Literal["auto", "gather", "exchange"]


@dataclass(frozen=True)
class SamplingOptions:
    """The options of the draws.

    Attributes:
        max_new_tokens: The largest number of tokens of a response.
        max_length: The largest number of tokens of a prompt with its response (default: any number).
        n: The number of responses for each prompt.
        temperature: Divide the logits by this number; 0 takes the likeliest token.
        top_k: Draw from the k likeliest tokens (None: from all).
        top_p: Draw from the likeliest tokens that together have this probability.
        min_p: Draw from the tokens whose probability is at least `min_p` times the largest (0: from all); min-p comes
            first, then top-k, then top-p. See `parallel_layers.inference.truncate`.
        stop_ids: A response ends with the first of these tokens.
        seed: The seed of the draws; data-parallel ranks with the same seed still draw differently. A response's draws
            depend neither on the other responses nor on `max_sequences`.
        keep_sampling_mask: Normalise the log-probs over the tokens that top-k, top-p and min-p kept, and return these
            tokens, the `sampling_mask` of a batch.
        log_probs: Return the log-probs of the draws; without, an engine that does not know them may return NaN.

    Raises:
        ValueError: An option is no number or out of its range, `stop_ids` are no integers, or `keep_sampling_mask`
            stands without a truncation, with temperature 0 or without log-probs.
    """

    max_new_tokens: int
    max_length: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: Iterable[int] = ()
    seed: int = 0
    keep_sampling_mask: bool = False
    log_probs: bool = True

    def __post_init__(self) -> None:
        require_flags(self)
        for name in ("max_new_tokens", "n"):
            require_number(name, getattr(self, name), at_least=1, integer=True)
        if self.max_length is not None:
            require_number("max_length", self.max_length, at_least=2, integer=True)
        require_number("seed", self.seed, integer=True)
        object.__setattr__(self, "seed", int(self.seed))  # a seed of numpy would overflow in `rank_seed`
        for name in ("temperature", "top_p", "min_p"):
            require_number(name, getattr(self, name))
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} is too small to divide logits by; use 0, which takes the most likely "
                f"token, or at least {MIN_TEMPERATURE}"
            )
        if self.top_k is not None:
            require_number("top_k", self.top_k, at_least=1, integer=True)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]")
        if self.keep_sampling_mask and not (self.truncates and self.temperature and self.log_probs):
            raise ValueError(
                "keep_sampling_mask needs top_k, top_p or min_p, log_probs, and a temperature above 0, not temperature="
                f"{self.temperature}; give one of them, or leave the mask out"
            )
        if isinstance(self.stop_ids, str | bytes) or not isinstance(self.stop_ids, Iterable):
            raise ValueError(f"stop_ids={self.stop_ids!r} must be a list of token ids, such as stop_ids=[2]")
        ids = list(self.stop_ids)
        for token in ids:
            require_number("stop_ids", token, at_least=0, integer=True)
        object.__setattr__(self, "stop_ids", sorted(set(map(int, ids))))

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def limit(self, prompt: int) -> int:
        """Return the largest number of tokens of a response to a prompt of `prompt` tokens.

        Raises:
            ValueError: `max_length` leaves no token for the response.
        """
        room = self.max_new_tokens if self.max_length is None else self.max_length - prompt
        if room < 1:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no token for a response; max_length={self.max_length}"
            )
        return min(room, self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingOptions):
    """The options of the draws, and how an actor computes them.

    Attributes:
        exact: Compute as `log_probs` does: the log-probs then agree with it to 1e-5 in fp32. The default takes a faster
            attention for single tokens and CUDA graphs; in bf16 its log-probs differ by rounding.
        float8: Compute the tokens of responses with projections and experts in FP8, copies that are made for each call
            (`parallel_layers.inference.float8_attributes`). Prompts and `log_probs` are as without, but for prompts
            with gathered experts (`experts`), which are in FP8 alone.
        float8_cache: Store keys and values in FP8, with a scale for each token and head.
        drafts: The number of tokens that the checkpoint's multi-token-prediction layers guess before each step of the
            model, which checks them at once (0: no guesses; at most 16). The tokens are those of a generation without
            drafts. On `backend="parallel"`, with pp 1.
        experts: What ranks that divide experts (ep) do. "gather": each rank gets all experts for the call, and draws
            its own responses without exchanges. "exchange": they exchange tokens in every layer. "auto": gather where
            all experts fit into free memory beside the cache and a step gains time (`parallel_layers.moe.saves_time`).
        max_sequences: Maximum number of responses that are drawn at a time; the others wait.
        cache_gib: Maximum memory of keys and values on this rank, in GiB (default: 80 % of a GPU's free memory).
            Responses without room wait.
        keep_cache: Keep keys, values and CUDA graphs after the call, on `backend="parallel"`. A later call of this kind
            computes only what follows the first tokens that earlier prompts and responses had. Set `max_length`: longer
            sequences in a later call take a new cache. Any other call of an actor or a critic in this process gives the
            memory back first.
    """

    exact: bool = False
    float8: bool = False
    float8_cache: bool = False
    drafts: int = 0
    experts: Experts = "auto"
    max_sequences: int = 512
    cache_gib: float | None = None
    keep_cache: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact and self.float8:
            raise ValueError("exact=True computes as log_probs does, and float8=True does not; leave one of them out")
        if self.experts not in get_args(Experts):
            raise ValueError(f"experts={self.experts!r} must be one of {', '.join(get_args(Experts))}")
        require_number("drafts", self.drafts, at_least=0, integer=True)
        if self.drafts > MOST_DRAFTS:
            raise ValueError(f"drafts={self.drafts} is more than {MOST_DRAFTS}; each further draft stays more rarely")
        require_number("max_sequences", self.max_sequences, at_least=1, integer=True)
        if self.cache_gib is not None:
            require_number("cache_gib", self.cache_gib, positive=True)


def require_drafts(drafts: int, prediction_layers: int, pp: int, *, images: bool) -> None:
    """Raise ValueError unless a model with this number of multi-token-prediction layers can draft tokens on a grid."""
    for hinders, reason in (
        (not prediction_layers, "multi-token-prediction layers, and the checkpoint has none"),
        (pp > 1, f"a grid with pp 1, not pp={pp}"),
        (images, "a model without a vision tower"),
    ):
        if drafts and hinders:
            raise ValueError(f"drafts={drafts} needs {reason}; leave drafts out")


class GenerationKeywords(TypedDict, total=False):
    """The fields of `GenerationOptions` as keyword arguments, by which editors complete them."""

    max_new_tokens: Required[int]
    max_length: int | None
    n: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    stop_ids: Iterable[int]
    seed: int
    keep_sampling_mask: bool
    log_probs: bool
    exact: bool
    float8: bool
    float8_cache: bool
    drafts: int
    experts: Experts
    max_sequences: int
    cache_gib: float | None
    keep_cache: bool
