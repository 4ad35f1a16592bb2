"""Check the options of a run together, and derive the options of its models, optimizers and draws."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

import torch

from parallel_layers import ParallelDims
from parallel_models import CacheOptions, Role
from rl_models import OptimizerOptions, PipelineOptions
from rl_models.backends import BackendOptions
from rl_train.options.algorithms import ALGORITHMS
from rl_train.options.fields import device_ids
from rl_train.options.options import SOURCES, TrainOptions
from rl_train.options.run_options import Needs, RunOptions


def check(options: TrainOptions) -> None:
    """Raise ValueError for options that exclude each other, or that the engines or optimizers refuse."""
    for mistake in _mistakes(options):
        raise ValueError(mistake)
    # Building the derived options checks the rest.
    _ = optimizer_options(options, 1.0), engine_options(options, options.grid)


def needs(options: TrainOptions) -> Iterator[Needs]:
    """Yield the options that have an effect in some runs alone."""
    engine, held_out, objective = options.rollouts.engine, options.evaluation.prompts is not None, options.objective
    separate, ready = options.rollouts.devices is not None, engine in ("native", "vllm")
    apart = engine == "native" and separate
    product = f"prompts_per_step={options.prompts_per_step} x samples={options.samples}"
    as_many = f"as many responses in a step, which has {options.batch}, {product}"
    yield "mini_batch", (options.mini_batch or 0) <= options.batch, as_many
    yield "data.weights", len(options.data.weight_of_sources) != 1, "several sources, with a weight for each"
    yield "data.max_turns", options.converses, "an environment of several turns"
    limits = "agents.concurrent agents.timeout agents.max_calls agents.max_tokens"
    yield limits, options.runs_agents, "agent=module:function, agent_command or environment=verifiers:TASKSET"
    yield "agents.image", options.agent_command is not None, "agent_command"
    yield "agents.container agents.memory", options.agents.image is not None, "agents.image"
    alone = options.agent is None and options.agent_command is None
    yield "environment", alone, "no agent: both would run the episodes"
    yield "agent_command", options.agent is None, "no other agent"
    yield "teacher.prompts", not options.runs_agents, "no agent, whose own prompts the policy answers"
    yield "engine.num_labels", options.engine.num_labels in (None, 1), "rl-train reward --rows labels or steps"
    critic = "an algorithm with a critic, such as ppo"
    names = "critic.model critic.dims critic.share_backbone critic.learning_rate critic.value_clip"
    yield names, options.rule.critic, critic
    shares = options.critic.share_backbone
    yield "critic.model critic.dims critic.learning_rate", not shares, "a critic without share_backbone"
    yield "critic.value_coefficient", shares, "critic.share_backbone"
    yield "reference", options.has_reference, "a kl_coefficient above 0, or algorithm=on-policy-distillation"
    yield "reference_dims", options.separate_reference, "a reference beside the policy"
    teacher = options.teacher
    yield "reference", not teacher.has_server, "another teacher.engine than a server, which has a model of its own"
    yield "teacher.prompts teacher.engine", options.rule.teacher, "algorithm=on-policy-distillation"
    yield "teacher.devices", teacher.engine in ("native", "vllm"), "teacher.engine=native or vllm"
    yield "teacher.dims", teacher.engine == "vllm", "teacher.engine=vllm"
    listed = teacher.engine is not None and objective.divergence is not None
    yield "teacher.top_k", listed, "teacher.engine and objective.divergence"
    estimator = objective.kl_coefficient > 0 or objective.kl_estimator == options.rule.kl_estimator
    yield "objective.kl_estimator", estimator, "a kl_coefficient above 0"
    own = ":" in objective.advantages
    yield "objective.lam", own or objective.advantages == "gae", "objective.advantages=gae, as of algorithm=ppo"
    discounts = own or objective.advantages in ("gae", "returns")
    yield "objective.gamma", discounts, "objective.advantages=gae or returns, as of algorithm=ppo or reinforce++"
    yield "max_batches", options.equal_groups == "resample", "equal_groups=resample"
    yield "objective.kl_coefficient", not options.rule.teacher, "another algorithm than on-policy-distillation"
    for name in ("clip_low", "clip_high"):
        by_algorithm = getattr(objective, name) == getattr(options.rule, name)
        clips = objective.loss not in ("sapo", "dro")
        yield f"objective.{name}", by_algorithm or clips, "a loss that clips, such as objective.loss=ppo"
    yield "objective.divergence", options.rule.teacher, "algorithm=on-policy-distillation"
    plain = options.backend == "parallel" and not options.engine.share_prefixes
    yield "objective.divergence", plain, "backend=parallel, without engine.share_prefixes"
    yield "objective.mixture", objective.divergence is not None, "objective.divergence"
    yield "objective.dual_clip", objective.loss == "ppo", "objective.loss=ppo"
    yield "objective.dro_beta", objective.loss == "dro", "objective.loss=dro"
    bounds = " ".join(f"objective.importance.{name}" for name in ("bound", "level", "floor", "veto"))
    yield bounds, objective.importance.cap is not None, "objective.importance.cap"
    names = "evaluation.every evaluation.samples evaluation.temperature evaluation.top_p evaluation.keep_best"
    yield names, held_out, "evaluation.prompts"
    yield "evaluation.top_p", options.evaluation.temperature > 0, "an evaluation.temperature above 0"
    yield "keep", options.save_every > 0, "a save_every above 0"
    yield "rollouts.adapter", engine == "vllm", "rollouts.engine=vllm"
    yield "rollouts.memory", "vllm" in (engine, teacher.engine), "rollouts.engine=vllm or teacher.engine=vllm"
    caches = not options.rollouts.has_server or "judge:" in options.reward
    yield "rollouts.cache_gib", caches, "another rollouts.engine than a server, which has a cache of its own"
    by_parallel = engine == "native" and (apart or options.backend == "parallel")
    needed = "rollouts.engine=native with backend=parallel"
    yield "rollouts.quantization", by_parallel or engine == "vllm", f"rollouts.engine=vllm, or {needed}"
    yield "rollouts.float8_cache rollouts.drafts rollouts.experts", by_parallel, needed
    rounds = engine != "native" or not options.engine.tp_invariant
    yield "rollouts.quantization rollouts.float8_cache", rounds, "engine.tp_invariant=False: FP8 rounds otherwise"
    divided = (ParallelDims.parse(options.rollouts.dims) if apart else options.grid).ep > 1
    needed = f"ranks that divide experts, such as {'rollouts.dims=tp=2,ep=2' if apart else 'dims=dp=2,ep=2'}"
    yield "rollouts.experts", divided, needed
    needed = "rollouts.engine=native or vllm with rollouts.devices"
    yield "rollouts.dims", separate and ready, needed
    yield "rollouts.changed_weights", apart, "rollouts.engine=native with rollouts.devices"
    ahead = separate and ready and options.rollouts.staleness > 0
    yield "rollouts.in_flight", ahead, f"{needed}, and a staleness of 1 or more"
    yield "rollouts.in_flight", not options.rollouts.adapter, "all weights to be sent, not rollouts.adapter"
    plain = options.rollouts.quantization is None
    yield "rollouts.in_flight", plain, "weights in engine.dtype, without rollouts.quantization"
    yield "rollouts.in_flight", options.rollouts.experts != "gather", "rollouts.experts=auto or exchange"
    yield "rollouts.partial", options.rollouts.staleness > 0, "a staleness of 1 or more"
    yield "rollouts.partial", not options.rollouts.in_flight, "synchronous draws, without rollouts.in_flight"
    yield "rollouts.partial", not (options.converses or options.runs_agents), "responses of one turn"
    yield "rollouts.routing", engine == "vllm", "rollouts.engine=vllm"
    whole = not (options.rollouts.in_flight or options.rollouts.partial)
    needed = "draws by one version of the weights, without rollouts.in_flight and rollouts.partial"
    yield "rollouts.routing", whole, needed
    yield "rollouts.stale_cache", options.rollouts.in_flight, "rollouts.in_flight"
    yield "rollouts.devices", ready, "rollouts.engine=native or vllm"
    yield "rollouts.adapter", options.lora is not None, "engine.lora.rank"
    yield "rollouts.quantization", not options.rollouts.adapter, "all weights to be sent, not rollouts.adapter"


def _mistakes(options: TrainOptions) -> Iterator[str]:
    for name, needed in options.without_effect(needs(options)):
        yield f"{name}={options.value(name)} needs {needed}; give that, or leave {name} out"
    yield from _mistakes_of_prompts(options)
    yield from _mistakes_of_objective(options)
    yield from _mistakes_of_rollouts(options)
    ranks = options.grid.world_size
    grids = {"critic.dims": options.critic_grid, "reference_dims": options.grid_of(options.reference_dims)}
    for name, grid in grids.items():
        if grid.world_size != ranks:
            model, value = re.split(r"[._]", name)[0], options.value(name)
            yield (
                f"{name}={value} has {grid.world_size} ranks, but the {model} shares the policy's ranks, the {ranks} "
                f"of dims={options.dims}"
            )


def _mistakes_of_prompts(options: TrainOptions) -> Iterator[str]:
    if options.rule.groups and options.samples < 2:
        yield f"{options.algorithm} compares the responses to a prompt; samples={options.samples} must be >= 2"
    if options.agent is not None and not re.fullmatch(r"[\w.]+:\w+", options.agent):
        yield f"agent={options.agent!r} must be module:function, such as my_agent:solve; a program is agent_command"
    for name in ("agent_command", "agents.container"):
        if options.value(name) is not None and not _words(options.value(name)):
            yield f"{name}={options.value(name)!r} must be a command, such as 'python agent.py' or docker"
    if (environment := options.environment) is not None:
        if options.converses and not re.fullmatch(r"[\w.]+:\w+", environment):
            yield (
                f"environment={environment!r} must be {'TASK, '.join(SOURCES)}TASK, such as {SOURCES[0]}chain_sum, or "
                "module:class, such as games:Wordle"
            )
        if not options.converses and str(options.prompts) != environment:
            yield (
                f"prompts={options.prompts} and environment={environment} both state the prompts; leave one of them out"
            )
    if options.rewards.overlong_buffer > (longest := options.sampling.max_new_tokens):
        yield f"rewards.overlong_buffer={options.rewards.overlong_buffer} is more than max_new_tokens={longest}"
    if options.evaluation.samples > 1 and not options.evaluation.temperature:
        yield (
            f"evaluation.samples={options.evaluation.samples} responses to a prompt are equal at "
            "evaluation.temperature=0; give a temperature, such as 1"
        )


def _words(command: str) -> list[str]:
    """Return the words of a command; none where it has none, or a quote without its end."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _mistakes_of_objective(options: TrainOptions) -> Iterator[str]:
    objective, importance = options.objective, options.objective.importance
    if objective.kl_coefficient and options.rule.kl == "loss" and objective.kl_estimator == "k1":
        yield "objective.kl_estimator='k1' has no gradient on average, so a loss needs k2 or k3"
    rule = options.rule
    if objective.divergence is not None:
        if objective.loss != rule.loss:
            yield f"objective.loss={objective.loss} does not go with objective.divergence, a loss of its own"
        mixes = objective.divergence not in ("forward_kl", "reverse_kl")
        if mixes != (objective.mixture is not None and 0 < objective.mixture < 1):
            yield (
                f"objective.divergence={objective.divergence} "
                f"{'needs objective.mixture between 0 and 1' if mixes else 'takes no objective.mixture'}, got "
                f"{objective.mixture}"
            )
    yield from _mistakes_of_teacher(options)
    like = (rule.critic, rule.groups, rule.teacher)
    fitting = sorted({row.advantages for row in ALGORITHMS.values() if (row.critic, row.groups, row.teacher) == like})
    if ":" not in objective.advantages and objective.advantages not in fitting:
        yield (
            f"objective.advantages={objective.advantages!r} must be {' or '.join(fitting)} with "
            f"algorithm={options.algorithm}, or module:function, such as own:advantages"
        )
    if options.equal_groups != "keep" and not options.rule.groups:
        yield (
            f"{options.algorithm} does not compare the responses to a prompt; leave "
            f"equal_groups={options.equal_groups} out"
        )
    if importance.floor and (importance.bound == "truncate" or importance.floor > (importance.cap or 0)):
        yield (
            f"objective.importance.floor={importance.floor} needs bound=mask and a cap that is no smaller, not "
            f"{importance.bound} and {importance.cap}"
        )
    if options.sampling.keep_sampling_mask and options.rollouts.engine == "vllm" and options.sampling.top_k is None:
        yield "sampling.keep_sampling_mask with rollouts.engine=vllm needs sampling.top_k, which bounds vLLM's answers"
    if not options.sampling.temperature:
        yield "temperature=0.0 must be greater than 0: the policy learns from what it draws"


def _mistakes_of_teacher(options: TrainOptions) -> Iterator[str]:
    teacher, sampling = options.teacher, options.sampling
    known = options.reference is not None or teacher.has_server
    if options.rule.teacher and not known and (teacher.prompts is None or teacher.engine is not None):
        yield (
            f"algorithm={options.algorithm} needs the teacher's folder; give reference=FOLDER, or "
            "teacher.prompts=COLUMN alone, with which the initial policy teaches"
        )
    if teacher.engine is None:
        return
    if teacher.engine not in ("native", "vllm") and not teacher.has_server:
        yield (
            f"teacher.engine={teacher.engine!r} must be native, vllm or http://HOST:PORT; leave it out for a model on "
            "the policy's ranks"
        )
    if sampling.temperature != 1:
        yield (
            f"teacher.engine={teacher.engine} reports log-probs at temperature 1, and sampling.temperature="
            f"{sampling.temperature}; sample at temperature 1, or leave teacher.engine out"
        )
    if sampling.keep_sampling_mask and options.objective.divergence is None:
        yield (
            "sampling.keep_sampling_mask compares log-probs among the kept tokens, and teacher.engine reports those of "
            "the vocabulary; give objective.divergence, or leave one of them out"
        )
    if teacher.engine in ("native", "vllm"):
        devices, ranks = device_ids(teacher.devices), ParallelDims.parse(teacher.dims).world_size
        if options.ray or devices is None or len(devices) % ranks:
            yield (
                f"teacher.engine={teacher.engine} needs teacher.devices, {ranks} for each engine, and a run without "
                f"ray; got teacher.devices={teacher.devices} and ray={options.ray}"
            )


def _mistakes_of_rollouts(options: TrainOptions) -> Iterator[str]:
    rollouts = options.rollouts
    devices = rollouts.devices
    if options.ray and devices is not None and not (devices.isdecimal() and int(devices)):
        yield f"rollouts.devices={devices} must be the number of the engines' devices with ray, such as 2"
    dims = ParallelDims.parse(rollouts.dims)
    ranks = dims.world_size
    if dims.dp * dims.cp > 1:
        yield f"rollouts.dims={rollouts.dims} is the grid of one engine: give it tp, pp, ep, and more rollouts.devices"
    elif options.num_engine_devices % ranks:
        yield f"rollouts.devices={devices} are no multiple of the {ranks} ranks of rollouts.dims={rollouts.dims}"
    if rollouts.engine == "vllm" and rollouts.staleness and devices is None and not rollouts.partial:
        yield (
            f"staleness={rollouts.staleness} has vLLM draw while the models learn, which needs memory for both; give "
            "vLLM separate rollouts.devices, or leave staleness out"
        )
    if rollouts.has_server and options.ray:
        yield f"rollouts={rollouts.engine} is for runs without ray; leave ray out, or use rollouts=vllm"
    if (rollouts.engine != "native" or devices is not None) and options.offload:
        yield f"rollouts={rollouts.engine} streams the policy's weights from the devices; leave offload out"


def engine_options(options: RunOptions, grid: ParallelDims, role: Role = "causal_lm") -> BackendOptions:
    """Return the engine options of a model in a role, on the policy's grid or on the critic's own grid."""
    engine = options.engine
    if engine.dtype is torch.float16 and options.backend != "megatron":
        raise ValueError("dtype=float16 needs backend=megatron; use float32 or bfloat16")
    if role == "value":
        engine = replace(engine, mtp_loss_scaling_factor=0.0)
    # Options of the policy's grid may be invalid on the critic's grid.
    if grid != options.grid and grid.tp == 1:
        engine = replace(engine, sequence_parallel=None)
    if grid != options.grid and grid.pp == 1:
        engine = replace(engine, pipeline=PipelineOptions())
    return engine


def cache_options(options: TrainOptions, longest: int, eval_prompts: int) -> CacheOptions:
    """Return the cache of a rank that draws the responses of a step, of `longest` tokens, or of the evaluation."""
    grid = options.grid
    data_ranks, multiple = grid.dp * grid.cp, grid.tp * grid.cp
    eval_responses = -(-eval_prompts // data_ranks) * options.evaluation.samples
    prompts = options.prompts_per_step * (1 + options.rollouts.staleness * (options.rollouts.partial > 0))
    max_responses = max(-(-prompts // data_ranks) * options.samples, eval_responses)
    # tp and cp divide the sequences of a forward pass.
    sequences = -(-min(max_responses, options.rollouts.max_sequences) // multiple) * multiple
    rollouts = options.rollouts
    drafts = 0 if rollouts.devices is not None else rollouts.drafts  # engines apart check their own grid
    return CacheOptions(
        *(sequences, longest, rollouts.cache_gib),
        float8=rollouts.quantization is not None and rollouts.engine == "native" and rollouts.devices is None,
        float8_cache=rollouts.float8_cache,
        drafts=drafts,
        experts=rollouts.experts,
    )


def optimizer_options(options: RunOptions, learning_rate: float) -> OptimizerOptions:
    """Return the optimizer of the policy or the critic; its schedule counts optimizer steps, not steps of the run."""
    schedule = options.optimizer.schedule
    names = ("warmup_steps", "total_steps", "decay_steps")
    steps = {name: number * options.updates_per_step for name in names if (number := getattr(schedule, name))}
    return replace(options.optimizer, learning_rate=learning_rate, schedule=replace(schedule, **steps))
