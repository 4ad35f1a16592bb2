"""Options of a model's layers. Importing this file needs no torch, so that command lines print their help at once."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

# "ulysses" and "ring" are forms of attention, beside which recurrent layers hand states over; "heads" exchanges tokens
# for heads in both.
ContextParallel = Literal["ulysses", "ring", "heads"]
Float8Recipe = Literal["current", "block", "mxfp8"]

# The parts that a decoder computes again in the backward: "full", every layer; "selective", every MLP or mixture of
# experts; or the layers of these numbers. None: nothing.
Recompute = Literal["full", "selective"] | Collection[int] | None

ALL_LINEAR = "all-linear"
"""The target that means every linear layer, without the head, the routers and the routed experts."""


@dataclass(frozen=True)
class LoraOptions:
    """The options of low-rank adapters, with the meanings that they have in `peft.LoraConfig`.

    Attributes:
        rank: The rank r of each adapter.
        alpha: The adapter's term is multiplied by alpha / rank.
        targets: The adapted layers: "all-linear", a regular expression that the whole name must match, or several names
            or their last parts, such as `q_proj,v_proj,experts.down_proj`.
        dropout: The probability of dropout of an adapter's input while training.
        rslora: Multiply by alpha / sqrt(rank) instead (https://arxiv.org/abs/2312.03732).
        seed: Seed of the initial weights.
        shared_experts: Let the experts of a layer share gate_up's A and down's B ("shared outer" adapters). These are
            the factors on the side of the hidden states; the other factor is each expert's own. Files repeat the shared
            factor for every expert, so `peft` and vLLM read them.

    Raises:
        ValueError: A number is out of its range, a flag is no bool, or there is no target.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL_LINEAR
    dropout: float = 0.0
    rslora: bool = False
    seed: int = 0
    shared_experts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} must be a whole number of at least 1")
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha!r} must be a positive number")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be at least 0 and below 1")
        for name in ("rslora", "shared_experts"):
            if not isinstance(flag := getattr(self, name), bool):
                raise ValueError(f"{name}={flag!r} must be True or False")
        if not self.targets:
            raise ValueError(f"targets={self.targets!r} names no layer; use {ALL_LINEAR!r}, names or an expression")
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def choose(self, names: Sequence[str], linear: Collection[str]) -> list[str]:
        """Return the names of the adapted layers among `names`; "all-linear" means the names in `linear`.

        Raises:
            ValueError: A target matches no layer, or is not a valid regular expression. The error lists the layers.
        """
        targets = [self.targets] if isinstance(self.targets, str) else list(self.targets)
        chosen: set[str] = set()
        for target in targets:
            if target == ALL_LINEAR:
                matches = {name for name in names if name in linear}
            elif isinstance(self.targets, str):
                try:
                    matches = {name for name in names if re.fullmatch(target, name)}
                except re.error as error:
                    raise ValueError(f"targets={target!r} is no regular expression: {error}") from None
            else:
                matches = {name for name in names if name == target or name.endswith(f".{target}")}
            if not matches:
                kinds = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names})
                raise ValueError(
                    f"the target {target!r} of the adapters matches no layer; there are {', '.join(kinds)}: use "
                    f"{ALL_LINEAR!r}, a list of these names, or a regular expression for whole names such as "
                    f"{names[0] if names else ''!r}"
                )
            chosen |= matches
        return [name for name in names if name in chosen]


def require_recompute(recompute: Recompute, num_layers: int | None = None) -> None:
    """Raise ValueError for an unknown value, or for numbers of layers outside 0..`num_layers` - 1."""
    if recompute not in (None, "full", "selective") and (
        isinstance(recompute, str) or not isinstance(recompute, Collection)
    ):
        raise ValueError(f"recompute={recompute!r} is unknown; use 'full', 'selective', numbers of layers, or None")
    if isinstance(recompute, str | None) or num_layers is None:
        return
    if beyond := set(recompute) - set(range(num_layers)):
        raise ValueError(f"recompute: there are no layers {sorted(beyond)}; the model has 0..{num_layers - 1}")
