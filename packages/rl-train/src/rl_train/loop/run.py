"""Turn options into a run: check them, start the ranks or the Ray groups, and run the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from rl_models.engines import Role, offered
from rl_models.engines.positions import max_positions
from rl_models.engines.stored import stored_dtype
from rl_models.grid import Grid, checkpoint_folder
from rl_models.workers.actor import Actor, Policy
from rl_models.workers.actor_critic import ActorCritic
from rl_models.workers.critic import Critic
from rl_models.workers.whole_batches import WholeBatches, from_first
from rl_models.workers.worker import Worker
from rl_train.cluster.launch import Devices, prepare, run_on_ranks
from rl_train.cluster.resources import import_ray
from rl_train.cluster.slow_imports import slow_imports
from rl_train.data.prompts import Prompt, read_json, read_prompts, vocabulary_size
from rl_train.loop.folder import check_folder, saves_cleaned, write_options
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.turns import Turns
from rl_train.options.checks import check
from rl_train.options.derived import engine_options, loss_rules, optimizer_options
from rl_train.options.options import TrainOptions
from rl_train.planner.preflight import check_native_model
from rl_train.report import summary_writer
from rl_train.rewards.function import check_reward, load_reward

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run that has been checked.

    Attributes:
        options: The options as resolved.
        prompts, eval_prompts: Read from their files.
        stop_ids: The ids of tokens that end a response.
        positions: The model's number of positions; None if the config does not state it.
    """

    options: TrainOptions
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    stop_ids: tuple[int, ...]
    positions: int | None

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON values: every resolved option, and the values derived from the options."""
        options = self.options
        rule = options.rule
        rules = loss_rules(options)
        return options.to_json() | {
            "samples": options.responses,
            "stop_ids": list(self.stop_ids),
            "critic": self._critic(),
            "reference": str(options.reference or options.model) if options.kl_coefficient else None,
            "clip_low": rules.clip_low,
            "clip_high": rules.clip_high,
            "ranks": options.grid.world_size,
            "source": rule.source,
            "aggregation": rules.aggregation,
            "kl_estimator": rules.kl_estimator if options.kl_coefficient else None,
            "number_of_prompts": len(self.prompts),
            "number_of_eval_prompts": len(self.eval_prompts),
            "responses_per_step": options.batch,
            "updates_per_step": options.updates_per_step,
            "longest_sequence": max(len(prompt.tokens) for prompt in self.prompts) + options.max_new_tokens,
            "positions": self.positions,
            "passes_over_prompts": round(options.steps * options.prompts_per_step / len(self.prompts), 3),
        }

    def _critic(self) -> str | None:
        options = self.options
        if options.share_backbone:
            return f"a head on {options.model}"
        return str(options.critic or options.model) if options.rule.critic else None


def plan(options: TrainOptions) -> Plan:
    """Check the options against the files, the reward and the devices, and read the prompts.

    Raises:
        ValueError: An option does not fit; the error names the option.
    """
    check(options)
    check_folder(options)
    folder = Path(checkpoint_folder(options.model))
    for other in (options.critic, options.reference):
        if other is not None:
            checkpoint_folder(other)
    room = options.max_tokens - options.max_new_tokens
    limit = f"--max-tokens less --max-new-tokens, {options.max_tokens} - {options.max_new_tokens} ="
    positions = max_positions(folder)

    def read(file: Path) -> list[Prompt]:
        found = read_prompts(file, folder, room, limit=limit)
        _check_positions(file, found, positions)
        return found

    prompts = read(options.prompts)
    eval_prompts = [] if options.eval_prompts is None else read(options.eval_prompts)
    check_reward(options.reward)
    if options.tensorboard:
        summary_writer()
    if options.ray:
        import_ray()
    else:
        Devices.find(options.device).require(options.grid.world_size)
    _check_models(options, folder)
    stops = _end_of_text(folder) if options.stops is None else options.stops
    vocab_size = vocabulary_size(folder)
    if outside := [token for token in stops if not 0 <= token < vocab_size]:
        raise ValueError(f"stop_ids {outside} are outside the vocabulary of {vocab_size}")
    return Plan(options, prompts, eval_prompts, stops, positions)


def _check_positions(file: Path, prompts: list[Prompt], positions: int | None) -> None:
    for prompt in prompts:
        if positions is not None and len(prompt.tokens) > positions:
            raise ValueError(
                f"{file}, line {prompt.line}: {len(prompt.tokens)} tokens are more than the model's {positions} "
                "positions (max_position_embeddings in its config.json); shorten the prompt or take another model"
            )


def _check_models(options: TrainOptions, folder: Path) -> None:
    """Refuse a backend, a grid or a checkpoint that the ranks would refuse."""
    models: list[tuple[Role, Path, ParallelDims]] = [(_policy(options).role, folder, options.grid)]
    if options.separate_critic:
        models.append((Critic.role, options.critic or folder, options.critic_grid))
    for role, path, dims in models:
        offered(options.backend, role, Grid(dims, torch.device("cpu")))
        if options.backend == "parallel":
            check_native_model(path, role, dims, engine_options(options, dims), options.max_tokens)
            if options.dtype is None and stored_dtype(str(path)) == torch.float16:
                raise ValueError(f"{path} is stored in float16, which only backend=megatron trains; give a dtype")


def _policy(options: TrainOptions) -> type[Policy]:
    return ActorCritic if options.share_backbone else Actor


def _end_of_text(folder: Path) -> tuple[int, ...]:
    """Return the model's own end-of-text ids, from its generation config or its config.

    Raises:
        ValueError: A file is broken, or its eos_token_id holds no ids; the error names the file.
    """
    for file in (folder / name for name in ("generation_config.json", "config.json")):
        values = read_json(file) if file.is_file() else {}
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold an object, got {type(values).__name__}; mend it, or give stop_ids")
        ids = values.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(id) is int for id in ids):
                raise ValueError(f"{file}: eos_token_id must be ids of tokens, got {ids}; mend it, or give stop_ids")
            vocab_size = vocabulary_size(folder)
            return tuple(id for id in ids if 0 <= id < vocab_size)
    return ()


def train(planned: Plan, on_event: Callable[[Event], None] = lambda event: None) -> dict[str, float]:
    """Run all steps that are left, and return the metrics of the last step.

    `options.out` gets `options.json`, `metrics.jsonl`, `training/actor` (and `critic`) with the training checkpoints,
    and at the end `actor` (and `critic`), Hugging Face checkpoints. A run that was killed continues from its newest
    training checkpoint.

    Raises:
        RankFailed: A rank failed.
        ValueError: The reward or its module fails, or a backend does not offer the model. Or dynamic sampling finds
            nothing to learn from; the earlier steps are saved.
    """
    options = planned.options
    write_options(options)
    with saves_cleaned(options):
        return _on_ray(planned, on_event) if options.ray else _on_ranks(planned, on_event)


def _on_ranks(planned: Plan, on_event: Callable[[Event], None]) -> dict[str, float]:
    """Run the loop on ranks of this machine."""
    options = planned.options
    prepare(__name__, *slow_imports(options.grid, saves=options.save_every > 0))
    devices = Devices.find(options.device)
    ranks = options.grid.world_size
    result: dict[str, float] = run_on_ranks(
        _on_rank, ranks, planned, devices=devices, on_event=on_event, collective_timeout=options.collective_timeout
    )
    return result


# (class, checkpoint folder, arguments of `from_pretrained`) -> one model of a run.
Make = Callable[[type[Worker], Path, dict[str, Any]], Any]


def _models(options: TrainOptions, make: Make) -> Models:
    turns = Turns()

    def model(kind: type[Worker], path: Path, grid: ParallelDims, learning_rate: float) -> Any:
        arguments = {
            **vars(engine_options(options, grid)),
            "backend": options.backend,
            "dims": grid,
            "max_tokens_per_micro_batch": options.max_tokens,
            "optimizer": optimizer_options(options, learning_rate),
        }
        made = make(kind, path, arguments)
        return turns.add(made) if options.offload else made

    actor = model(_policy(options), options.model, options.grid, options.learning_rate)
    critic = reference = None
    if options.separate_critic:
        critic = model(Critic, options.critic or options.model, options.critic_grid, options.critic_learning_rate)
    if options.kl_coefficient:
        reference = model(Actor, options.reference or options.model, options.grid, 0.0)
    return Models(actor, critic, reference, options.share_backbone)


def _loop(planned: Plan, models: Models, **how: Any) -> Loop:
    return Loop(planned.options, planned.prompts, planned.eval_prompts, planned.stop_ids, models, **how)


def _on_rank(send: Callable[[Event], None], planned: Plan) -> dict[str, float]:
    """Run the loop on one of the ranks that all run it."""

    first = dist.get_rank() == 0
    # Loaded before the models, to report an error in the reward's module early.
    reward = load_reward(planned.options.reward) if first else None
    device = Devices.find(planned.options.device).current

    def make(kind: type[Worker], path: Path, arguments: dict[str, Any]) -> WholeBatches:
        return WholeBatches(kind.from_pretrained(path, device=device, **arguments))

    models = _models(planned.options, make)
    once = partial(from_first, group=models.actor.grid.everyone)
    tell = send if first else lambda event: None
    return _loop(planned, models, reward=reward, once=once, writes=first, tell=tell).run()


def _on_ray(planned: Plan, on_event: Callable[[Event], None]) -> dict[str, float]:
    """Run the loop in this process, with all models on the same devices of a Ray cluster."""
    from rl_train.cluster.group import RayModelGroup
    from rl_train.cluster.placement import Placement
    from rl_train.cluster.resources import Resources

    options = planned.options.model_copy(update={"out": planned.options.out.absolute()})
    planned = dataclasses.replace(planned, options=options)
    reward = load_reward(options.reward)
    count = 1 + options.separate_critic + (options.kl_coefficient > 0)
    with ExitStack() as stack:
        resources = Resources() if options.device is None else Resources(device=options.device)
        placement = stack.enter_context(Placement(options.grid.world_size, resources))

        def make(kind: type[Worker], path: Path, arguments: dict[str, Any]) -> RayModelGroup:
            dims = arguments.pop("dims")
            arguments |= {"wait": False, "collective_timeout": options.collective_timeout}
            group = RayModelGroup(kind, dims, path, resources=placement.share(1 / count), **arguments)
            return stack.enter_context(group)

        models = _models(options, make)
        return _loop(planned, models, reward=reward, once=lambda make: make(), writes=True, tell=on_event).run()
