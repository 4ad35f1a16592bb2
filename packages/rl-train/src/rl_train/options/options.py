"""The options of `rl-train train`: one table for the command line, for YAML and TOML files, and for Python."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rl_train.options.texts import numbers

# The command line is made from this file, and `--help` need not wait for torch: what needs it is imported when used.
if TYPE_CHECKING:
    from parallel_layers import ParallelDims
    from rl_train.loop.algorithms import Algorithm


@dataclass(frozen=True)
class Says:
    """What `--help` says of an option; a run that is resumed may change one that is `free`."""

    text: str
    free: bool = False


# What several commands say alike.
DEVICE = "cpu, cuda or another accelerator that torch finds; default an accelerator where there is one."
RECOMPUTE = (
    "What is recomputed in the backward to save memory: full, selective (MLPs and experts), or layers such as 0,5."
)

# `--help` has a panel for each group of options, by the first of the group.
PANELS = {
    "model": "What to train",
    "dims": "Grid, memory and numerics",
    "steps": "Generation",
    "epochs": "Learning",
    "eval_prompts": "Evaluation, checkpoints and logs",
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, on what, and how; `rl-train train --help` lists the same, from here."""

    model: Annotated[Path, Says("Checkpoint folder of the policy to begin with.")]
    prompts: Annotated[
        Path, Says('JSON lines: {"text": "..."} or {"tokens": [ids]}, and whatever else the reward reads.')
    ]
    reward: Annotated[str, Says("module:function, called with (prompt, response, row); returns a number.")]
    out: Annotated[Path, Says("Folder for metrics, training checkpoints and the result.", free=True)] = Path("run")
    algorithm: Annotated[str, Says("ppo, grpo, rloo, reinforce++, gspo or dapo.")] = "grpo"
    critic: Annotated[Path | None, Says("Checkpoint folder of the critic that ppo needs; default the policy's.")] = None
    share_backbone: Annotated[
        bool, Says("The critic is a head on the policy's layers, and both learn by one loss (backend parallel).")
    ] = False
    reference: Annotated[
        Path | None, Says("Checkpoint folder of the reference model of the KL penalty; default the policy's.")
    ] = None

    dims: Annotated[str, Says("Grid of ranks: sizes of dp, tp, pp, cp and ep, such as dp=2,tp=2.", free=True)] = ""
    critic_dims: Annotated[
        str | None, Says("Grid of the critic, of as many ranks; default the policy's.", free=True)
    ] = None
    backend: Annotated[str, Says("What the models run on: parallel, transformers or megatron.", free=True)] = "parallel"
    ray: Annotated[bool, Says("Run on a Ray cluster (RAY_ADDRESS, or a local one).", free=True)] = False
    device: Annotated[str | None, Says(DEVICE, free=True)] = None
    collective_timeout: Annotated[
        int, Says("Seconds that ranks wait for each other: all rewards of a step must be done within it.", free=True)
    ] = 1800
    dtype: Annotated[
        str | None, Says("Type of the weights: float32, bfloat16, or float16 (backend megatron); default as stored.")
    ] = None
    max_tokens: Annotated[int, Says("The most tokens of a micro-batch, one forward pass.", free=True)] = 16384
    recompute: Annotated[str | None, Says(RECOMPUTE, free=True)] = None
    offload: Annotated[bool, Says("A model is in host memory while another one works.", free=True)] = False
    sequence_parallel: Annotated[
        bool | None, Says("Between the layers tokens are divided over tp, too; default where tp > 1.", free=True)
    ] = None
    context_parallel: Annotated[str, Says("Attention where cp > 1: ulysses or ring.", free=True)] = "ulysses"
    pipeline_schedule: Annotated[str, Says("Order of work where pp > 1: 1f1b or zero-bubble.", free=True)] = "1f1b"
    virtual_stages: Annotated[int, Says("Chunks of the model on each rank of a pipeline.", free=True)] = 1
    pipeline_split: Annotated[
        str | None,
        Says("Number of layers of each pipeline chunk, such as 3,5; default as even as possible.", free=True),
    ] = None
    keep_probabilities: Annotated[
        bool, Says("Keep the head's probabilities: one matrix product less, [T, V/tp] more memory.", free=True)
    ] = False
    tp_invariant: Annotated[bool, Says("Log-probs with the same bits at every tp, in every batch.", free=True)] = False
    deterministic: Annotated[bool, Says("The same bits at every run on the same grid.", free=True)] = False
    megatron_layers: Annotated[str, Says("Layers of backend megatron: local or transformer_engine.", free=True)] = (
        "local"
    )
    distributed_optimizer: Annotated[
        bool, Says("Divide the optimizer's state over dp x cp (backend megatron).", free=True)
    ] = True
    router_balance: Annotated[float, Says("Coefficient of the load-balancing loss of a mixture of experts.")] = 0.0
    router_sequence_balance: Annotated[
        float, Says("Coefficient of the load-balancing loss within each sequence (mixture of experts).")
    ] = 0.0
    router_z: Annotated[float, Says("Coefficient of the routers' z-loss (mixture of experts).")] = 0.0
    router_replay: Annotated[
        bool, Says("Learn with the experts that the old log-probs were computed with (mixture of experts).")
    ] = False

    steps: Annotated[int, Says("Steps of the run; each generates, scores and learns.", free=True)] = 100
    prompts_per_step: Annotated[int, Says("Prompts of a step.")] = 64
    samples: Annotated[int | None, Says("Responses to each prompt; default the algorithm's.")] = None
    max_new_tokens: Annotated[int, Says("The most tokens of a response.")] = 256
    temperature: Annotated[float, Says("Sampling temperature.")] = 1.0
    top_k: Annotated[int | None, Says("Draw from the k likeliest tokens; default from all.")] = None
    top_p: Annotated[float, Says("Draw from the likeliest tokens that together have this probability.")] = 1.0
    stop_ids: Annotated[
        str | None, Says("Ids of tokens that end a response, such as 2,7; default the model's end of text.")
    ] = None
    seed: Annotated[int, Says("Seed of the order of the prompts and of sampling.")] = 0

    epochs: Annotated[int, Says("Passes over the responses of a step.")] = 1
    mini_batch: Annotated[int | None, Says("Responses of one optimizer step; default all of a step.")] = None
    learning_rate: Annotated[float, Says("Learning rate of the policy.")] = 1e-6
    critic_learning_rate: Annotated[float, Says("Learning rate of the critic.")] = 1e-5
    beta1: Annotated[float, Says("AdamW's beta1, the decay of the mean gradient.")] = 0.9
    beta2: Annotated[float, Says("AdamW's beta2, the decay of the mean squared gradient.")] = 0.999
    adam_eps: Annotated[float, Says("AdamW's epsilon, in the denominator.")] = 1e-8
    weight_decay: Annotated[float, Says("Weight decay, applied to matrices only.")] = 0.0
    max_grad_norm: Annotated[float, Says("Gradients of a larger norm are scaled down to this one.")] = 1.0
    schedule: Annotated[str, Says("Learning rate over time: constant, linear, cosine, wsd or inverse-sqrt.")] = (
        "constant"
    )
    warmup_steps: Annotated[int, Says("Steps in which the learning rate rises to its full value.")] = 0
    decay_steps: Annotated[int | None, Says("Steps of the decay at the end (schedule wsd).")] = None
    min_ratio: Annotated[float, Says("Learning rate at the end of the schedule, as a part of the full one.")] = 0.0
    clip_low: Annotated[
        float | None, Says("How far the policy's ratio may fall below 1 and count; default the algorithm's.")
    ] = None
    clip_high: Annotated[
        float | None, Says("How far the policy's ratio may rise above 1 and count; default the algorithm's.")
    ] = None
    dual_clip: Annotated[
        float | None, Says("The largest ratio that counts where the advantage is negative; default none.")
    ] = None
    value_clip: Annotated[float, Says("How far the critic's values may move at once; 0: as far as they like.")] = 0.2
    value_coefficient: Annotated[
        float, Says("Coefficient of the critic's loss beside the policy's (--share-backbone).")
    ] = 0.5
    importance_cap: Annotated[
        float | None,
        Says("Weigh tokens by their probability in training over that in generation, at most so much; default not."),
    ] = None
    aggregation: Annotated[
        str | None, Says("How the loss is averaged: token-mean or sequence-mean; default the algorithm's.")
    ] = None
    kl_coefficient: Annotated[float, Says("Coefficient of the KL penalty for leaving the reference; 0: none.")] = 0.0
    kl_estimator: Annotated[
        str | None, Says("Estimator of the KL penalty: k1, k2 or k3; default k1 in rewards, k3 in losses.")
    ] = None
    entropy_coefficient: Annotated[float, Says("Coefficient of the entropy bonus.")] = 0.0
    gamma: Annotated[float, Says("Discount of rewards from one token to the next.")] = 1.0
    lam: Annotated[float, Says("Lambda of generalised advantage estimation (ppo).")] = 1.0
    overlong_buffer: Annotated[
        int, Says("The score falls by up to 1 over the last so many tokens before --max-new-tokens; 0: not.")
    ] = 0

    eval_prompts: Annotated[
        Path | None,
        Says("JSON lines of prompts that are answered greedily and scored, and not learned from.", free=True),
    ] = None
    eval_every: Annotated[int, Says("Steps between evaluations.", free=True)] = 20
    save_every: Annotated[int, Says("Steps between training checkpoints; 0: none.", free=True)] = 20
    keep: Annotated[int, Says("How many training checkpoints to keep, the newest.", free=True)] = 2
    tensorboard: Annotated[bool, Says("Write TensorBoard's events, too (the extra `tensorboard`).", free=True)] = False

    def __post_init__(self) -> None:
        from rl_train.options.checks import check

        check(self)

    @property
    def rule(self) -> Algorithm:
        """The algorithm's row."""
        from rl_train.loop.algorithms import ALGORITHMS

        return ALGORITHMS[self.algorithm]

    @property
    def grid(self) -> ParallelDims:
        """The sizes of the grid."""
        from parallel_layers import ParallelDims

        return ParallelDims.parse(self.dims)

    @property
    def critic_grid(self) -> ParallelDims:
        """The sizes of the critic's."""
        from parallel_layers import ParallelDims

        return self.grid if self.critic_dims is None else ParallelDims.parse(self.critic_dims)

    @property
    def separate_critic(self) -> bool:
        """Whether there is a critic that is a model of its own."""
        return self.rule.critic and not self.share_backbone

    @property
    def responses(self) -> int:
        """To each prompt."""
        return self.samples or self.rule.samples

    @property
    def batch(self) -> int:
        """Responses of a step."""
        return self.prompts_per_step * self.responses

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * -(-self.batch // (self.mini_batch or self.batch))

    @property
    def stops(self) -> tuple[int, ...] | None:
        """Tokens that end a response; None: the model's."""
        return None if self.stop_ids is None else numbers("stop_ids", self.stop_ids)

    def to_json(self) -> dict[str, Any]:
        """All options as JSON values."""
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()
        }

    def check_resumes(self, before: Mapping[str, Any]) -> None:
        """Raise ValueError if a run with the options `before` (of `to_json`) would not go on as the same run."""
        now = self.to_json()
        for name, (_, says) in declared().items():
            if not says.free and name in before and before[name] != now[name]:
                raise ValueError(
                    f"{self.out} holds a run with {name}={before[name]!r}, this one has {now[name]!r}; choose another "
                    f"out, or give the same {name} to resume it"
                )


def declared() -> dict[str, tuple[Any, Says]]:
    """Every option's type and what `--help` says of it, by name."""
    hints = typing.get_type_hints(TrainOptions, include_extras=True)
    return {
        entry.name: (hints[entry.name].__origin__, hints[entry.name].__metadata__[0])
        for entry in dataclasses.fields(TrainOptions)
    }
