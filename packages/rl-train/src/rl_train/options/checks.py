"""Check the options of a run together; `TrainOptions` checks each option by itself."""

from __future__ import annotations

from rl_train.options.derived import engine_options, loss_rules, optimizer_options
from rl_train.options.options import TrainOptions

OF_A_SEPARATE_CRITIC = ("critic", "critic_dims", "critic_learning_rate")
OF_A_SHARED_BACKBONE = ("value_coefficient",)


def check(options: TrainOptions) -> None:
    """Raise ValueError for options that do not go together, or that the engines, optimizers or losses refuse."""
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
            f"reference={options.reference} is the reference of the KL penalty, but "
            f"kl_coefficient={options.kl_coefficient} turns the penalty off; set a coefficient above 0 or leave the "
            "reference out"
        )
    for name in OF_A_SEPARATE_CRITIC if options.share_backbone else OF_A_SHARED_BACKBONE:
        if (value := getattr(options, name)) != TrainOptions.model_fields[name].default:
            raise ValueError(f"share_backbone={options.share_backbone} has no {name}={value}; leave one of them out")
    ranks, critics = options.grid.world_size, options.critic_grid.world_size
    if critics != ranks:
        raise ValueError(
            f"critic_dims={options.critic_dims} has {critics} ranks, but the critic shares those of the policy, the "
            f"{ranks} of dims={options.dims}"
        )
    # Building the derived options checks the rest.
    _ = options.stops, optimizer_options(options, 1.0), engine_options(options, options.grid), loss_rules(options)
