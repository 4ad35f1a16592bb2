"""`check_run`: check the options of a run against the files, the reward and the devices, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_models import CacheOptions, Role, model_config
from parallel_models.engine import checkpoint_folder, max_positions
from rl_models import Actor, ActorCritic, Critic
from rl_train.agents.pool import Agents
from rl_train.cluster.launch import Devices, require_devices
from rl_train.cluster.machines import Machines
from rl_train.cluster.resources import import_ray
from rl_train.data.codec import TextCodec, end_of_text
from rl_train.data.mixture import Mixture, check_mixture, mixture_of, read_sources, sources_of, split_sources
from rl_train.data.prompts import Prompt, PromptReader, vocabulary_size
from rl_train.engines.custom_engine import engine_of
from rl_train.engines.json_client import JsonClient
from rl_train.engines.vllm_limits import require_vllm, warn_of_step_limits
from rl_train.engines.vllm_server import server_facts
from rl_train.environments.pool import Environments
from rl_train.gateway.server import require_gateway
from rl_train.loop.checked_models import (
    check_engines,
    check_model,
    check_reference,
    check_teacher,
    require_states,
    summary,
    with_dtype,
)
from rl_train.loop.folder import check_folder
from rl_train.loop.judging import check_judges
from rl_train.loop.objective import advantages_of, loss_of
from rl_train.loop.resume import changed_inputs, inputs_of
from rl_train.loop.tracing import check_profile
from rl_train.options.derived import cache_options, check
from rl_train.options.options import TrainOptions
from rl_train.report.loggers import check_loggers
from rl_train.report.metrics_server import check_port
from rl_train.rewards.function import check_rewards, check_rows
from rl_train.trajectories.rollout_files import check_rollouts
from rl_train.weight_sync.buckets import WeightFormat

# Entries of `CheckedRun.describe` that its summary shows, also at their defaults.
_SHOWN = ["model", "algorithm", "reward", "prompts", "number_of_prompts", "passes_over_prompts", "steps", "out"]
_SHOWN += ["responses_per_step", "updates_per_step", "longest_sequence", "stop_ids", "ranks", "cache_bytes"]


@dataclass(frozen=True)
class CheckedRun:
    """The options, the prompts and the facts of a run that has been checked.

    `prompts` are all prompts; with `--data.shuffle-buffer` those that were read for the check. `mixture` has the order.
    `positions` is the model's number of positions, None if the config does not state it. `cache` is the maximum
    number of bytes of keys and values on a rank that draws, None without a plan. `dropped` is the number of prompts
    that were too long (`--data.long-prompts drop`). `tools` are the JSON schemas of the environment's tools.
    `options_as_given` still has the names of a hub, which `options` replaces by folders in its cache. `inputs` are
    digests of what the run reads, and `changes` what has changed since the run began (`rl_train.loop.resume`).
    """

    options: TrainOptions
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    stop_ids: tuple[int, ...]
    positions: int | None
    cache: int | None = None
    dropped: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    options_as_given: TrainOptions | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    changes: Sequence[str] = ()

    @cached_property
    def codec(self) -> TextCodec:
        """Return the tokenizer of the policy, with the tools of the environment."""
        return TextCodec(self.options.model, self.options.data.system_prompt, self.tools)

    def mixture(self) -> Mixture[Prompt]:
        """Return the prompts in the order of the run."""
        options = self.options
        reader = _RunPrompts(options, self.positions, self.tools, options.teacher.prompts)
        return mixture_of(options.prompts, options.data, options.seed, self.prompts, reader)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt with the longest response."""
        return _longest(self.options, [*self.prompts, *self.eval_prompts], self.positions)

    @property
    def longest_of_teacher(self) -> int:
        """Return the number of tokens of the teacher's longest prompt with the longest response."""
        return _longest(self.options, self.prompts, self.positions, of_teacher=True)

    def describe(self) -> dict[str, Any]:
        """Return the run as JSON values: every resolved option, and the values derived from the options."""
        options = self.options
        critic = str(options.critic.model or options.model) if options.rule.critic else None
        reference = options.teacher.engine if options.teacher.has_server else options.reference
        base = f"{options.model} without adapters" if options.lora is not None else str(options.model)
        return options.to_json() | {
            "stop_ids": list(self.stop_ids),
            "critic": f"a head on {options.model}" if options.critic.share_backbone else critic,
            "reference": str(reference or base) if options.has_reference else None,
            "ranks": options.grid.world_size,
            "source": options.rule.source,
            "number_of_prompts": "not counted" if options.data.shuffle_buffer else len(self.prompts),
            "number_of_eval_prompts": len(self.eval_prompts),
            "number_of_dropped_prompts": self.dropped,
            "responses_per_step": options.batch,
            "updates_per_step": options.updates_per_step,
            "longest_sequence": self.longest,
            "positions": self.positions,
            "cache_bytes": self.cache,
            "passes_over_prompts": "not counted"
            if options.data.shuffle_buffer
            else round(options.steps * options.prompts_per_step / len(self.prompts), 3),
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary of a dry run: some entries of `describe`, and all options that are given."""
        options = self.options
        omitted = TrainOptions(model=options.model, prompts=options.prompts, reward="", algorithm=options.algorithm)
        return summary(options, omitted, self.describe(), _SHOWN)


@dataclass(frozen=True)
class _RunPrompts:
    """Reads the prompts of a run, which must fit its options, the model's positions and its environment's tools.

    `teacher` is the column of the teacher's prompts.
    """

    options: TrainOptions
    positions: int | None
    tools: Sequence[dict[str, Any]]
    teacher: str | None = None

    @cached_property
    def _reader(self) -> PromptReader:
        options = self.options
        return PromptReader(options.model, options.data.system_prompt, options.data.columns, self.tools, self.teacher)

    @cached_property
    def _limit(self) -> tuple[int, str]:
        """Return the maximum number of tokens of a prompt, and what limits it."""
        options = self.options
        room = options.max_tokens - options.sampling.max_new_tokens
        drop = "drop such prompts by --data.long-prompts drop"
        arithmetic = f"{options.max_tokens} - {options.sampling.max_new_tokens} = {room}"
        limits = [(room, f"--max-tokens less --max-new-tokens, {arithmetic}; give a larger --max-tokens, or {drop}")]
        if self.positions is not None:
            positions = f"the model's {self.positions} positions (max_position_embeddings in its config.json)"
            limits.append((self.positions, f"{positions}; shorten the prompt, {drop}, or take another model"))
        return min(limits)

    def rows(self, source: Path, rows: Iterable[Any] | None = None, start: int = 0) -> Iterator[tuple[int, Any]]:
        """See `Reader`."""
        return self._reader.rows(source, rows, start)

    def read(self, source: Path, number: int, row: Any) -> Prompt | None:
        """See `Reader`."""
        prompt, (limit, text) = self._reader.read(source, number, row), self._limit
        self._check_chat(prompt)
        if (length := max(len(prompt.tokens), len(prompt.teacher or ()))) <= limit:
            return prompt
        if self.options.data.long_prompts == "refuse":
            raise ValueError(f"{prompt.place}: {length} tokens are more than {text}")
        return None

    def read_all(self, sources: Path, rows: Iterable[Any] | None, window: int = 0) -> tuple[list[Prompt], int]:
        """Return the prompts of sources, see `read_sources`."""
        prompts, dropped = read_sources(self, sources_of(sources, rows), rows, window)
        if self.options.data.system_prompt is not None and not any("messages" in prompt.row for prompt in prompts):
            raise ValueError(f'system_prompt is for chats, but {sources} has no "messages"; leave the option out')
        return prompts, dropped

    def _check_chat(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt that the environment, or images that the engine, cannot take."""
        options = self.options
        if options.converses and "messages" not in prompt.row:
            raise ValueError(f'{prompt.place}: {options.environment} is for chats; give "messages"')
        if prompt.chat is None:
            return
        if options.rollouts.engine == "vllm" and prompt.chat.has_videos:
            raise ValueError(
                f"{prompt.place}: the messages have a video, and --rollouts vllm takes images alone; use --rollouts "
                "native, or leave the video out"
            )
        if options.rollouts.has_server:
            raise ValueError(
                f"{prompt.place}: the messages have an image, which does not go over HTTP; use --rollouts "
                "vllm or native"
            )
        if options.rollouts.engine == "native" and options.rollouts.devices is not None:
            raise ValueError(
                f"{prompt.place}: the messages have an image, and native engines on --rollouts.devices compute text "
                "alone; leave --rollouts.devices out, so that the policy itself draws, or take vLLM"
            )


def check_run(
    options: TrainOptions,
    rows: Iterable[Any] | None = None,
    eval_rows: Iterable[Any] | None = None,
    *,
    devices: Devices | None = None,
) -> CheckedRun:
    """Check the options against the files, the reward and the devices, and read the prompts.

    Args:
        options: The options of the run.
        rows, eval_rows: Rows that replace the files `options.prompts` and `options.evaluation.prompts`: mappings with
            "text", "messages" or "tokens", and fields for the reward; arrays and tuples become lists. Errors name the
            rows by the paths of the two options. With several paths, the rows of each by its name. A resumed run needs
            the same rows in the same order.
        devices: All devices of a run that starts elsewhere (default: those of this machine).

    Raises:
        ValueError: An option is wrong; the error names the option and the fix.
    """
    check(options)
    check_folder(options)
    options_as_given, critic = options, options.critic.model
    options = options.model_copy(
        update={
            "model": Path(checkpoint_folder(options.model)),
            "reference": None if options.reference is None else Path(checkpoint_folder(options.reference)),
            "critic": options.critic.model_copy(update={"model": critic and Path(checkpoint_folder(critic))}),
        }
    )
    folder, checkpoint = options.model, Checkpoint(options.model)
    if not options.ray:
        engine = with_dtype(options.engine, checkpoint, devices or Devices.find(options.device))
        options = options.model_copy(update={"engine": engine})
    positions = max_positions(checkpoint)
    tools: list[dict[str, Any]] = []
    if options.converses:
        with closing(Environments(options, workers=1)) as environments:
            tools = environments.schemas()

    if options.runs_agents:
        require_gateway()
        Agents(options, workers=1).close()
    check_mixture(options.prompts, options.data, rows)
    reader, window = _RunPrompts(options, positions, tools, options.teacher.prompts), options.data.shuffle_buffer
    prompts, dropped = reader.read_all(options.prompts, rows, window)
    eval_file, eval_reader = options.evaluation.prompts, replace(reader, teacher=None)
    eval_prompts, eval_dropped = ([], 0) if eval_file is None else eval_reader.read_all(eval_file, eval_rows)
    check_rewards(options.reward)
    check_rows(options.reward, ((prompt.place, prompt.row) for prompt in (*prompts, *eval_prompts)))
    check_judges(options)
    check_loggers(options.logger)
    check_port(options.metrics_port)
    check_profile(options)
    if options.save_rollouts:
        check_rollouts()
    loss_of(options.objective.loss)
    advantages_of(options.objective.advantages)
    if options.rollouts.engine == "vllm":
        require_vllm()
        WeightFormat.of_weights(checkpoint, options.rollouts.quantization)
    elif options.rollouts.engine != "native" and not options.rollouts.has_server:
        engine_of(options.rollouts.engine)
    if options.ray:
        import_ray()
        if (count := Machines.here().count) > 1:
            raise ValueError(f"--ray starts ranks on a cluster, and torchrun has started {count} commands; leave one")
    else:
        require_devices(options.device, options.grid.world_size, devices)
    longest = _longest(options, [*prompts, *eval_prompts], positions)
    if options.rule.teacher:
        check_teacher(options, _longest(options, prompts, positions, of_teacher=True))
    cache = _check_models(options, checkpoint, cache_options(options, longest, len(eval_prompts)))
    if options.engine.float8 and not options.ray and find_spec("transformer_engine") is None:
        raise ValueError(
            f"float8={options.engine.float8} needs Transformer Engine, which is not installed: "
            "pip install 'transformer-engine[pytorch]', or leave float8 out"
        )
    vocab_size = vocabulary_size(folder)
    if options.rollouts.has_server:
        warn_of_step_limits(checkpoint)
        _check_server(options, vocab_size, min(longest, positions or longest))
    stops = end_of_text(folder, vocab_size) if options.stops is None else options.stops
    if outside := [token for token in stops if not 0 <= token < vocab_size]:
        raise ValueError(f"stop_ids {outside} are outside the vocabulary of {vocab_size}")
    if options.converses:
        # Raise here, before the run, for messages that the chat template leaves out.
        results = [{"role": "tool", "name": tool["function"]["name"], "content": "."} for tool in tools[:1]]
        for message in ({"role": "user", "content": "."}, *results):
            TextCodec(folder, tools=tools).continuation([message], next(iter(stops), -1))
    training_inputs: Sequence[Prompt | Path] = split_sources(options.prompts) if window else prompts
    inputs = inputs_of(options, {"prompts": training_inputs, "evaluation.prompts": eval_prompts})
    changes = changed_inputs(options_as_given, inputs)
    num_dropped, schemas = dropped + eval_dropped, tuple(tools)
    return CheckedRun(
        options, prompts, eval_prompts, stops, positions, cache, num_dropped, schemas, options_as_given, inputs, changes
    )


def _longest(
    options: TrainOptions, prompts: Sequence[Prompt], positions: int | None, *, of_teacher: bool = False
) -> int:
    """Return the number of tokens of the longest sequence; of agents, and of rows that are not read yet, the limit."""
    if options.runs_agents or options.data.shuffle_buffer:
        return min(positions or options.max_tokens, options.max_tokens)
    lengths = (len((of_teacher and prompt.teacher) or prompt.tokens) for prompt in prompts)
    return max(lengths) + options.sampling.max_new_tokens


def _check_server(options: TrainOptions, vocab_size: int, longest: int) -> None:
    """Refuse a server that cannot generate the responses of a run; evaluations read no log-probs."""
    with closing(JsonClient(options.rollouts.engine, timeout=120.0, patience=0.0)) as client:
        server_facts(client).check(client.url, vocab_size, longest, options.sampling)


def _check_models(options: TrainOptions, policy: Checkpoint, cache: CacheOptions) -> int | None:
    """Refuse backends, grids and checkpoints that the ranks would refuse; return the bytes of the draws' cache."""
    apart = options.rollouts.devices is not None or options.rollouts.engine == "vllm" or options.rollouts.has_server
    cache_bytes = None
    if options.rollouts.engine == "native" and options.rollouts.devices is None:
        require_states(options.backend, policy)
    models: list[tuple[Role, Checkpoint, ParallelDims]] = [(policy_kind(options).role, policy, options.grid)]
    if options.separate_critic:
        critic = policy if options.critic.model is None else Checkpoint(options.critic.model)
        models.append((Critic.role, critic, options.critic_grid))
    if options.separate_reference:
        reference = Checkpoint(options.reference or options.model)
        check_reference(options, reference, options.grid_of(options.reference_dims), cache.max_length)
    for role, checkpoint, dims in models:
        draws = cache if role != "value" and not apart else None
        planned = check_model(options, role, checkpoint, dims, cache.max_length, draws)
        if options.backend == "parallel":
            cache_bytes = max(memory.cache for memory in planned) if draws is not None else cache_bytes
            replays = options.objective.router_replay or options.rollouts.routing
            replay = "router_replay" if options.objective.router_replay else "rollouts.routing"
            if replays and not any(model_config(checkpoint).moe):
                raise ValueError(f"{replay}=True is for a mixture of experts, which {checkpoint} is not; leave it out")
    return check_engines(options, policy, cache) if apart else cache_bytes


def policy_kind(options: TrainOptions) -> type[Actor]:
    """Return the class of the policy."""
    return ActorCritic if options.critic.share_backbone else Actor
