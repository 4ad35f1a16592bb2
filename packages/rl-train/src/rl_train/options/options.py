"""The options of `rl-train train`, declared once for the command line, YAML and TOML files, and Python.

Options of the packages below are the fields of their dataclasses; see `Nested`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from parallel_models import SamplingOptions
from rl_train.environments import reasoning_gym, verifiers
from rl_train.options.algorithms import ALGORITHMS, Algorithm
from rl_train.options.fields import (
    Count,
    CountOrZero,
    Dims,
    Folder,
    Free,
    Repeats,
    Sources,
    Text,
    as_text,
    device_ids,
    numbers,
    text_of_numbers,
)
from rl_train.options.groups import (
    LEFT_OUT,
    AgentOptions,
    CriticOptions,
    DataOptions,
    EvaluationOptions,
    ObjectiveOptions,
    RewardOptions,
    RolloutOptions,
    TeacherOptions,
)
from rl_train.options.nested import Nested
from rl_train.options.run_options import RunOptions

# `rl-train --help` imports this file, so the properties below import torch only when they are called.
if TYPE_CHECKING:
    from parallel_layers import ParallelDims

# Beginnings of environments that have rows, too.
SOURCES = (reasoning_gym.PREFIX, verifiers.PREFIX)
# Options that have the algorithm's value where they are left out.
OF_THE_ALGORITHM = ["samples", "equal_groups", "objective.advantages", "objective.loss", "objective.clip_low"]
OF_THE_ALGORITHM += ["objective.clip_high", "objective.aggregation", "objective.kl_estimator"]


class TrainOptions(RunOptions):
    """All options of a training run; the text below an option is its help text.

    Each value is checked by itself; `rl_train.options.derived.check` checks them together.
    """

    command: ClassVar[str] = "train"

    prompts: Sources
    """Rows with "text", "messages" or "tokens": .jsonl, .csv, .parquet, a folder or name:FILES; several with commas."""
    environment: Text | None = None
    """Environment: reasoning_gym:TASK or verifiers:TASKSET,option=value for --prompts, or module:class of turns."""
    agent: Text | None = None
    """Agent: module:function, called as agent(base_url, row); it draws by OpenAI's protocol and returns its reward."""
    agent_command: Text | None = None
    """Agent as a command, with OPENAI_BASE_URL and OPENAI_API_KEY, and the row as a JSON line on standard input."""
    reward: Annotated[Text, Repeats]
    """Rewards: exact-match, number-match, math-verify, regex, judge:FILE, module:function; as name=reward@weight,..."""
    algorithm: Literal[
        "ppo", "grpo", "rloo", "reinforce++", "dr-grpo", "cispo", "sapo", "gspo", "dapo", "on-policy-distillation"
    ] = "grpo"
    """Algorithm: ppo, grpo, rloo, reinforce++, dr-grpo, cispo, sapo, gspo, dapo or on-policy-distillation."""
    reference: Folder | None = None
    """Checkpoint folder of the reference of the KL penalty (default: the policy's folder), or of the teacher."""
    reference_dims: Free[Dims | None] = None
    """Grid of the reference or teacher, with as many ranks as the policy's grid (default: the policy's grid)."""
    prompts_per_step: Count = 64
    """Number of prompts in a step."""
    samples: Count = LEFT_OUT
    """Number of responses to each prompt (default: the algorithm's number)."""
    equal_groups: Literal["keep", "drop", "resample"] = LEFT_OUT
    """Prompts whose responses all have the same score: keep, drop, or resample others (default: the algorithm's)."""
    max_batches: Count = 10
    """Maximum number of batches that a step draws with --equal-groups resample."""
    epochs: Count = 1
    """Number of passes over the responses of a step."""
    mini_batch: Count | None = None
    """Number of responses in one optimizer step (default: all responses of the step)."""
    stop_ids: Annotated[Text, AfterValidator(text_of_numbers)] | None = None
    """Token ids that end a response, such as 2,7 (default: the model's end-of-text ids)."""

    ray: Free[bool] = False
    """Run on the Ray cluster at RAY_ADDRESS, or on a local one."""
    groups_on_one_rank: Free[bool] = False
    """Score and learn from all responses to a prompt on one data-parallel rank, in the batch's field `group`."""
    show_every: Free[CountOrZero] = 10
    """Number of steps between samples on the screen and in the loggers (0: none)."""
    save_rollouts: Free[bool] = False
    """Keep all responses with tokens, log-probs and rewards: a Parquet file a step in OUT/rollouts (needs pyarrow)."""

    data: DataOptions = Field(default_factory=DataOptions)
    rewards: RewardOptions = Field(default_factory=RewardOptions)
    agents: AgentOptions = Field(default_factory=AgentOptions)
    critic: CriticOptions = Field(default_factory=CriticOptions)
    sampling: Annotated[
        SamplingOptions,
        Nested(SamplingOptions, hidden=("max_length", "n", "stop_ids", "seed", "log_probs"), max_new_tokens=256),
    ] = Field(default_factory=lambda: SamplingOptions(max_new_tokens=256))
    rollouts: RolloutOptions = Field(default_factory=RolloutOptions)
    objective: ObjectiveOptions = Field(default_factory=ObjectiveOptions)
    teacher: TeacherOptions = Field(default_factory=TeacherOptions)
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions)

    @classmethod
    def filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Give options that are left out the algorithm's values, the environment's prompts, and the run's numbers."""
        if (environment := values.get("environment")) is not None:
            source = str(as_text(environment))
            gives_rows = {"prompts": source} if source.startswith(SOURCES) else {}
            reward = "reasoning-gym" if source.startswith(reasoning_gym.PREFIX) else "environment"
            values = {"reward": reward, **gives_rows} | values
        if values.get("agent") is not None or values.get("agent_command") is not None:
            values = {"reward": "environment"} | values
        if (rule := ALGORITHMS.get(str(values.get("algorithm", cls.model_fields["algorithm"].default)))) is not None:
            left_out = [name for name in OF_THE_ALGORITHM if name.partition(".")[0] not in values]
            values = {name: getattr(rule, name.rpartition(".")[2]) for name in left_out} | values
        return super().filled(values)

    @property
    def rule(self) -> Algorithm:
        """Return the row of the algorithm."""
        return ALGORITHMS[self.algorithm]

    @property
    def learned(self) -> str:
        """Return the name of the algorithm, for titles."""
        return self.algorithm

    @property
    def converses(self) -> bool:
        """Say whether the environment has several turns."""
        return self.environment is not None and not self.environment.startswith(SOURCES)

    @property
    def agent_function(self) -> str | None:
        """Return the `module:function` of the agents; None without agents, and for a command."""
        of_verifiers = self.environment is not None and self.environment.startswith(verifiers.PREFIX)
        return verifiers.EPISODE if of_verifiers else self.agent

    @property
    def runs_agents(self) -> bool:
        """Say whether agents draw from the policy."""
        return self.agent_function is not None or self.agent_command is not None

    @property
    def critic_grid(self) -> ParallelDims:
        """Return the sizes of the critic's grid."""
        return self.grid_of(self.critic.dims)

    @property
    def separate_critic(self) -> bool:
        """Say whether the critic is a separate model."""
        return self.rule.critic and not self.critic.share_backbone

    @property
    def trained(self) -> list[str]:
        """Return the names of the models that learn; their folders have the same names."""
        return ["actor", "critic"] if self.separate_critic else ["actor"]

    @property
    def has_reference(self) -> bool:
        """Say whether the run has a reference, for a KL penalty or as a teacher."""
        return self.objective.kl_coefficient > 0 or self.rule.teacher

    @property
    def separate_reference(self) -> bool:
        """Say whether the reference is a model beside the policy, whose adapters can be left out."""
        beside = self.reference is not None or self.lora is None
        return self.has_reference and self.teacher.engine is None and beside

    @property
    def batch(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts_per_step * self.samples

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer steps of a step."""
        return self.epochs * -(-self.batch // (self.mini_batch or self.batch))

    @property
    def stops(self) -> tuple[int, ...] | None:
        """Return the ids of tokens that end a response; None stands for the model's own ids."""
        return None if self.stop_ids is None else numbers(self.stop_ids)

    @property
    def engine_devices(self) -> list[str] | None:
        """Return the ids of the engines' devices, as in CUDA_VISIBLE_DEVICES; None: the policy's devices."""
        return device_ids(self.rollouts.devices)

    @property
    def num_engine_devices(self) -> int:
        """Return the number of the engines' separate devices, which `--ray` counts."""
        devices = self.rollouts.devices
        return int(devices) if self.ray and devices is not None else len(self.engine_devices or ())

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the policy and of the engines beside it, without those of servers."""
        return self.grid.world_size + self.num_engine_devices
