"""Which values the options of a run may have, each by itself and together."""

from __future__ import annotations

import math

from rl_train.loop.algorithms import ALGORITHMS
from rl_train.options.derived import engine_options, loss_rules, optimizer_options
from rl_train.options.options import TrainOptions

# What is None has no bound: it means the default of something else.
AT_LEAST_ONE = (
    "collective_timeout",
    "steps",
    "prompts_per_step",
    "max_new_tokens",
    "epochs",
    "max_tokens",
    "eval_every",
    "keep",
    "samples",
    "mini_batch",
    "top_k",
)
NOT_NEGATIVE = (
    "save_every",
    "overlong_buffer",
    "kl_coefficient",
    "warmup_steps",
    "value_clip",
    "weight_decay",
    "router_balance",
    "router_sequence_balance",
    "router_z",
)
ABOVE_ZERO = ("learning_rate", "critic_learning_rate", "max_grad_norm", "adam_eps", "value_coefficient")
# A year; torch counts nanoseconds in 64 bits.
LONGEST_TIMEOUT = 365 * 24 * 3600
OF_A_SEPARATE_CRITIC = ("critic", "critic_dims", "critic_learning_rate")
OF_A_SHARED_BACKBONE = ("value_coefficient",)


def check(options: TrainOptions) -> None:
    """Raise ValueError for a value outside its range, or for values that do not go together."""
    if options.algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {options.algorithm!r} is unknown; known: {', '.join(ALGORITHMS)}")
    _check_ranges(options)
    if options.rule.groups and options.responses < 2:
        raise ValueError(
            f"{options.algorithm} compares the responses to a prompt; samples={options.samples} must be >= 2"
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
            f"reference={options.reference} is for the KL penalty, and kl_coefficient={options.kl_coefficient} has "
            "none; set a coefficient above 0 or leave the reference out"
        )
    for name in OF_A_SEPARATE_CRITIC if options.share_backbone else OF_A_SHARED_BACKBONE:
        if (value := getattr(options, name)) != getattr(TrainOptions, name):
            raise ValueError(f"share_backbone={options.share_backbone} has no {name}={value}; leave one of them out")
    ranks, critics = options.grid.world_size, options.critic_grid.world_size
    if critics != ranks:
        raise ValueError(
            f"critic_dims={options.critic_dims} has {critics} ranks, but the critic shares those of the policy, the "
            f"{ranks} of dims={options.dims}"
        )
    # What follows from the options checks the rest of them.
    _ = options.stops, optimizer_options(options, 1.0), engine_options(options, options.grid), loss_rules(options)


def _check_ranges(options: TrainOptions) -> None:
    for name, value in vars(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")
    for name in AT_LEAST_ONE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for name in NOT_NEGATIVE:
        if getattr(options, name) < 0:
            raise ValueError(f"{name}={getattr(options, name)} must not be negative")
    if options.collective_timeout > LONGEST_TIMEOUT:
        raise ValueError(f"collective_timeout={options.collective_timeout} must be at most {LONGEST_TIMEOUT}, a year")
    if not options.temperature > 0:
        raise ValueError(f"temperature={options.temperature} must be above 0: a greedy policy has nothing to explore")
    for name in ABOVE_ZERO:
        if not getattr(options, name) > 0:
            raise ValueError(f"{name}={getattr(options, name)} must be above 0")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"top_p={options.top_p} must lie in (0, 1]")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must lie in [0, 1)")
