"""Start the ranks or the Ray groups of a run that has been checked, and run the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import ckpt
from ckpt import Checkpoint
from parallel_layers import ParallelDims
from rl_models import Actor, Critic, Policy
from rl_models.api import WholeBatches, Worker
from rl_models.backends import BACKENDS
from rl_train.cluster.launch import Devices
from rl_train.data.prompts import vocabulary_size
from rl_train.engines.custom_engine import make_engine
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_on_ray import EngineOnRay
from rl_train.engines.interface import LocalEngine, ReadingEngine, RolloutEngine
from rl_train.engines.native import NativeEngine
from rl_train.engines.native_ranks import native_engine
from rl_train.engines.process import device_groups, processes
from rl_train.engines.reading_server import ReadingServer
from rl_train.engines.separate import SeparateEngine
from rl_train.engines.teacher_engine import NativeReader, ReadingProcesses, TeacherEngine
from rl_train.engines.vllm import Vllm
from rl_train.engines.vllm_engine import VllmEngine, adapters_of
from rl_train.engines.vllm_server import VllmServer
from rl_train.loop.checked_models import dtype_message, with_dtype
from rl_train.loop.checked_run import CheckedRun, policy_kind
from rl_train.loop.judging import FROZEN, judging_models
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.recipe_run import LocalRank, Make, ModelMaker, on_ranks, run_recipe
from rl_train.loop.reinforcement import Reinforcement
from rl_train.loop.throughput import Throughput
from rl_train.options.fields import device_ids
from rl_train.options.nested import plain
from rl_train.options.options import TrainOptions
from rl_train.report.terminal import Counts
from rl_train.rewards.function import Rewards, folders_of_judges
from rl_train.weight_sync.buckets import WeightFormat

Event = Mapping[str, Any]


def train(checked_run: CheckedRun, on_event: Callable[[Event], None] = lambda event: None) -> dict[str, float]:
    """Run all steps that are left, and return the metrics of the last step.

    `options.out` gets `options.json`, `metrics.jsonl`, `report.html`, `training/actor` (and `critic`) with the training
    checkpoints, and at the end `actor` (and `critic`), Hugging Face checkpoints. A run that was killed continues from
    its newest training checkpoint.

    Raises:
        RankFailed: A rank failed.
        ValueError: Another process runs in the folder, the reward or its module fails, or a backend does not offer the
            model. Or dynamic sampling finds nothing to learn from; the earlier steps are saved.
    """
    return run_recipe(checked_run, on_event, _run)


def train_in_place(checked_run: CheckedRun, on_event: Callable[[Event], None]) -> dict[str, float]:
    """Train as `train` does, in a folder that the caller has locked."""
    return run_recipe(checked_run, on_event, _run, lock=False)


def _run(checked_run: CheckedRun, on_event: Callable[[Event], None]) -> dict[str, float]:
    if checked_run.options.ray:
        return _on_ray(checked_run, on_event)
    return on_ranks(checked_run, on_event, work=_on_rank)


def _models(options: TrainOptions, make: Make, throughput: Throughput | None = None) -> Models:
    model = ModelMaker(options, make, throughput)
    actor = model(policy_kind(options), options.model, options.grid, options.optimizer.learning_rate)
    critic = reference = None
    if options.separate_critic:
        critic = model(Critic, options.critic.model or options.model, options.critic_grid, options.critic.learning_rate)
    if options.separate_reference:
        reference = model(
            Actor, options.reference or options.model, options.grid_of(options.reference_dims), 0.0, **FROZEN
        )
    if options.objective.divergence is not None and options.teacher.engine is None:
        actor.load_teacher_head(options.reference or options.model)
    return Models(actor, critic, reference, judges=judging_models(options, model, actor, reference))


def _teacher(checked_run: CheckedRun) -> ReadingEngine:
    """Return the engine of the teacher."""
    options, teacher, timeout = checked_run.options, checked_run.options.teacher, checked_run.options.collective_timeout
    if teacher.has_server:
        return ReadingServer(str(teacher.engine), vocabulary_size(options.model), timeout=timeout)
    dims, folder = ParallelDims.parse(teacher.dims), str(options.reference)
    make: Callable[[], ReadingEngine]
    if teacher.engine == "vllm":
        longest, dtype = checked_run.longest_of_teacher + 1, plain(options.engine.dtype)
        make = partial(Vllm, folder, dims=dims, memory=options.rollouts.memory, dtype=dtype, max_model_len=longest)
    else:
        make = partial(NativeReader, folder, dtype=options.engine.dtype, max_tokens=options.max_tokens)
    devices = device_groups(device_ids(teacher.devices) or [], dims)
    return ReadingProcesses(processes(make, devices, timeout=timeout))


def _in_process(actor: Policy, options: TrainOptions) -> RolloutEngine:
    """Return the engine of a run without engines of ours beside it: the policy itself, or the user's engine."""
    if options.rollouts.engine == "native":
        # Nothing else needs the devices between two turns of a conversation, or two parts of a response.
        keep_cache = options.converses or options.runs_agents or options.rollouts.partial > 0
        return NativeEngine(actor, keep_cache=keep_cache, **_native_options(options))
    return make_engine(options.rollouts.engine, actor, options)


def _on_rank(rank: LocalRank[CheckedRun]) -> dict[str, float]:
    """Run the recipe on one of the ranks that all run it."""
    checked_run, stack, tell = rank.checked_run, rank.stack, rank.tell
    # Start the rewards before the models, to report an error in a reward's module early.
    rewards = rewards_of(rank)
    tell({"phase": "loading"})

    def make(kind: type[Worker], path: Path, arguments: dict[str, Any]) -> WholeBatches:
        if kind is Critic and _shares_base(checked_run.options):
            names_of_critic = ("lora", "optimizer", "max_tokens_per_micro_batch")
            critic = Critic.sharing_base(rank.workers[0], **{name: arguments[name] for name in names_of_critic})
            return rank.add(critic)
        return rank.make(kind, path, arguments)

    models = _models(checked_run.options, make, rank.throughput)
    if checked_run.options.teacher.engine is not None:
        tell({"phase": "starting the teacher"})
        teacher = TeacherEngine(partial(_teacher, checked_run), rank.workers[0].grid.everyone)
        models = dataclasses.replace(models, teacher=stack.enter_context(closing(teacher)))
    tell({"phase": "starting the rollouts"})
    rollouts = stack.enter_context(closing(rollouts_of(checked_run, models.actor)))
    return rank.run(Reinforcement(rank.once, tell, rank.first, checked_run, models, rollouts, rewards))


def rewards_of(rank: LocalRank[CheckedRun]) -> Rewards | None:
    """Start the rewards of a run on the first rank; None on others."""
    if not rank.first:
        return None
    rewards = rank.stack.enter_context(closing(Rewards(rank.checked_run.options)))
    rewards.progress = rank.counts
    return rewards


def _shares_base(options: TrainOptions) -> bool:
    """Say whether the critic trains adapters on the policy's frozen base."""
    has_separate_critic = options.critic.model is not None or options.critic.dims is not None
    if options.lora is None or has_separate_critic or options.offload or options.backend not in BACKENDS:
        return False
    return not ckpt.layout_for(options.model).family.tower


def rollouts_of(checked_run: CheckedRun, actor: Policy) -> RolloutEngine:
    """Return the engine of a run on ranks of this machine."""
    options = checked_run.options
    if options.rollouts.has_server:
        start = partial(
            VllmServer,
            options.rollouts.engine,
            options.out.absolute() / "weights-for-server",
            timeout=options.collective_timeout,
            max_sequences=options.rollouts.max_sequences,
        )
        weight_format = dataclasses.replace(WeightFormat.of_weights(options.model), starts_empty=True)
        return EngineOnRanks(actor, options.model, start, ranks=[0], weight_format=weight_format)
    if options.rollouts.engine != "vllm" and options.engine_devices is None:
        return _in_process(actor, options)
    settings: dict[str, Any] = {
        "devices": options.engine_devices,
        "dims": ParallelDims.parse(options.rollouts.dims),
        "timeout": options.collective_timeout,
        "in_flight": options.rollouts.in_flight,
        **_engine_options(checked_run),
    }
    if options.rollouts.engine == "vllm":
        lora = options.lora if options.rollouts.adapter else None
        return VllmEngine(actor, options.model, lora=lora, **settings)
    return SeparateEngine(actor, options.model, changed_only=options.rollouts.changed_weights, **settings)


def _native_options(options: TrainOptions) -> dict[str, Any]:
    rollouts = options.rollouts
    return {
        "float8": rollouts.quantization is not None,
        "float8_cache": rollouts.float8_cache,
        "drafts": rollouts.drafts,
        "experts": rollouts.experts,
        "max_sequences": rollouts.max_sequences,
        "cache_gib": rollouts.cache_gib,
    }


def _engine_options(checked_run: CheckedRun) -> dict[str, Any]:
    """Return the options of an engine beside the policy: of `Vllm`, or of `Native`."""
    options, rollouts, longest = checked_run.options, checked_run.options.rollouts, checked_run.longest
    if rollouts.engine != "vllm":
        further = {"dtype": options.engine.dtype, "max_length": longest, "stale_cache": rollouts.stale_cache}
        return _native_options(options) | further | {"tp_invariant": options.engine.tp_invariant}
    return {
        "memory": rollouts.memory,
        "dtype": plain(options.engine.dtype),
        "quantization": rollouts.quantization,
        "stale_cache": rollouts.stale_cache,
        "routing": rollouts.routing,
        "max_num_seqs": rollouts.max_sequences,
        "kv_cache_memory_bytes": None if rollouts.cache_gib is None else int(rollouts.cache_gib * 2**30),
        "max_model_len": min(longest, checked_run.positions or longest),
    }


def _on_ray(checked_run: CheckedRun, on_event: Callable[[Event], None]) -> dict[str, float]:
    """Run the loop in this process, with all models on the same devices of a Ray cluster.

    vLLM has a share of these devices, or separate devices.
    """
    from rl_train.cluster.group import RayModelGroup
    from rl_train.cluster.placement import Placement
    from rl_train.cluster.resources import Resources

    options = checked_run.options.model_copy(update={"out": checked_run.options.out.absolute()})
    checked_run = dataclasses.replace(checked_run, options=options)
    shares_devices = options.rollouts.engine == "vllm" and options.rollouts.devices is None
    count = (
        1
        + options.separate_critic
        + options.separate_reference
        + shares_devices
        + len(folders_of_judges(options.reward))
    )
    with ExitStack() as stack:
        rewards = stack.enter_context(closing(Rewards(options)))
        rewards.progress = Counts(on_event)
        on_event({"phase": "starting"})
        resources = Resources(device=options.device)
        placement = stack.enter_context(Placement(options.grid.world_size, resources))
        if placement.accelerator == "CPU":
            cpu = Devices.find("cpu")
            update = {"engine": with_dtype(options.engine, Checkpoint(options.model), cpu)}
            options = options.model_copy(update=update)
            checked_run = dataclasses.replace(checked_run, options=options)
            if message := dtype_message(options.engine, cpu):
                on_event({"message": message})

        groups: list[RayModelGroup] = []

        def make(kind: type[Worker], path: Path, arguments: dict[str, Any]) -> RayModelGroup:
            dims = arguments.pop("dims")
            arguments |= {"wait": False, "collective_timeout": options.collective_timeout}
            groups.append(RayModelGroup(kind, dims, path, resources=placement.share(1 / count), **arguments))
            return stack.enter_context(groups[-1])

        on_event({"phase": "loading", "accelerator": resources.device != "cpu"})
        throughput = Throughput(options, on_event)
        models = _models(options, make, throughput)
        if options.teacher.engine is not None:
            teacher = TeacherEngine(partial(_teacher, checked_run), None)
            models = dataclasses.replace(models, teacher=stack.enter_context(closing(teacher)))
        on_event({"phase": "starting the rollouts"})
        is_vllm = options.rollouts.engine == "vllm"
        if not is_vllm and options.rollouts.devices is None:
            rollouts = stack.enter_context(closing(_in_process(models.actor, options)))
        else:
            dims = ParallelDims.parse(options.rollouts.dims)
            settings = _engine_options(checked_run) | {"dims": dims}
            if not shares_devices:
                devices = int(options.rollouts.devices or 0)
                placement = stack.enter_context(Placement(devices, resources, per_bundle=dims.world_size))
            # The native engine rounds by itself.
            weight_format = WeightFormat.of_weights(options.model, options.rollouts.quantization if is_vllm else None)
            kind: Callable[..., LocalEngine] = Vllm if is_vllm else native_engine
            settings |= {} if is_vllm else {"seconds": options.collective_timeout}
            if options.rollouts.adapter and options.lora is not None:
                weight_format, settings["adapter"] = adapters_of(options.lora, options.model)
            engine = EngineOnRay(
                groups[0],
                options.model,
                partial(kind, str(options.model.absolute()), **settings),
                placement.share(1 / count if shares_devices else 1.0),
                sleeps=shares_devices,
                weight_format=weight_format,
                timeout=options.collective_timeout,
                in_flight=options.rollouts.in_flight,
                changed_only=options.rollouts.changed_weights,
                max_responses=options.rollouts.max_sequences,
                tell=lambda text: on_event({"message": text}),
            )
            rollouts = stack.enter_context(closing(engine))
        recipe = Reinforcement(lambda make: make(), on_event, True, checked_run, models, rollouts, rewards)
        return Loop(options, checked_run.options_as_given or options, recipe, throughput).run()
