"""Checks of a run's models and teacher, before ranks start; and the summary of a checked run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_layers.rotary import require_length
from parallel_models import CacheOptions, EngineOptions, Role, model_config
from parallel_models.engine import longest_sequence, stored_dtype
from rl_models import Actor, Grid
from rl_models.backends import BackendOptions, offered, require_optimizer, require_options, row_of
from rl_train.cluster.launch import Devices
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import vocabulary_size
from rl_train.engines.reading_server import ReadingServer
from rl_train.engines.vllm_limits import require_vllm
from rl_train.options.derived import engine_options, optimizer_options
from rl_train.options.options import TrainOptions
from rl_train.options.run_options import RunOptions
from rl_train.planner.memory import Memory
from rl_train.planner.plan import check_native_model


def with_dtype(engine: BackendOptions, checkpoint: Checkpoint, devices: Devices) -> BackendOptions:
    """Return the options with float32 for a bfloat16 checkpoint on a CPU without instructions for bfloat16.

    A `dtype` that is given stays. The result is saved in the dtype of the checkpoint.
    """
    if engine.dtype is not None or devices.has_bfloat16 or stored_dtype(checkpoint) != torch.bfloat16:
        return engine
    return replace(engine, dtype=torch.float32, save_dtype=torch.bfloat16)


def dtype_message(engine: BackendOptions, devices: Devices) -> str | None:
    """Return a message about a dtype that `with_dtype` has chosen, or that is slow on these devices."""
    if engine.save_dtype is not None:
        return "dtype=float32: this CPU has no instructions for bfloat16, the dtype of the checkpoint and of the result"
    if engine.dtype == torch.bfloat16 and not devices.has_bfloat16:
        return "dtype=bfloat16 is slow: this CPU has no instructions for it; leave dtype out, or give float32"
    return None


def check_model(
    options: RunOptions,
    role: Role,
    checkpoint: Checkpoint,
    dims: ParallelDims,
    longest: int,
    cache: CacheOptions | None = None,
) -> list[Memory]:
    """Refuse a model that learns, if its ranks would refuse its backend, grid or checkpoint.

    Args:
        options: The options of the run.
        role, checkpoint, dims: The model and its grid.
        longest: The number of tokens of the longest sequence.
        cache: The cache of a model that generates.

    Returns:
        The planned memory of each pipeline stage of backend="parallel"; of another backend nothing.
    """
    offered(options.backend, role, Grid(dims, torch.device("cpu")))
    engine, planned = engine_options(options, dims, role), list[Memory]()
    require_options(options.backend, engine)
    require_optimizer(options.backend, optimizer_options(options, 1.0), adapters=engine.lora is not None)
    require_length(longest, longest_sequence(checkpoint))
    if options.backend == "parallel":
        planned = check_native_model(checkpoint, role, dims, engine, options.max_tokens, cache)
    scales = options.engine.dtype is not None or row_of(options.backend).scales_loss
    if not scales and stored_dtype(checkpoint) == torch.float16:
        raise ValueError(f"{checkpoint} is stored in float16, which only backend=megatron trains; give a dtype")
    return planned


def check_reference(
    options: RunOptions, checkpoint: Checkpoint, dims: ParallelDims, longest: int, cache: CacheOptions | None = None
) -> None:
    """Refuse a reference, teacher or judge, as `check_model` does; it has no adapters and does not learn."""
    require_length(longest, longest_sequence(checkpoint))
    if options.backend == "parallel":
        engine = replace(engine_options(options, dims), lora=None, base_format=None)
        check_native_model(checkpoint, Actor.role, dims, engine, options.max_tokens, cache)


def require_states(backend: str, checkpoint: Checkpoint) -> None:
    """Raise ValueError if a model that draws has recurrent layers, whose states the backend does not keep."""
    if backend == "parallel":
        return
    try:
        is_recurrent = model_config(checkpoint).has_linear_attention
    except ValueError:  # a family of transformers alone
        return
    if is_recurrent:
        raise ValueError(
            f"backend={backend} keeps no states of the recurrent layers of {checkpoint} from token to token, so it "
            "cannot draw; leave backend out, or give rollouts=vllm"
        )


def check_engines(options: TrainOptions, policy: Checkpoint, cache: CacheOptions) -> int | None:
    """Refuse native engines on separate devices, whose ranks would refuse their grid, their drafts or their cache.

    Returns:
        The bytes of the cache of a rank; None without such engines.
    """
    rollouts = options.rollouts
    if rollouts.engine != "native" or rollouts.devices is None:
        return None
    dims, engine = ParallelDims.parse(rollouts.dims), EngineOptions(dtype=options.engine.dtype)
    try:
        cache = replace(cache, drafts=rollouts.drafts)
        planned = check_native_model(policy, Actor.role, dims, engine, options.max_tokens, cache)
    except ValueError as error:
        where = f"rollouts.devices={rollouts.devices}, rollouts.dims={rollouts.dims or 'tp=1'}"
        raise ValueError(f"the engines of {where}: {error}") from None
    return max(memory.cache for memory in planned)


def check_teacher(options: TrainOptions, longest: int) -> None:
    """Refuse a teacher with other tokens than the policy, or that does not read `longest` tokens.

    Folders without a tokenizer are taken as they are.

    Raises:
        ValueError: As above; or the engine is not installed, or the server cannot be reached.
    """
    teacher, size = options.teacher, vocabulary_size(options.model)
    if teacher.has_server:
        with closing(ReadingServer(str(teacher.engine), size, timeout=120.0, patience=0.0)) as server:
            server.check(longest, teacher.top_k if options.objective.divergence is not None else 0)
        return
    if teacher.engine == "vllm":
        require_vllm()
    reference = options.reference or options.model
    require_length(longest, longest_sequence(Checkpoint(reference)))
    check_tokens(TextCodec(options.model), TextCodec(reference))
    if options.objective.divergence is not None and size != (size_of_teacher := vocabulary_size(reference)):
        raise ValueError(
            f"objective.divergence needs vocabularies of one size, and {options.model} has {size} entries, {reference} "
            f"{size_of_teacher}; leave objective.divergence out, or take another teacher"
        )


def check_tokens(policy: TextCodec, teacher: TextCodec) -> None:
    """Raise ValueError if a token of the policy has another id in the teacher's tokenizer."""
    if not policy.available or not teacher.available:
        return
    ids, of_teacher = policy.vocabulary, teacher.vocabulary
    if others := sorted(token for token, number in ids.items() if of_teacher.get(token) != number):
        raise ValueError(
            f"{teacher.file} and {policy.file} differ in {len(others)} tokens, such as {others[0]!r} (ids "
            f"{of_teacher.get(others[0])} and {ids[others[0]]}); take a teacher with the policy's tokenizer"
        )


def summary(
    options: RunOptions, omitted: RunOptions, entries: Mapping[str, Any], shown: Collection[str]
) -> dict[str, Any]:
    """Return the summary of a dry run: the entries `shown`, and all options that are given.

    `omitted` are the options where only required options are given.
    """
    defaults = omitted.to_json()
    given = {name: value for name, value in options.to_json().items() if value != defaults[name]}
    further_options = " ".join(f"{name}={given[name]}" for name in given if name not in shown)
    return {name: entries[name] for name in shown} | {"further options": further_options or "none"}
