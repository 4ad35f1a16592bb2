"""The table of algorithms, as data; `rl_train.loop.objective` computes their advantages and losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

# The names of `parallel_layers.head.linear_distillation`.
DivergenceName = Literal["forward_kl", "reverse_kl", "jensen_shannon", "skewed_forward_kl", "skewed_reverse_kl"]


@dataclass(frozen=True)
class Algorithm:
    """One row of `ALGORITHMS`; the options of the same names override its values, see `OF_THE_ALGORITHM`.

    Attributes:
        advantages: How advantages follow from the scores, a key of `rl_train.loop.objective.ADVANTAGES`.
        source: The paper.
        loss: The policy's loss, a key of `rl_train.loop.objective.LOSSES`.
        aggregation: Average of the loss's terms (`rl_models.losses.aggregation`).
        clip_low, clip_high: Clip interval of the policy's ratio.
        kl: Place of the KL penalty: in the reward (with the estimator k1) or in the loss (k3).
        critic: Whether the algorithm needs a critic.
        samples: Number of responses to each prompt.
        teacher: Whether the policy learns from the log-probs of a teacher, the model of `--reference`.
        groups: Whether the responses to a prompt are compared, which needs at least two.
        equal_groups: Treatment of prompts whose responses all have the same score.
    """

    advantages: str
    source: str
    loss: str = "ppo"
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: Literal["reward", "loss"] = "reward"
    critic: bool = False
    teacher: bool = False
    samples: int = 1
    groups: bool = False
    equal_groups: Literal["keep", "drop", "resample"] = "keep"

    @property
    def kl_estimator(self) -> str:
        """Return the estimator of the KL penalty; k1 has no gradient on average, so a loss needs another."""
        return "k1" if self.kl == "reward" else "k3"


# Algorithms that compare eight responses to a prompt, with the KL penalty in the loss.
_of_groups = partial(Algorithm, kl="loss", samples=8, groups=True)

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm("gae", "Schulman et al. 2017, arXiv:1707.06347", critic=True),
    "grpo": _of_groups("group-relative", "Shao et al. 2024, arXiv:2402.03300", aggregation="sequence-mean"),
    "rloo": Algorithm("leave-one-out", "Ahmadian et al. 2024, arXiv:2402.14740", samples=4, groups=True),
    "reinforce++": Algorithm("returns", "Hu 2025, arXiv:2501.03262"),
    "dr-grpo": _of_groups("group-centred", "Liu et al. 2025, arXiv:2503.20783", aggregation="sequence-sum"),
    "cispo": _of_groups("group-relative", "MiniMax 2025, arXiv:2506.13585", loss="cispo", clip_low=1.0, clip_high=4.0),
    "sapo": _of_groups("group-relative", "Gao et al. 2025, arXiv:2511.20347", loss="sapo", aggregation="sequence-mean"),
    "gspo": _of_groups(
        "group-relative",
        "Zheng et al. 2025, arXiv:2507.18071",
        loss="gspo",
        aggregation="sequence-mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "dapo": _of_groups("group-relative", "Yu et al. 2025, arXiv:2503.14476", clip_high=0.28, equal_groups="resample"),
    "on-policy-distillation": Algorithm("teacher", "Agarwal et al. 2023, arXiv:2306.13649", teacher=True),
}
