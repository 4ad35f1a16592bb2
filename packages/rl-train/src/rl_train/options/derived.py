"""Check the options of a run together, and derive the options of its engines and optimizers."""

from __future__ import annotations

import re

import torch

from parallel_layers import ParallelDims
from parallel_layers.model import ALL_LINEAR, LoraOptions
from parallel_layers.training import Schedule
from parallel_models import CacheOptions, Role
from rl_models import MegatronOptions, OptimizerOptions, PipelineOptions, RouterLosses
from rl_models.backends import BackendOptions
from rl_train.environments.reasoning_gym import PREFIX
from rl_train.options.algorithms import ALGORITHMS
from rl_train.options.options import TrainOptions
from rl_train.options.parsing import numbers, parse_recompute

OF_A_SEPARATE_CRITIC = ("critic", "critic_dims", "critic_learning_rate")
OF_A_SHARED_BACKBONE = ("value_coefficient",)
OF_ADAPTERS = ("lora_alpha", "lora_targets", "lora_dropout", "lora_shared_experts", "base_format")
OF_IMPORTANCE_SAMPLING = ("importance_bound", "importance_level", "importance_floor", "importance_veto")

OF_EVALUATION = ("eval_samples", "eval_temperature", "eval_top_p", "keep_best")


def check(options: TrainOptions) -> None:
    """Raise ValueError for options that exclude each other, or that the engines or optimizers refuse."""
    if options.rule.groups and options.samples < 2:
        raise ValueError(
            f"{options.algorithm} compares the responses to a prompt; samples={options.samples} must be >= 2"
        )
    if (environment := options.environment) is not None:
        if options.converses and not re.fullmatch(r"[\w.]+:\w+", environment):
            raise ValueError(
                f"environment={environment!r} must be {PREFIX}TASK, such as {PREFIX}chain_sum, or "
                "module:class, such as games:Wordle"
            )
        if not options.converses and str(options.prompts) != environment:
            raise ValueError(
                f"prompts={options.prompts} and environment={environment} both state the prompts; leave one of them out"
            )
    if not options.converses and options.max_turns != TrainOptions.model_fields["max_turns"].default:
        raise ValueError(
            f"max_turns={options.max_turns} needs an environment of several turns; give one, or leave max_turns out"
        )
    if options.overlong_buffer > options.max_new_tokens:
        raise ValueError(
            f"overlong_buffer={options.overlong_buffer} is more than max_new_tokens={options.max_new_tokens}"
        )
    for name in ("critic", "critic_dims", "share_backbone"):
        if getattr(options, name) not in (None, False) and not options.rule.critic:
            raise ValueError(
                f"{options.algorithm} has no critic; leave {name}={getattr(options, name)} out, or use ppo"
            )
    if options.reference is not None and not options.kl_coefficient:
        raise ValueError(
            f"reference={options.reference} is the reference of the KL penalty, but "
            f"kl_coefficient={options.kl_coefficient} turns the penalty off; set a coefficient above 0 or leave the "
            "reference out"
        )
    if options.kl_coefficient and options.rule.kl == "loss" and options.kl_estimator == "k1":
        raise ValueError("kl_estimator='k1' has no gradient on average, so a loss needs k2 or k3")
    like = (options.rule.critic, options.rule.groups)
    fitting = sorted({row.advantages for row in ALGORITHMS.values() if (row.critic, row.groups) == like})
    if ":" not in options.advantages and options.advantages not in fitting:
        raise ValueError(
            f"advantages={options.advantages!r} must be {' or '.join(fitting)} with algorithm={options.algorithm}, or "
            "module:function, such as own:advantages"
        )
    if options.equal_groups != "keep" and not options.rule.groups:
        raise ValueError(
            f"{options.algorithm} does not compare the responses to a prompt; leave "
            f"equal_groups={options.equal_groups} out"
        )
    if options.dual_clip is not None and options.loss != "ppo":
        raise ValueError(f"dual_clip={options.dual_clip} needs loss=ppo, not {options.loss}")
    for name in OF_A_SEPARATE_CRITIC if options.share_backbone else OF_A_SHARED_BACKBONE:
        if (value := getattr(options, name)) != TrainOptions.model_fields[name].default:
            raise ValueError(f"share_backbone={options.share_backbone} has no {name}={value}; leave one of them out")
    for name in () if options.importance_cap is not None else OF_IMPORTANCE_SAMPLING:
        if (value := getattr(options, name)) != TrainOptions.model_fields[name].default:
            raise ValueError(f"{name}={value} needs an importance_cap; give the cap, or leave {name} out")
    for name in () if options.lora_rank else OF_ADAPTERS:
        if (value := getattr(options, name)) != TrainOptions.model_fields[name].default:
            raise ValueError(f"{name}={value} needs a lora_rank of at least 1; give the rank, or leave {name} out")
    for name in () if options.eval_prompts is not None else OF_EVALUATION:
        if (value := getattr(options, name)) != TrainOptions.model_fields[name].default:
            raise ValueError(f"{name}={value} needs eval_prompts; give them, or leave {name} out")
    if options.eval_samples > 1 and not options.eval_temperature:
        raise ValueError(
            f"eval_samples={options.eval_samples} responses to a prompt are equal at eval_temperature=0; give a "
            "temperature, such as 1"
        )
    if options.importance_floor and (
        options.importance_bound == "truncate" or options.importance_floor > (options.importance_cap or 0)
    ):
        raise ValueError(
            f"importance_floor={options.importance_floor} needs importance_bound=mask and an importance_cap that is no "
            f"smaller, not {options.importance_bound} and {options.importance_cap}"
        )
    if options.keep_sampling_mask and (options.top_k is None or options.tp_invariant):
        raise ValueError(
            f"keep_sampling_mask needs top_k and does not go with tp_invariant; top_k={options.top_k} and "
            f"tp_invariant={options.tp_invariant}"
        )
    if options.rollouts != "vllm" and options.rollout_devices is not None:
        raise ValueError(f"rollout_devices={options.rollout_devices} needs rollouts=vllm; leave one of them out")
    devices = options.rollout_devices
    if options.ray and devices is not None and not (devices.isdecimal() and int(devices)):
        raise ValueError(f"rollout_devices={devices} must be the number of vLLM's devices with ray, such as 2")
    if options.rollouts == "vllm" and options.staleness and options.rollout_devices is None:
        raise ValueError(
            f"staleness={options.staleness} has vLLM draw while the models learn, which needs memory for both; give "
            "vLLM separate rollout_devices, or leave staleness out"
        )
    if options.rollout_adapter and (not options.lora_rank or options.rollouts != "vllm"):
        raise ValueError("rollout_adapter needs a lora_rank and rollouts=vllm; leave it out")
    if options.rollout_quantization and (options.rollouts != "vllm" or options.rollout_adapter):
        raise ValueError(
            f"rollout_quantization={options.rollout_quantization} needs rollouts=vllm without rollout_adapter, because "
            "it sends all weights; leave one of them out"
        )
    if options.rollouts != "native" and options.offload:
        raise ValueError(
            f"rollouts={options.rollouts} streams the policy's weights from the devices; leave offload out"
        )
    if options.schedule not in ("constant", "inverse-sqrt") and options.warmup_steps >= options.steps:
        raise ValueError(
            f"warmup_steps={options.warmup_steps} must be fewer than steps={options.steps} with "
            f"schedule={options.schedule}"
        )
    ranks, critics = options.grid.world_size, options.critic_grid.world_size
    if critics != ranks:
        raise ValueError(
            f"critic_dims={options.critic_dims} has {critics} ranks, but the critic shares the policy's ranks, the "
            f"{ranks} of dims={options.dims}"
        )
    # Building the derived options checks the rest.
    _ = options.stops, optimizer_options(options, 1.0), engine_options(options, options.grid)


def engine_options(options: TrainOptions, grid: ParallelDims, role: Role = "causal_lm") -> BackendOptions:
    """Return the engine options of a model in a role, on the policy's grid or on the critic's own grid."""
    if options.dtype == "float16" and options.backend != "megatron":
        raise ValueError(f"dtype={options.dtype!r} must be float32 or bfloat16, or float16 with backend=megatron")
    pipeline = PipelineOptions(
        options.pipeline_schedule,  # type: ignore[arg-type]  # checked there
        options.virtual_stages,
        None if options.pipeline_split is None else numbers("pipeline_split", options.pipeline_split),
    )
    # Options of the policy's grid may be invalid on the critic's grid.
    is_policy_grid = grid == options.grid
    return BackendOptions(
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        sequence_parallel=options.sequence_parallel if is_policy_grid or grid.tp > 1 else None,
        pipeline=pipeline if is_policy_grid or grid.pp > 1 else PipelineOptions(),
        context_parallel=options.context_parallel,
        router_losses=RouterLosses(
            balance=options.router_balance, sequence_balance=options.router_sequence_balance, z=options.router_z
        ),
        recompute=parse_recompute(options.recompute),
        tiled_mlp=options.tiled_mlp,
        offload_activations=options.offload_activations,
        float8=options.float8,
        share_prefixes=options.share_prefixes,
        megatron=MegatronOptions(options.megatron_layers, options.distributed_optimizer),  # type: ignore[arg-type]
        keep_probabilities="auto" if options.keep_probabilities else False,
        mtp_loss_scaling_factor=0.0 if role == "value" else options.mtp_loss_scaling_factor,
        tp_invariant=options.tp_invariant,
        deterministic=options.deterministic,
        lora=lora_options(options),
        base_format=options.base_format,
    )


def lora_targets(text: str) -> str | list[str]:
    """Return the targets of adapters as a command line has them: "all-linear", names or an expression."""
    names = re.fullmatch(r"[\w.-]+(,[\w.-]+)*", text) is not None and text != ALL_LINEAR
    return text.split(",") if names else text


def planned_adapters(rank: int, targets: str, shared_experts: bool) -> LoraOptions | None:
    """Return the adapters of `rl-train plan`; None without a rank.

    Raises:
        ValueError: Options of adapters come without a rank.
    """
    if rank:
        return LoraOptions(rank, targets=lora_targets(targets), shared_experts=shared_experts)
    if targets != ALL_LINEAR or shared_experts:
        raise ValueError("--lora-targets and --lora-shared-experts need --lora-rank, the rank of the adapters")
    return None


def lora_options(options: TrainOptions) -> LoraOptions | None:
    """Return the options of the adapters of the policy and the critic; None: all weights are trained."""
    if not options.lora_rank:
        return None
    return LoraOptions(
        options.lora_rank,
        options.lora_alpha,
        lora_targets(options.lora_targets),
        options.lora_dropout,
        seed=options.seed,
        shared_experts=options.lora_shared_experts,
    )


def cache_options(options: TrainOptions, longest: int, eval_prompts: int) -> CacheOptions:
    """Return the cache of a rank that draws the responses of a step, of `longest` tokens, or of the evaluation."""
    grid = options.grid
    data_ranks, multiple = grid.dp * grid.cp, grid.tp * grid.cp
    eval_responses = -(-eval_prompts // data_ranks) * options.eval_samples
    max_responses = max(-(-options.prompts_per_step // data_ranks) * options.samples, eval_responses)
    # tp and cp divide the sequences of a forward pass.
    sequences = -(-min(max_responses, options.max_sequences) // multiple) * multiple
    return CacheOptions(sequences, longest, options.cache_gib)


def optimizer_options(options: TrainOptions, learning_rate: float) -> OptimizerOptions:
    """Return the optimizer of the policy or the critic; its schedule counts optimizer steps, not steps of the run."""
    every = options.updates_per_step
    schedule = Schedule(
        options.schedule,
        warmup_steps=options.warmup_steps * every,
        total_steps=None if options.schedule in ("constant", "inverse-sqrt") else options.steps * every,
        decay_steps=None if options.decay_steps is None else options.decay_steps * every,
        min_ratio=options.min_ratio,
    )
    return OptimizerOptions(
        learning_rate,
        (options.beta1, options.beta2),
        options.adam_eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        schedule=schedule,
        algorithm=options.optimizer,
        moments=options.moments,
        offload=options.offload_optimizer,
    )
