"""The groups of options in `TrainOptions`; the text below an option is its help text."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from rl_train.options.algorithms import DivergenceName
from rl_train.options.fields import (
    CONFIG,
    Count,
    CountOrZero,
    Dims,
    Folder,
    Fraction,
    Free,
    NotNegative,
    Number,
    Positive,
    Sources,
    Text,
    parse_betas,
    text_of_devices,
)

DeviceIds = Annotated[Text, AfterValidator(text_of_devices)]
# An option that has the algorithm's value where it is left out, and this default until then.
LEFT_OUT: Any = None


def _text_of_weights(text: str) -> str:
    if text and not all(0 < weight < inf for weight in parse_betas(text)):
        raise ValueError(f"must be numbers above 0 with commas, such as 3,1; got {text}")
    return text


class RowOptions(BaseModel):
    """The form of rows."""

    model_config = CONFIG

    columns: Text = ""
    """Fields that are taken from columns, or column.entry, of other names, such as text=question,answer=solution."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """Prompts, or whole rows, that do not fit the model or --max-tokens: refuse to run, or drop these rows."""
    system_prompt: Text | None = None
    """First message of chats ("messages") that have no system message."""


class PromptOptions(RowOptions):
    """The prompts' form."""

    max_turns: Count = 8
    """Maximum number of responses in a conversation with an --environment of several turns."""


class MixtureOptions(BaseModel):
    """The mixture of rows from several sources, and their shuffling."""

    model_config = CONFIG

    weights: Annotated[Text, AfterValidator(_text_of_weights)] = ""
    """Weight of each of several sources, such as 3,1 (default: its number of rows)."""
    shuffle_buffer: CountOrZero = 0
    """Read N rows of each source at a time, and shuffle them (0: read all rows before the run, and shuffle them)."""

    @property
    def weight_of_sources(self) -> tuple[float, ...]:
        """Return the weights; empty: the numbers of rows."""
        return parse_betas(self.weights) if self.weights else ()


class ExampleOptions(RowOptions, MixtureOptions):
    """The form and the order of rows."""


class DataOptions(PromptOptions, MixtureOptions):
    """The form and the order of prompts."""

    curriculum: Number | None = None
    """Draw prompts whose mean reward so far is near this number more often than others (default: all alike)."""


class RewardProcesses(BaseModel):
    """The processes of rewards and environments."""

    model_config = CONFIG

    workers: Free[Count] = 1
    """Number of processes of each reward, and of the environment; each imports the module."""
    timeout: Free[Positive] = 60.0
    """Seconds for each call of a reward, an environment or a tool; a call that takes longer is ended."""
    errors: Free[Literal["stop", "zero"]] = "stop"
    """Reward that raises, takes too long or is no finite number: stop the run, or zero: count the reward as 0."""


class RewardOptions(RewardProcesses):
    """The processes of rewards and environments, and the shape of scores."""

    overlong_buffer: CountOrZero = 0
    """Overlong penalty (DAPO): lower the score linearly by up to 1 over the last N tokens (0: off)."""


class AgentOptions(BaseModel):
    """The limits of an agent's episodes."""

    model_config = CONFIG

    concurrent: Free[Count] = 64
    """Maximum number of agents that run at a time; they share --rewards.workers processes."""
    timeout: Free[Positive] = 600.0
    """Seconds for each episode of an agent; an agent that takes longer has failed, and a command is killed."""
    max_calls: Count = 64
    """Maximum number of calls of the model in an episode; later calls are refused."""
    max_tokens: CountOrZero = 0
    """Maximum number of drawn tokens in an episode (0: no limit)."""
    image: Free[Text | None] = None
    """Image of the container in which --agent-command runs, one for each episode (default: no container)."""
    container: Free[Text] = "docker"
    """Program that runs the container, docker or podman, and further options of its command run."""
    memory: Free[Positive | None] = None
    """Memory of a container in GiB (default: no limit)."""


class CriticOptions(BaseModel):
    """The critic of ppo."""

    model_config = CONFIG

    model: Folder | None = None
    """Checkpoint folder of the critic of ppo (default: the policy's folder)."""
    dims: Free[Dims | None] = None
    """Grid of the critic, with as many ranks as the policy's grid (default: the policy's grid)."""
    share_backbone: bool = False
    """Make the critic a head on the policy's layers and train both with one loss (not with backend megatron)."""
    learning_rate: Positive = 1e-5
    """Learning rate of the critic."""
    value_clip: NotNegative = 0.2
    """Clip the critic's values to this distance from the old values (0: off)."""
    value_coefficient: Positive = 0.5
    """Coefficient of the critic's loss in the joint loss (--share-backbone)."""


class CacheLimits(BaseModel):
    """Limits of a rank that draws: its sequences at a time, and its memory for keys and values."""

    model_config = CONFIG

    max_sequences: Free[Count] = 512
    """Maximum number of responses that a rank draws at a time; the others wait."""
    cache_gib: Free[Positive | None] = None
    """Memory of the KV cache on a rank, in GiB (default: 80 % of a GPU's free memory)."""
    float8_cache: Free[bool] = False
    """Store the native engine's keys and values in FP8 (default: in --dtype)."""
    drafts: Free[CountOrZero] = 0
    """Tokens that the model's multi-token-prediction layers guess before each step of the native engine (0: none)."""
    experts: Free[Literal["auto", "gather", "exchange"]] = "auto"
    """Ranks that divide experts (ep) gather all of them to draw, exchange tokens, or do what suits (auto)."""


class DrawingEngine(CacheLimits):
    """The engine that generates."""

    engine: Free[Text] = "native"
    """Engine: native (copies of the policy on --rollouts.devices), vllm, http://HOST:PORT (vLLM) or module:function."""
    memory: Free[Annotated[Number, Field(gt=0, lt=1)]] = 0.4
    """Share of a device's memory that vLLM takes while it generates (CPU: see VLLM_CPU_KVCACHE_SPACE)."""
    devices: Free[DeviceIds | None] = None
    """Separate devices of engines, such as 4,5, or cpu; with --ray their number (default: the policy's devices)."""
    dims: Free[Dims] = ""
    """Grid of each engine on --rollouts.devices, such as tp=2, or tp=2,ep=2 for experts (default: one device)."""
    quantization: Free[Literal["fp8"] | None] = None
    """fp8: draw with weights in FP8, vLLM's by blocks of 128 x 128, the native engine's by rows (default: --dtype)."""

    @property
    def has_server(self) -> bool:
        """Say whether a server that runs already generates."""
        return self.engine.startswith(("http://", "https://"))


class RolloutOptions(DrawingEngine):
    """The engine that generates, and the weights that it draws with."""

    adapter: Free[bool] = False
    """Send vLLM only the adapters (--lora-rank), which it applies itself (default: merged weights)."""
    routing: bool = False
    """Train with the experts that vLLM drew each token with (R3, mixture of experts; default: the routers choose)."""
    staleness: CountOrZero = 0
    """Draw responses up to N steps ahead, with weights that are up to N versions old (0: with the newest)."""
    in_flight: bool = False
    """Change the weights of engines on --rollouts.devices while they draw; learn from what is complete."""
    changed_weights: Free[bool] = False
    """Send native engines only the weights that changed: for networks below 10 GB/s and small learning rates."""
    partial: CountOrZero = 0
    """Partial rollouts: draw N tokens at a time until a step has its responses; others go on in the next (0: off)."""
    stale_cache: Free[Literal["keep", "recompute"]] = "keep"
    """Keys and values of older weights, for responses in flight: keep, or recompute with the new weights."""


class ImportanceOptions(BaseModel):
    """Importance sampling between the weights that generate and the weights that learn."""

    model_config = CONFIG

    cap: Positive | None = None
    """Importance sampling: weight tokens by p_train / p_rollout, at most this number (default: off)."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Ratios above --importance-cap: truncate them (TIS), or mask: learn nothing from such tokens (MIS)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio p_train / p_rollout of a token, of a sequence (their product), or geometric (their geometric mean)."""
    floor: NotNegative = 0.0
    """Mask ratios below this number, too (with --objective.importance.bound mask)."""
    veto: Fraction = 0.0
    """Reject responses with a token whose ratio p_train / p_rollout is below this number (0: off)."""


class ObjectiveOptions(BaseModel):
    """Advantages, and the loss of the policy."""

    model_config = CONFIG

    advantages: Text = LEFT_OUT
    """Advantages: gae, group-relative, group-centred, leave-one-out, returns, teacher, or module:function."""
    loss: Text = LEFT_OUT
    """Loss of the policy: ppo, gspo, cispo, sapo, dro, or a custom module:function (default: the algorithm's loss)."""
    divergence: DivergenceName | None = None
    """Divergence from the teacher over the whole vocabulary: forward_kl, reverse_kl, jensen_shannon, skewed_forward_kl
    or skewed_reverse_kl (default: the reverse KL's estimator at drawn tokens)."""
    mixture: Fraction | None = None
    """Share in the mixture of --objective.divergence jensen_shannon (the teacher's) and of the skewed KLs."""
    clip_low: NotNegative = LEFT_OUT
    """Clip the policy's ratio below 1 - clip_low (default: the algorithm's value)."""
    clip_high: NotNegative = LEFT_OUT
    """Clip the policy's ratio above 1 + clip_high (default: the algorithm's value)."""
    dual_clip: Annotated[Number, Field(gt=1)] | None = None
    """Dual clip: cap the loss at this ratio where the advantage is negative (default: off)."""
    dro_beta: Positive = 1.0
    """Strength of the pull of --loss dro towards the policy that drew the tokens."""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum"] = LEFT_OUT
    """Average of the loss: token-mean, sequence-mean, or sequence-sum / max_new_tokens (default: the algorithm's)."""
    kl_coefficient: NotNegative = 0.0
    """Coefficient of the KL penalty against the reference model (0: off)."""
    kl_estimator: Literal["k1", "k2", "k3"] = LEFT_OUT
    """Estimator of the KL penalty: k1, k2 or k3 (default: k1 in rewards, k3 in losses)."""
    entropy_coefficient: Number = 0.0
    """Coefficient of the entropy bonus (0: off)."""
    gamma: Fraction = 1.0
    """Discount of rewards from one token to the next."""
    lam: Fraction = 1.0
    """Lambda of generalised advantage estimation (ppo)."""
    router_replay: bool = False
    """Route tokens to the experts that computed the old log-probs (mixture of experts)."""
    importance: ImportanceOptions = Field(default_factory=ImportanceOptions)


class TeacherOptions(BaseModel):
    """The teacher of on-policy distillation, beside --reference."""

    model_config = CONFIG

    prompts: Text | None = None
    """Column with the teacher's prompt, which may tell more than the policy's (default: the policy's prompt)."""
    engine: Free[Text | None] = None
    """Engine of the teacher: native or vllm on --teacher.devices, or http://HOST:PORT (default: the policy's ranks)."""
    devices: Free[DeviceIds | None] = None
    """Devices of the teacher's engines, such as 4,5, or cpu."""
    dims: Free[Dims] = ""
    """Grid of each engine of vLLM on --teacher.devices, such as tp=2 (default: one device)."""
    top_k: Count = 20
    """Number of the teacher's likeliest tokens that an engine returns for --objective.divergence."""

    @property
    def has_server(self) -> bool:
        """Say whether a server that runs already reads the responses."""
        return self.engine is not None and self.engine.startswith(("http://", "https://"))


class EvaluationOptions(BaseModel):
    """Evaluations of the policy during the run."""

    model_config = CONFIG

    prompts: Free[Sources | None] = None
    """Evaluation prompts, in the form of --prompts; the policy does not learn from them."""
    every: Free[Count] = 20
    """Number of steps between evaluations; the first one is before step 1, the last one after the last step."""
    samples: Free[Count] = 1
    """Number of responses to each evaluation prompt; above 1, pass@k and maj@k are metrics."""
    temperature: Free[NotNegative] = 0.0
    """Sampling temperature of the evaluation (0: greedy)."""
    top_p: Free[Annotated[Number, Field(gt=0, le=1)]] = 1.0
    """Nucleus sampling of the evaluation."""
    keep_best: Free[bool] = False
    """Keep the policy with the highest evaluation reward in the folder `best` of --out."""
