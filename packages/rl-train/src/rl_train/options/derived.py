"""Derive the options of engines, optimizers and losses from the options of a run."""

from __future__ import annotations

import torch

from parallel_layers import ParallelDims
from parallel_layers.learning_rate import Schedule
from rl_models.engines import EngineOptions, MegatronOptions, PipelineOptions, RouterLosses
from rl_models.engines.optimizer import OptimizerOptions
from rl_train.loop.algorithms import Rules
from rl_train.options.options import TrainOptions
from rl_train.options.texts import numbers, parse_recompute


def engine_options(options: TrainOptions, grid: ParallelDims) -> EngineOptions:
    """Return the engine options of a model on the policy's grid, or on the critic's own grid.

    Raises:
        ValueError: An engine refuses a value.
    """
    if options.dtype == "float16" and options.backend != "megatron":
        raise ValueError(f"dtype={options.dtype!r} must be float32 or bfloat16, or float16 with backend=megatron")
    pipeline = PipelineOptions(
        options.pipeline_schedule,  # type: ignore[arg-type]  # checked there
        options.virtual_stages,
        None if options.pipeline_split is None else numbers("pipeline_split", options.pipeline_split),
    )
    # Options of the policy's grid may have no meaning on the critic's grid.
    own = grid == options.grid
    return EngineOptions(
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        sequence_parallel=options.sequence_parallel if own or grid.tp > 1 else None,
        pipeline=pipeline if own or grid.pp > 1 else PipelineOptions(),
        context_parallel=options.context_parallel,
        router_losses=RouterLosses(
            balance=options.router_balance, sequence_balance=options.router_sequence_balance, z=options.router_z
        ),
        recompute=parse_recompute(options.recompute),
        megatron=MegatronOptions(options.megatron_layers, options.distributed_optimizer),  # type: ignore[arg-type]
        keep_probabilities=options.keep_probabilities,
        tp_invariant=options.tp_invariant,
        deterministic=options.deterministic,
    )


def optimizer_options(options: TrainOptions, learning_rate: float) -> OptimizerOptions:
    """Return the optimizer of the policy or the critic; its schedule counts optimizer steps, the options count steps.

    Raises:
        ValueError: A value outside its range.
    """
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
    )


def loss_rules(options: TrainOptions) -> Rules:
    """Return the numbers that the advantages and the losses read: the given values, else the algorithm's values.

    Raises:
        ValueError: A name is unknown, or a number outside its range.
    """
    rule = options.rule
    return Rules(
        rule.surrogate,
        rule.clip_low if options.clip_low is None else options.clip_low,
        rule.clip_high if options.clip_high is None else options.clip_high,
        kl_in_loss=options.kl_coefficient if rule.kl == "loss" else 0.0,
        kl_in_reward=options.kl_coefficient if rule.kl == "reward" else 0.0,
        kl_estimator=options.kl_estimator or {"loss": "k3", "reward": "k1"}[rule.kl],
        entropy=options.entropy_coefficient,
        dual_clip=options.dual_clip,
        value_clip=options.value_clip or None,
        value_coefficient=options.value_coefficient,
        importance_cap=options.importance_cap,
        aggregation=options.aggregation or rule.aggregation,
        gamma=options.gamma,
        lam=options.lam,
    )
