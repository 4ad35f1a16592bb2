"""Environments of the package verifiers (Brown 2025): its tasks are prompts, and its harnesses are agents of a run.

An episode draws by verifiers' TrainClient, which renders messages to ids itself, from `/inference/v1/generate`.
"""

from __future__ import annotations

import ast
import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from rl_train.options.functions import find_in_working_folder
from rl_train.options.names import unflattened

PREFIX = "verifiers:"
# The agent of these environments.
EPISODE = f"{__name__}:episode"
# The groups of options that do not belong to the environment.
_GROUPS = ("client", "select")


class _Loaded(NamedTuple):
    """An environment of verifiers, with the options of its client and the selected tasks."""

    environment: Any
    client: Mapping[str, Any]
    tasks: Any


def rows(source: str, field: str) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an environment.

    Args:
        source: `verifiers:TASKSET`, and options of verifiers with commas: those of its environment, such as
            `agent.harness.id=null` or `taskset.difficulty=2`, of its selection of tasks, such as `select.limit=100`,
            and of its client, such as `client.renderer.name=qwen3`.
        field: The field of the task's text: `messages`, or `text` for a model without a chat template.

    Raises:
        ValueError: There is no such environment, it refuses an option, or verifiers is not installed.
    """
    for task in _loaded(source).tasks:
        text = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        yield {field: text, "environment": source, "task": task.data.model_dump(mode="json")}


async def episode(base_url: str, row: Mapping[str, Any]) -> float:
    """Run an episode of a task, and return its reward.

    Raises:
        RuntimeError: The episode failed.
    """
    loaded = await _serving(row["environment"])
    # Imported after a thread has done so: the import takes seconds, in which the process would give no sign of life.
    from verifiers.v1 import ModelContext, SamplingConfig, TrainClientConfig

    server, _, key = base_url.removesuffix("/v1").rpartition("/sessions/")
    card = await asyncio.to_thread(_card, f"{base_url}/models")
    # All episodes share the configuration of a client, as verifiers keeps a client for each.
    client = TrainClientConfig(**{"base_url": f"{server}/v1", "renderer_model_name": card["root"], **loaded.client})
    context = ModelContext(card["id"], client, SamplingConfig(max_tokens=card["max_model_len"]))
    taskset = loaded.environment.taskset
    kind = type(taskset).task_type()
    task = kind(kind.data_type().model_validate(row["task"]), taskset.config.task)

    def name(trace: Any) -> None:
        # The client sends the trace's id with each call. Agents that are not trained get no session.
        if trace.agent.trainable:
            trace.id = key

    result = await loaded.environment.run_episode(task, context, on_trace=name)
    if not result.ok:
        error = next(error for errors in (result.errors, *(t.errors for t in result.traces)) for error in errors)
        raise RuntimeError(f"{error.type}: {error.message}")
    trained = [trace for trace in result.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise RuntimeError(f"the episode has {len(trained)} trained agents, and its reward belongs to one")
    return float(trained[0].reward)


_SERVING: dict[str, asyncio.Task[tuple[_Loaded, Any]]] = {}


async def _serving(source: str) -> _Loaded:
    """Return an environment with its servers, which end with the process."""
    if source not in _SERVING:
        _SERVING[source] = asyncio.ensure_future(_served(source))
    return (await asyncio.shield(_SERVING[source]))[0]


async def _served(source: str) -> tuple[_Loaded, Any]:
    loaded = await asyncio.to_thread(_loaded, source)
    servers = loaded.environment.serving()
    await servers.__aenter__()
    return loaded, servers


def _card(url: str) -> dict[str, Any]:
    """Return the endpoint's entry of the policy."""
    with urllib.request.urlopen(url) as answer:
        card: dict[str, Any] = json.load(answer)["data"][0]
    return card


@lru_cache
def _loaded(source: str) -> _Loaded:
    try:
        from verifiers.v1 import SelectConfig, load_environment, resolve_env_config  # an extra
    except ImportError as error:
        raise ValueError(f"{source} needs verifiers ({error}); pip install 'rl-train[verifiers]'") from None
    find_in_working_folder()
    taskset, *assignments = source.removeprefix(PREFIX).split(",")
    options: dict[str, Any] = {"taskset.id": taskset}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{source}: {assignment!r} must be an option and its value, such as select.limit=100")
        try:
            options[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            options[name.strip()] = text.strip()
    groups = unflattened(options)
    client, select = (groups.pop(name, {}) for name in _GROUPS)
    try:
        environment = load_environment(resolve_env_config(groups))
        tasks = environment.taskset.select(SelectConfig(**select))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"{source}: {error}") from error
    if not tasks.bounded:
        raise ValueError(f"{source} has tasks without end; give the number of tasks, such as select.limit=1000")
    return _Loaded(environment, client, tasks)
