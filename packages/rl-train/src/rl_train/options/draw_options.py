"""The options of `rl-train generate` and `rl-train evaluate`, which draw responses with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rl_models.backends import BackendOptions
from rl_train.options.fields import Count, Dims, Folder, NotNegative, Number, Repeats, Sources, Text, text_of_numbers
from rl_train.options.groups import DrawingEngine, PromptOptions, RewardProcesses
from rl_train.options.nested import Nested, Options
from rl_train.options.options import TrainOptions
from rl_train.options.run_options import DEVICE

# Options of training models, which a model that draws has no use for.
_OF_TRAINING = (
    *("lora", "base_format", "router_losses", "num_labels", "recompute", "offload_activations", "save_dtype"),
    *("keep_probabilities", "mtp_loss_scaling_factor", "share_prefixes"),
)


class GenerateOptions(Options):
    """The options of `rl-train generate`; each means the same as in `TrainOptions`."""

    model: Folder
    """Checkpoint folder, or name on a hub: organisation/name[@revision]."""
    prompts: Sources | None = None
    """Rows with "text", "messages" or "tokens", as for train (default: a chat on the terminal)."""
    out: Folder | None = None
    """File of JSON lines for the responses (default: standard output)."""
    samples: Count = 1
    """Number of responses to each prompt."""
    temperature: NotNegative = 1.0
    """Sampling temperature (0: greedy)."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    max_new_tokens: Count = 256
    """Maximum number of tokens of a response."""
    stop_ids: Annotated[Text, AfterValidator(text_of_numbers)] | None = None
    """Token ids that end a response, such as 2,7 (default: the model's end-of-text ids)."""
    seed: int = 0
    """Seed of the sampling."""
    dims: Dims = ""
    """Grid of ranks: sizes of dp, tp, pp, cp, ep, replicate, such as dp=2,tp=2 (default: one rank)."""
    backend: Text = "parallel"
    """Backend of the model: parallel, transformers or megatron."""
    device: Text | None = Field(default=None, description=DEVICE)
    max_tokens: Count = 16384
    """Maximum number of tokens in one forward pass."""
    data: PromptOptions = Field(default_factory=PromptOptions)
    engine: Annotated[BackendOptions, Nested(BackendOptions, hidden=_OF_TRAINING)] = Field(
        default_factory=BackendOptions
    )
    rollouts: DrawingEngine = Field(default_factory=DrawingEngine)

    def train_options(self, out: Path, **further: Any) -> TrainOptions:
        """Return the options of a run that draws these responses in its evaluation; `out` is an empty folder."""
        replaced = {"prompts", "out", "samples", "temperature", "top_p"}
        values = {name: self.value(name) for name in self.names() & TrainOptions.names() - replaced}
        groups = {name.partition(".")[0] for name in values if "." in name}
        values = {name: value for name, value in values.items() if "." not in name}
        values |= {name: getattr(self, name) for name in groups} | {"sampling.max_new_tokens": self.max_new_tokens}
        values |= {"reward": "environment", "prompts": self.prompts, "out": out, "algorithm": "reinforce++"} | further
        options = TrainOptions(**values, prompts_per_step=1, samples=1)
        drawn = {name: getattr(self, name) for name in ("samples", "temperature", "top_p")}
        evaluation = options.evaluation.model_copy(update={"prompts": options.prompts, **drawn})
        return options.model_copy(update={"evaluation": evaluation})


class EvaluateOptions(GenerateOptions):
    """The options of `rl-train evaluate`."""

    prompts: Sources | None = None
    """Rows with "text", "messages" or "tokens", as for train (default: those of --environment)."""
    out: Folder | None = None
    """File of JSON lines for the responses and their rewards (default: none)."""
    reward: Annotated[Text, Repeats] | None = None
    """Rewards, as for train: exact-match, number-match, math-verify, regex, judge:FILE or module:function."""
    environment: Text | None = None
    """Environment: reasoning_gym:TASK,option=number in place of --prompts, or module:class of several turns."""
    rewards: RewardProcesses = Field(default_factory=RewardProcesses)
