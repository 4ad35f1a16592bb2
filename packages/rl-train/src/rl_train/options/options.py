"""The options of `rl-train train`, declared once for the command line, YAML and TOML files, and Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rl_train.environments.reasoning_gym import PREFIX
from rl_train.options.algorithms import ALGORITHMS, Algorithm
from rl_train.options.parsing import numbers

# `rl-train --help` imports this file, so the properties below import torch only when they are called.
if TYPE_CHECKING:
    from parallel_layers import ParallelDims

T = TypeVar("T")


class MayChange:
    """Mark an option that may change when a run is resumed."""


class Repeats:
    """Mark an option that may be given several times on the command line."""


def _as_text(value: Any) -> Any:
    """Return the text of a grid or of ids that a file gives as a mapping or a list, such as {tp: 2} or [2, 7]."""
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


def _as_number(value: Any) -> Any:
    """Return the number of a text: YAML reads 1e-5 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Free = Annotated[T, MayChange]
Text = Annotated[str, BeforeValidator(_as_text)]
Folder = Annotated[Path, Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_as_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]

# Help texts that several commands share.
DEVICE = "Device type: cpu, cuda or another accelerator that torch finds (default: an accelerator if there is one)."
TILED_MLP = "Compute each dense MLP in N tiles of tokens, each again in the backward (default: all tokens at once)."
OFFLOAD_ACTIVATIONS = "Keep activations in pinned host memory between forward and backward."
OFFLOAD_OPTIMIZER = "Keep moments and fp32 master weights in pinned host memory; a step streams them through the GPU."
RECOMPUTE = "Recompute to save memory: full, selective (MLPs and experts), or layers such as 0-3,9 (default: off)."

LONGEST_TIMEOUT = 365 * 24 * 3600  # one year in seconds: torch counts nanoseconds in 64 bits

# The panels of `--help`: the first option of each panel, and the panel's title.
PANELS = {
    "model": "What to train",
    "dims": "Grid, memory and numerics",
    "steps": "Generation",
    "epochs": "Learning",
    "eval_prompts": "Evaluation, checkpoints and logs",
}

# Options that have the algorithm's value where they are left out, and their default until then.
OF_THE_ALGORITHM = ["samples", "equal_groups", "advantages", "loss"]
OF_THE_ALGORITHM += ["clip_low", "clip_high", "aggregation", "kl_estimator"]
LEFT_OUT: Any = None


class TrainOptions(BaseModel):
    """All options of a training run; the text below an option is its help text.

    Each value is checked by itself; `rl_train.options.derived.check` checks them together.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: Folder
    """Checkpoint folder of the initial policy, or its name on a hub: organisation/name[@revision]."""
    prompts: Folder
    """Rows with "text", "messages" or "tokens": .jsonl, .csv, .parquet, a datasets folder, organisation/name:FILES."""
    environment: Text | None = None
    """Environment: reasoning_gym:TASK,option=number in place of --prompts, or module:class of several turns."""
    max_turns: Count = 8
    """Maximum number of responses in a conversation with an --environment of several turns."""
    columns: Text = ""
    """Fields that are taken from columns of other names, such as text=question,answer=solution."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """Prompts that do not fit the model or --max-tokens: refuse to run, or drop these prompts."""
    reward: Annotated[Text, Repeats]
    """Rewards: exact-match, number-match, math-verify, regex or module:function; with commas, as name=reward@weight."""
    reward_workers: Free[Count] = 1
    """Number of processes of each reward, and of the environment; each imports the module."""
    reward_timeout: Free[Positive] = 60.0
    """Seconds for each call of a reward, an environment or a tool; a call that takes longer is ended."""
    reward_errors: Free[Literal["stop", "zero"]] = "stop"
    """A reward that raises, takes too long or is no finite number: stop the run, or count as 0."""
    system_prompt: Text | None = None
    """First message of chats ("messages") that have no system message."""
    out: Free[Folder] = Path("run")
    """Folder for the metrics, the training checkpoints and the result."""
    accept_changes: Free[bool] = False
    """Resume a run although rows, models or modules of the user have changed since it began."""
    algorithm: Literal["ppo", "grpo", "rloo", "reinforce++", "gspo", "dapo"] = "grpo"
    """Algorithm: ppo, grpo, rloo, reinforce++, gspo or dapo."""
    critic: Folder | None = None
    """Checkpoint folder of the critic of ppo (default: the policy's folder)."""
    share_backbone: bool = False
    """Make the critic a head on the policy's layers and train both with one loss (backend parallel)."""
    reference: Folder | None = None
    """Checkpoint folder of the reference model of the KL penalty (default: the policy's folder)."""

    dims: Free[Text] = ""
    """Grid of ranks: sizes of dp, tp, pp, cp and ep, such as dp=2,tp=2 (default: one rank)."""
    critic_dims: Free[Text | None] = None
    """Grid of the critic, with as many ranks as the policy's grid (default: the policy's grid)."""
    backend: Free[Text] = "parallel"
    """Backend of the models: parallel, transformers or megatron."""
    ray: Free[bool] = False
    """Run on the Ray cluster at RAY_ADDRESS, or on a local one."""
    device: Free[Text | None] = Field(default=None, description=DEVICE)
    collective_timeout: Free[int] = Field(default=1800, ge=1, le=LONGEST_TIMEOUT)
    """Seconds that ranks wait for each other; all rewards of a step must end within this time."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights: float32, bfloat16, or float16 with backend megatron (default: as stored)."""
    max_tokens: Free[Count] = 16384
    """Maximum number of tokens in a micro-batch (one forward pass)."""
    recompute: Free[Text | None] = Field(default=None, description=RECOMPUTE)
    tiled_mlp: Free[Count | None] = Field(default=None, description=TILED_MLP)
    offload_activations: Free[bool] = Field(default=False, description=OFFLOAD_ACTIVATIONS)
    float8: Free[Literal["current", "block", "mxfp8"] | None] = None
    """FP8 recipe of the layers' GEMMs, by Transformer Engine: current, block or mxfp8 (default: off)."""
    share_prefixes: Free[bool] = False
    """Compute a prompt once for its responses in a micro-batch (not on megatron). With dp add --groups-on-one-rank."""
    offload: Free[bool] = False
    """Keep one model on the devices and offload the others to host memory."""
    groups_on_one_rank: Free[bool] = False
    """Score and learn from all responses to a prompt on one data-parallel rank, in the batch's field `group`."""
    sequence_parallel: Free[bool | None] = None
    """Shard the tokens over tp between the layers (default: on where tp > 1)."""
    context_parallel: Free[Literal["ulysses", "ring"]] = "ulysses"
    """Attention algorithm where cp > 1: ulysses or ring."""
    pipeline_schedule: Free[Text] = "1f1b"
    """Pipeline schedule where pp > 1: 1f1b or zero-bubble."""
    virtual_stages: Free[int] = 1
    """Number of model chunks on each rank of a pipeline."""
    pipeline_split: Free[Text | None] = None
    """Number of layers in each pipeline chunk, such as 3,5 (default: by the layers' cost)."""
    keep_probabilities: Free[bool] = True
    """Keep the head's probabilities for the backward where memory is free: one GEMM less, [T, V/tp] more memory."""
    mtp_loss_scaling_factor: Free[float] = Field(default=0.0, ge=0)
    """Weight of the loss that trains the policy's multi-token-prediction layers (0: keep them as they are)."""
    tp_invariant: Free[bool] = False
    """Compute log-probs with the same bits at every tp and in every batch."""
    deterministic: Free[bool] = False
    """Compute the same bits in every run on the same grid."""
    megatron_layers: Free[Text] = "local"
    """Layer implementation of backend megatron: local or transformer_engine."""
    distributed_optimizer: Free[bool] = True
    """Shard the optimizer state over dp x cp (backend megatron)."""
    lora_rank: CountOrZero = 0
    """Rank of low-rank adapters (LoRA), which alone are trained; the base is the reference (0: train all weights)."""
    lora_alpha: Positive = 32.0
    """Scale of the adapters: their term is multiplied by alpha / rank."""
    lora_targets: Text = "all-linear"
    """Adapted layers: all-linear, names such as q_proj,v_proj, or a regular expression for whole names."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout of the adapters' input while learning."""
    lora_shared_experts: bool = False
    """Let the experts of a layer share gate_up's A and down's B (adapters of routed experts)."""
    base_format: Literal["fp8"] | None = None
    """Format of the frozen projections under adapters: fp8, in blocks of 128 x 128 (default: as --dtype)."""
    router_balance: NotNegative = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts."""
    router_sequence_balance: NotNegative = 0.0
    """Coefficient of the load-balancing loss within each sequence (mixture of experts)."""
    router_z: NotNegative = 0.0
    """Coefficient of the routers' z-loss (mixture of experts)."""
    router_replay: bool = False
    """Route tokens to the experts that computed the old log-probs (mixture of experts)."""

    steps: Free[Count] = 100
    """Number of steps; each step generates, scores and learns."""
    prompts_per_step: Count = 64
    """Number of prompts in a step."""
    samples: Count = LEFT_OUT
    """Number of responses to each prompt (default: the algorithm's number)."""
    equal_groups: Literal["keep", "drop", "resample"] = LEFT_OUT
    """Prompts whose responses all have the same score: keep, drop, or resample others (default: the algorithm's)."""
    max_batches: Count = 10
    """Maximum number of batches that a step draws with --equal-groups resample."""
    max_new_tokens: Count = 256
    """Maximum number of tokens in a response, or in a conversation after its prompt."""
    temperature: Positive = 1.0
    """Sampling temperature; the logits are divided by it."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens (default: all tokens)."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the likeliest tokens that together have this probability."""
    keep_sampling_mask: bool = False
    """Normalise log-probs over the tokens that --top-k and --top-p kept; needs --top-k."""
    stop_ids: Text | None = None
    """Token ids that end a response, such as 2,7 (default: the model's end-of-text ids)."""
    max_sequences: Free[Count] = 512
    """Maximum number of responses that a rank draws at a time; the others wait."""
    cache_gib: Free[Positive | None] = None
    """Memory of the KV cache on a rank, in GiB (default: 80 % of a GPU's free memory)."""
    rollouts: Free[Text] = "native"
    """Engine that generates: native (the policy itself), vllm (needs vLLM), or a custom module:function."""
    rollout_memory: Free[Annotated[Number, Field(gt=0, lt=1)]] = 0.4
    """Share of a device's memory that vLLM takes while it generates (CPU: see VLLM_CPU_KVCACHE_SPACE)."""
    rollout_devices: Free[Text | None] = None
    """Separate devices of vLLM, such as 4,5, or cpu; with --ray their number (default: the policy's devices)."""
    rollout_quantization: Free[Literal["fp8"] | None] = None
    """Hold vLLM's weights in FP8, in blocks of 128 x 128 (default: in --dtype)."""
    rollout_adapter: Free[bool] = False
    """Send vLLM only the adapters (--lora-rank), which it applies itself (default: merged weights)."""
    staleness: CountOrZero = 0
    """Draw responses up to N steps ahead, with weights that are up to N versions old (0: with the newest)."""
    seed: int = 0
    """Seed of the order of the prompts and of sampling."""

    epochs: Count = 1
    """Number of passes over the responses of a step."""
    mini_batch: Count | None = None
    """Number of responses in one optimizer step (default: all responses of the step)."""
    learning_rate: Positive = 1e-6
    """Learning rate of the policy."""
    critic_learning_rate: Positive = 1e-5
    """Learning rate of the critic."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer: adamw, or muon for the weight matrices of the layers and AdamW for the rest."""
    moments: Free[Literal["float32", "bfloat16", "int8"]] = "float32"
    """Storage of the optimizer's moments: float32, bfloat16 or int8; the last two are rounded stochastically."""
    offload_optimizer: Free[bool] = Field(default=False, description=OFFLOAD_OPTIMIZER)
    beta1: Number = Field(default=0.9, ge=0, lt=1)
    """AdamW's beta1, the decay of the mean gradient."""
    beta2: Number = Field(default=0.999, ge=0, lt=1)
    """AdamW's beta2, the decay of the mean squared gradient."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon, in the denominator."""
    weight_decay: NotNegative = 0.0
    """Weight decay, applied to matrices only."""
    max_grad_norm: Positive = 1.0
    """Scale gradients of a larger norm down to this norm."""
    schedule: Text = "constant"
    """Learning rate over time: constant, linear, cosine, wsd or inverse-sqrt."""
    warmup_steps: CountOrZero = 0
    """Number of steps in which the learning rate rises to its full value."""
    decay_steps: int | None = None
    """Number of steps of the final decay (schedule wsd)."""
    min_ratio: Number = 0.0
    """Final learning rate, as a fraction of the full learning rate."""
    advantages: Text = LEFT_OUT
    """Advantages: gae, group-relative, leave-one-out, returns, or module:function (default: the algorithm's)."""
    loss: Text = LEFT_OUT
    """Loss of the policy: ppo, gspo, or a custom module:function (default: the algorithm's loss)."""
    clip_low: NotNegative = LEFT_OUT
    """Clip the policy's ratio below 1 - clip_low (default: the algorithm's value)."""
    clip_high: NotNegative = LEFT_OUT
    """Clip the policy's ratio above 1 + clip_high (default: the algorithm's value)."""
    dual_clip: Annotated[Number, Field(gt=1)] | None = None
    """Dual clip: cap the loss at this ratio where the advantage is negative (default: off)."""
    value_clip: NotNegative = 0.2
    """Clip the critic's values to this distance from the old values (0: off)."""
    value_coefficient: Positive = 0.5
    """Coefficient of the critic's loss in the joint loss (--share-backbone)."""
    importance_cap: Positive | None = None
    """Importance sampling: weight tokens by p_train / p_rollout, at most this number (default: off)."""
    importance_bound: Literal["truncate", "mask"] = "truncate"
    """Truncate ratios above --importance-cap (TIS), or mask: learn nothing from such tokens (MIS)."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio p_train / p_rollout of a token, of a sequence (their product), or geometric (their geometric mean)."""
    importance_floor: NotNegative = 0.0
    """Mask ratios below this number, too (with --importance-bound mask)."""
    importance_veto: Fraction = 0.0
    """Reject responses with a token whose ratio p_train / p_rollout is below this number (0: off)."""
    aggregation: Literal["token-mean", "sequence-mean"] = LEFT_OUT
    """Average of the loss: token-mean or sequence-mean (default: the algorithm's average)."""
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
    overlong_buffer: CountOrZero = 0
    """Overlong penalty (DAPO): lower the score linearly by up to 1 over the last N tokens (0: off)."""

    eval_prompts: Free[Folder | None] = None
    """Evaluation prompts, in the form of --prompts; the policy does not learn from them."""
    eval_every: Free[Count] = 20
    """Number of steps between evaluations; the first one is before step 1, the last one after the last step."""
    eval_samples: Free[Count] = 1
    """Number of responses to each evaluation prompt; above 1, pass@k and maj@k are metrics."""
    eval_temperature: Free[NotNegative] = 0.0
    """Sampling temperature of the evaluation (0: greedy)."""
    eval_top_p: Free[Annotated[Number, Field(gt=0, le=1)]] = 1.0
    """Nucleus sampling of the evaluation."""
    keep_best: Free[bool] = False
    """Keep the policy with the highest evaluation reward in the folder `best` of --out."""
    save_every: Free[CountOrZero] = 20
    """Number of steps between training checkpoints (0: no checkpoints)."""
    keep: Free[Count] = 2
    """Number of newest training checkpoints to keep."""
    show_every: Free[CountOrZero] = 10
    """Number of steps between samples on the screen and in the loggers (0: none)."""
    logger: Free[Annotated[Text, Repeats]] = ""
    """Loggers beside metrics.jsonl: tensorboard, wandb, trackio, mlflow (each installed by pip) or module:Class."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Give the algorithm's values, and the environment's prompts and reward, to options that are left out."""
        if (environment := values.get("environment")) is not None:
            source = {"prompts": str(_as_text(environment)), "reward": "reasoning-gym"}
            if not source["prompts"].startswith(PREFIX):
                source = {"reward": "environment"}
            values = values | {name: value for name, value in source.items() if values.get(name) is None}
        rule = ALGORITHMS.get(str(values.get("algorithm", cls.model_fields["algorithm"].default)))
        left_out = [name for name in OF_THE_ALGORITHM if values.get(name) is None]
        return values if rule is None else values | {name: getattr(rule, name) for name in left_out}

    @property
    def rule(self) -> Algorithm:
        """Return the row of the algorithm."""
        return ALGORITHMS[self.algorithm]

    @property
    def converses(self) -> bool:
        """Say whether the environment has several turns."""
        return self.environment is not None and not self.environment.startswith(PREFIX)

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
        """Say whether the critic is a separate model."""
        return self.rule.critic and not self.share_backbone

    @property
    def batch(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts_per_step * self.samples

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer steps of a step."""
        return self.epochs * -(-self.batch // (self.mini_batch or self.batch))

    @property
    def engine_devices(self) -> list[str] | None:
        """Return the ids of the devices of vLLM, as in CUDA_VISIBLE_DEVICES; None: it shares the policy's devices."""
        devices = self.rollout_devices
        return None if devices is None else [device.strip().replace("cpu", "") for device in devices.split(",")]

    @property
    def stops(self) -> tuple[int, ...] | None:
        """Return the ids of tokens that end a response; None stands for the model's own ids."""
        return None if self.stop_ids is None else numbers("stop_ids", self.stop_ids)

    def to_json(self) -> dict[str, Any]:
        """Return all options as JSON values."""
        return self.model_dump(mode="json")
