"""The options of `rl-train train`: one declaration for the command line, for YAML and TOML files, and for Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rl_train.options.texts import numbers

# The command line is made from this file, and `--help` need not wait for torch: what needs it is imported when used.
if TYPE_CHECKING:
    from parallel_layers import ParallelDims
    from rl_train.loop.algorithms import Algorithm

T = TypeVar("T")


class _MayChange:
    """The mark of an option that a run may change when it is resumed."""


def _as_text(value: Any) -> Any:
    """Files may write a grid as a mapping and ids as a list, such as {tp: 2} and [2, 7]."""
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


def _as_number(value: Any) -> Any:
    """YAML takes 1e-5 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Free = Annotated[T, _MayChange]
Text = Annotated[str, BeforeValidator(_as_text)]
Number = Annotated[float, BeforeValidator(_as_number)]
Folder = Annotated[Path, Field(strict=False)]

# Help texts that several commands share.
DEVICE = "cpu, cuda or another accelerator that torch finds (default: an accelerator where there is one)."
RECOMPUTE = "Recompute in the backward to save memory: full, selective (MLPs and experts), or layers such as 0,5."

# A year; torch counts nanoseconds in 64 bits.
LONGEST_TIMEOUT = 365 * 24 * 3600

# `--help` has a panel for each group of options, by the first of the group.
PANELS = {
    "model": "What to train",
    "dims": "Grid, memory and numerics",
    "steps": "Generation",
    "epochs": "Learning",
    "eval_prompts": "Evaluation, checkpoints and logs",
}


class TrainOptions(BaseModel):
    """What to train, on what, and how; `rl-train train --help` lists the same options, from here.

    Each value is checked by itself; `rl_train.options.checks.check` checks them together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: Folder = Field(description="Checkpoint folder of the policy to begin with.")
    prompts: Folder = Field(
        description='JSON lines: {"text": "..."} or {"tokens": [ids]}, and whatever else the reward reads.'
    )
    reward: Text = Field(description="module:function, called with (prompt, response, row); returns a number.")
    out: Free[Folder] = Field(
        default=Path("run"), description="Folder for metrics, training checkpoints and the result."
    )
    algorithm: Literal["ppo", "grpo", "rloo", "reinforce++", "gspo", "dapo"] = Field(
        default="grpo", description="ppo, grpo, rloo, reinforce++, gspo or dapo."
    )
    critic: Folder | None = Field(
        default=None, description="Checkpoint folder of the critic of ppo (default: the policy's)."
    )
    share_backbone: bool = Field(
        default=False,
        description="Make the critic a head on the policy's layers; both learn by one loss (backend parallel).",
    )
    reference: Folder | None = Field(
        default=None, description="Checkpoint folder of the reference model of the KL penalty (default: the policy's)."
    )

    dims: Free[Text] = Field(
        default="", description="Grid of ranks: sizes of dp, tp, pp, cp and ep, such as dp=2,tp=2."
    )
    critic_dims: Free[Text | None] = Field(
        default=None, description="Grid of the critic, of as many ranks (default: the policy's)."
    )
    backend: Free[Text] = Field(
        default="parallel", description="What the models run on: parallel, transformers or megatron."
    )
    ray: Free[bool] = Field(default=False, description="Run on a Ray cluster (RAY_ADDRESS, or a local one).")
    device: Free[Text | None] = Field(default=None, description=DEVICE)
    collective_timeout: Free[int] = Field(
        default=1800,
        ge=1,
        le=LONGEST_TIMEOUT,
        description="Seconds that ranks wait for each other; all rewards of a step must be done within it.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Type of the weights: float32, bfloat16, or float16 with backend megatron (default: as stored).",
    )
    max_tokens: Free[int] = Field(
        default=16384, ge=1, description="The most tokens of a micro-batch, one forward pass."
    )
    recompute: Free[Text | None] = Field(default=None, description=RECOMPUTE)
    offload: Free[bool] = Field(
        default=False, description="Keep one model on the devices and offload the others to host memory."
    )
    sequence_parallel: Free[bool | None] = Field(
        default=None, description="Divide tokens over tp between the layers, too (default: where tp > 1)."
    )
    context_parallel: Free[Literal["ulysses", "ring"]] = Field(
        default="ulysses", description="Attention where cp > 1: ulysses or ring."
    )
    pipeline_schedule: Free[Text] = Field(
        default="1f1b", description="Order of work where pp > 1: 1f1b or zero-bubble."
    )
    virtual_stages: Free[int] = Field(default=1, description="Chunks of the model on each rank of a pipeline.")
    pipeline_split: Free[Text | None] = Field(
        default=None, description="Number of layers of each pipeline chunk, such as 3,5 (default: as even as possible)."
    )
    keep_probabilities: Free[bool] = Field(
        default=False, description="Keep the head's probabilities: one GEMM less, [T, V/tp] more memory."
    )
    tp_invariant: Free[bool] = Field(
        default=False, description="Give log-probs the same bits at every tp and in every batch."
    )
    deterministic: Free[bool] = Field(default=False, description="Give the same bits at every run on the same grid.")
    megatron_layers: Free[Text] = Field(
        default="local", description="Layers of backend megatron: local or transformer_engine."
    )
    distributed_optimizer: Free[bool] = Field(
        default=True, description="Divide the optimizer's state over dp x cp (backend megatron)."
    )
    router_balance: Number = Field(
        default=0.0, ge=0, description="Coefficient of the load-balancing loss of a mixture of experts."
    )
    router_sequence_balance: Number = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the load-balancing loss within each sequence (mixture of experts).",
    )
    router_z: Number = Field(default=0.0, ge=0, description="Coefficient of the routers' z-loss (mixture of experts).")
    router_replay: bool = Field(
        default=False, description="Send tokens to the experts that computed the old log-probs (mixture of experts)."
    )

    steps: Free[int] = Field(default=100, ge=1, description="Steps of the run; each generates, scores and learns.")
    prompts_per_step: int = Field(default=64, ge=1, description="Prompts of a step.")
    samples: int | None = Field(default=None, ge=1, description="Responses to each prompt (default: the algorithm's).")
    max_new_tokens: int = Field(default=256, ge=1, description="The most tokens of a response.")
    temperature: Number = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_k: int | None = Field(default=None, ge=1, description="Draw from the k likeliest tokens (default: from all).")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="Draw from the likeliest tokens that together have this probability."
    )
    stop_ids: Text | None = Field(
        default=None, description="Ids of tokens that end a response, such as 2,7 (default: the model's end of text)."
    )
    seed: int = Field(default=0, description="Seed of the order of the prompts and of sampling.")

    epochs: int = Field(default=1, ge=1, description="Passes over the responses of a step.")
    mini_batch: int | None = Field(
        default=None, ge=1, description="Responses of one optimizer step (default: all of a step)."
    )
    learning_rate: Number = Field(default=1e-06, gt=0, description="Learning rate of the policy.")
    critic_learning_rate: Number = Field(default=1e-05, gt=0, description="Learning rate of the critic.")
    beta1: Number = Field(default=0.9, ge=0, lt=1, description="AdamW's beta1, the decay of the mean gradient.")
    beta2: Number = Field(
        default=0.999, ge=0, lt=1, description="AdamW's beta2, the decay of the mean squared gradient."
    )
    adam_eps: Number = Field(default=1e-08, gt=0, description="AdamW's epsilon, in the denominator.")
    weight_decay: Number = Field(default=0.0, ge=0, description="Weight decay, applied to matrices only.")
    max_grad_norm: Number = Field(default=1.0, gt=0, description="Scale gradients of a larger norm down to this norm.")
    schedule: Text = Field(
        default="constant", description="Learning rate over time: constant, linear, cosine, wsd or inverse-sqrt."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which the learning rate rises to its full value.")
    decay_steps: int | None = Field(default=None, description="Steps of the decay at the end (schedule wsd).")
    min_ratio: Number = Field(
        default=0.0, description="Learning rate at the end of the schedule, as a part of the full one."
    )
    clip_low: Number | None = Field(
        default=None, description="Clip the policy's ratio below 1 - clip_low (default: the algorithm's)."
    )
    clip_high: Number | None = Field(
        default=None, description="Clip the policy's ratio above 1 + clip_high (default: the algorithm's)."
    )
    dual_clip: Number | None = Field(
        default=None,
        description="Dual clip: the largest ratio that counts where the advantage is negative (default: off).",
    )
    value_clip: Number = Field(
        default=0.2, ge=0, description="Clip of the change of the critic's values in one update (0: off)."
    )
    value_coefficient: Number = Field(
        default=0.5, gt=0, description="Coefficient of the critic's loss beside the policy's (--share-backbone)."
    )
    importance_cap: Number | None = Field(
        default=None,
        gt=0,
        description="Truncated importance sampling: weight tokens by p_train / p_rollout, capped here (default: off).",
    )
    aggregation: Text | None = Field(
        default=None, description="Average of the loss: token-mean or sequence-mean (default: the algorithm's)."
    )
    kl_coefficient: Number = Field(
        default=0.0, ge=0, description="Coefficient of the KL penalty for leaving the reference (0: off)."
    )
    kl_estimator: Text | None = Field(
        default=None, description="Estimator of the KL penalty: k1, k2 or k3 (default: k1 in rewards, k3 in losses)."
    )
    entropy_coefficient: Number = Field(default=0.0, description="Coefficient of the entropy bonus.")
    gamma: Number = Field(default=1.0, description="Discount of rewards from one token to the next.")
    lam: Number = Field(default=1.0, description="Lambda of generalised advantage estimation (ppo).")
    overlong_buffer: int = Field(
        default=0,
        ge=0,
        description="Overlong penalty (DAPO): lower the score linearly by up to 1 over the last N tokens (0: off).",
    )

    eval_prompts: Free[Folder | None] = Field(
        default=None,
        description="JSON lines of prompts for evaluation: answered greedily, scored, and excluded from learning.",
    )
    eval_every: Free[int] = Field(default=20, ge=1, description="Steps between evaluations.")
    save_every: Free[int] = Field(default=20, ge=0, description="Steps between training checkpoints (0: none).")
    keep: Free[int] = Field(default=2, ge=1, description="Number of training checkpoints to keep, the newest.")
    tensorboard: Free[bool] = Field(
        default=False, description="Write TensorBoard's events, too (needs the extra `tensorboard`)."
    )

    @property
    def rule(self) -> Algorithm:
        """Return the row of the algorithm."""
        from rl_train.loop.algorithms import ALGORITHMS

        return ALGORITHMS[self.algorithm]

    @property
    def grid(self) -> ParallelDims:
        """Return the sizes of the policy's grid."""
        from parallel_layers import ParallelDims

        return ParallelDims.parse(self.dims)

    @property
    def critic_grid(self) -> ParallelDims:
        """Return the sizes of the critic's grid."""
        from parallel_layers import ParallelDims

        return self.grid if self.critic_dims is None else ParallelDims.parse(self.critic_dims)

    @property
    def separate_critic(self) -> bool:
        """Say whether the critic is a model of its own."""
        return self.rule.critic and not self.share_backbone

    @property
    def responses(self) -> int:
        """Return the number of responses to each prompt."""
        return self.samples or self.rule.samples

    @property
    def batch(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts_per_step * self.responses

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer steps of a step."""
        return self.epochs * -(-self.batch // (self.mini_batch or self.batch))

    @property
    def stops(self) -> tuple[int, ...] | None:
        """Return the ids of tokens that end a response; None stands for the model's."""
        return None if self.stop_ids is None else numbers("stop_ids", self.stop_ids)

    def to_json(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return self.model_dump(mode="json")

    def check_resumes(self, before: Mapping[str, Any]) -> None:
        """Raise ValueError if a run with the options `before` (of `to_json`) would not go on as the same run."""
        now = self.to_json()
        for name, entry in type(self).model_fields.items():
            if _MayChange not in entry.metadata and name in before and before[name] != now[name]:
                raise ValueError(
                    f"{self.out} holds a run with {name}={before[name]!r}, this one has {now[name]!r}; choose another "
                    f"out, or give the same {name} to resume it"
                )
