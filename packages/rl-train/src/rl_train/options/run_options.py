"""`RunOptions`: the options that all recipes share: the model, its grid, its optimizer, and the files of a run.

Options of the packages below are the fields of their dataclasses; see `Nested`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from parallel_layers.model import LoraOptions
from parallel_models import OptimizerOptions
from rl_models.backends import BackendOptions
from rl_train.options.fields import Count, CountOrZero, Dims, Folder, Free, Out, Repeats, Text, text_of_numbers
from rl_train.options.nested import Nested, Options

# `rl-train --help` imports this file, so the properties below import torch only when they are called.
if TYPE_CHECKING:
    from parallel_layers import ParallelDims

# Help texts that several commands share.
DEVICE = "Device type: cpu, cuda or another accelerator that torch finds (default: an accelerator if there is one)."

LONGEST_TIMEOUT = 365 * 24 * 3600  # one year in seconds: torch counts nanoseconds in 64 bits

# Options of the optimizer that need no memory.
STEP_OF_OPTIMIZER = ("learning_rate", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "momentum")

# The optimizer of a run, whose options that need no memory stay when it is resumed.
Optimizer = Free[Annotated[OptimizerOptions, Nested(OptimizerOptions, fixed=("algorithm", *STEP_OF_OPTIMIZER))]]


# Options by their whole names, whether they have an effect in a run, and the condition that gives them an effect.
Needs = tuple[str, bool, str]


class RunOptions(Options):
    """The options of a run of any recipe; the text below an option is its help text.

    Attributes:
        command: The name of the recipe's command.
    """

    command: ClassVar[str]

    model: Folder
    """Checkpoint folder of the initial policy, or its name on a hub: organisation/name[@revision]."""
    out: Free[Out] = Path("run")
    """Folder for the metrics, the training checkpoints and the result; or a URL, such as s3://bucket/run."""
    accept_changes: Free[bool] = False
    """Resume a run although rows, models or modules of the user have changed since it began."""
    steps: Free[Count] = 100
    """Number of steps; each step generates, scores and learns."""
    seed: int = 0
    """Seed of the order of the prompts and of sampling."""

    dims: Free[Dims] = ""
    """Grid of ranks: sizes of dp, tp, pp, cp, ep, replicate, such as dp=2,tp=2 (default: one rank)."""
    backend: Free[Text] = "parallel"
    """Backend of the models: parallel, transformers or megatron."""
    device: Free[Text | None] = Field(default=None, description=DEVICE)
    collective_timeout: Free[int] = Field(default=1800, ge=1, le=LONGEST_TIMEOUT)
    """Seconds that ranks wait for each other; all rewards of a step must end within this time."""
    max_tokens: Free[Count] = 16384
    """Maximum number of tokens in a micro-batch (one forward pass)."""
    offload: Free[bool] = False
    """Keep one model on the devices and offload the others to host memory."""
    save_every: Free[CountOrZero] = 20
    """Number of steps between training checkpoints (0: no checkpoints)."""
    keep: Free[Count] = 2
    """Number of newest training checkpoints to keep."""
    logger: Free[Annotated[Text, Repeats]] = ""
    """Loggers beside metrics.jsonl: tensorboard, wandb, trackio, mlflow (each installed by pip) or module:Class."""
    metrics_port: Free[Annotated[int, Field(ge=0, le=65535)]] = 0
    """Port of 127.0.0.1 at which /metrics gives the last step's metrics to Prometheus (0: off)."""
    profile: Free[CountOrZero] = 0
    """Step to trace with torch's profiler, into the folder `profile` of --out (0: none)."""
    profile_ranks: Free[Annotated[Text, AfterValidator(text_of_numbers)]] = "0"
    """Ranks that --profile traces, such as 0,3 or 0-7."""

    engine: Free[
        Annotated[
            BackendOptions,
            Nested(
                BackendOptions,
                hidden=("save_dtype",),
                fixed=("dtype", "lora", "base_format", "router_losses", "num_labels"),
            ),
        ]
    ] = Field(default_factory=BackendOptions)
    optimizer: Optimizer = Field(default_factory=OptimizerOptions)

    @classmethod
    def filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Give the schedule the number of steps, and the adapters the seed of the run."""
        if values.get("optimizer.schedule.kind", "constant") not in ("constant", "inverse-sqrt"):
            steps = values.get("steps", cls.model_fields["steps"].default)
            values["optimizer.schedule.total_steps"] = steps if isinstance(steps, int) else 1
        if any(name.startswith("engine.lora.") for name in values):
            values["engine.lora.seed"] = values.get("seed", cls.model_fields["seed"].default)
        return values

    def without_effect(self, needs: Iterable[Needs]) -> Iterator[tuple[str, str]]:
        """Yield the name of each option that is given and has no effect, and the condition that gives it one."""
        defaults = {leaf.name: leaf.field.default for leaf in self.leaves()}
        for names, holds, needed in needs:
            given = (name for name in names.split() if self.value(name) != defaults[name])
            yield from ((name, needed) for name in given if not holds)

    def grid_of(self, dims: str | None) -> ParallelDims:
        """Return the sizes of a model's grid; None: of the policy's grid."""
        from parallel_layers import ParallelDims

        return ParallelDims.parse(self.dims if dims is None else dims)

    @property
    def grid(self) -> ParallelDims:
        """Return the sizes of the policy's grid."""
        return self.grid_of(None)

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the run, without those of servers."""
        return self.grid.world_size

    @property
    def lora(self) -> LoraOptions | None:
        """Return the options of the adapters; None: all weights are trained."""
        lora = self.engine.lora
        assert lora is None or isinstance(lora, LoraOptions)
        return lora

    @property
    def learned(self) -> str:
        """Return the name of what is learned, for titles and `rl_train.loop.file_objectives.OBJECTIVES`."""
        return self.command

    @property
    def trained(self) -> list[str]:
        """Return the names of the models that learn; their folders have the same names."""
        return ["actor"]

    @property
    def keeps_best(self) -> bool:
        """Say whether the run keeps the checkpoint of its best evaluation; each recipe has this option."""
        return bool(self.value("evaluation.keep_best"))

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer steps of a step."""
        return 1
