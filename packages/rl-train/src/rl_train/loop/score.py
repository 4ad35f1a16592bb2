"""`rl-train score`: write the log-prob, entropy and value of every token of a data set."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from ckpt import Checkpoint
from ckpt.files import replacing, room_for
from parallel_layers import ParallelDims
from parallel_models import Role
from rl_models import Actor, Batch, Critic
from rl_models.api import WholeBatches, Worker
from rl_models.backends import BackendOptions
from rl_train.cluster.launch import Devices, run_on_ranks
from rl_train.data.sources import parse_json
from rl_train.loop.checked_models import with_dtype
from rl_train.planner.plan import check_native_model

# Number of tokens after which the scores of a group of sequences are sent.
_TOKENS_PER_GROUP = 65536
# Keys that every line of a result has.
_KEYS = frozenset({"index", "tokens", "log_probs"})


@dataclass(frozen=True)
class ScoreOptions:
    """The models, the grid and the numerics of a score.

    Attributes:
        model: Checkpoint folder of a causal language model.
        critic: Checkpoint folder of a value model; None: no values.
        dims: The grid.
        temperature: The divisor of the logits.
        max_tokens: Maximum number of tokens in one forward pass.
        device: "cpu", "cuda" or another accelerator that torch finds; None: an accelerator where there is one.
        engine: The dtype and the numerics, see `Actor.from_pretrained`.
    """

    model: Path
    critic: Path | None = None
    dims: ParallelDims = field(default_factory=ParallelDims)
    temperature: float = 1.0
    max_tokens: int = 16384
    device: str | None = None
    engine: BackendOptions = field(default_factory=BackendOptions)


def score(
    options: ScoreOptions, sequences: Sequence[Sequence[int]], on_record: Callable[[dict[str, Any]], None]
) -> None:
    """Score sequences of token ids; `on_record` gets one record for each sequence, in order.

    A record has `index` (of the sequence), `tokens`, `log_probs` and `entropy`, and with a critic `values`. The lists
    have equal length: each number belongs to the token at its place, and the first token has 0.

    Raises:
        RankFailed: A rank failed.
        ValueError: There are fewer devices than ranks, or see `check_native_model`.
    """
    devices = Devices.find(options.device)
    options = replace(options, engine=with_dtype(options.engine, Checkpoint(options.model), devices))
    models: list[tuple[Path | None, Role]] = [(options.model, "causal_lm"), (options.critic, "value")]
    for path, role in models:
        if path is not None:
            check_native_model(Checkpoint(path), role, options.dims, options.engine, options.max_tokens)

    def on_event(event: tuple[int, dict[str, list[list[float]]]]) -> None:
        start, columns = event
        for offset, row in enumerate(zip(*columns.values(), strict=True)):
            index = start + offset
            on_record({"index": index, "tokens": list(sequences[index]), **dict(zip(columns, row, strict=True))})

    groups = list(_groups(sequences))
    ranks = options.dims.world_size
    run_on_ranks(_score_on_rank, ranks, options, groups, devices=devices, on_event=on_event)


@contextmanager
def open_result(out: Path, *inputs: Path, keys: Set[str] = _KEYS) -> Iterator[IO[str]]:
    """Open the file of a result: a file appears when it is complete; a pipe or a device gets each score at once.

    Raises:
        ValueError: `out` cannot be written, lies in an input, or is a file that `score` has not written.
    """
    with ExitStack() as stack:
        stack.enter_context(room_for(None, out))
        try:
            in_place = _check_result(out, inputs, keys)
            file = stack.enter_context(open(out, "wb") if in_place else replacing(out))  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written ({error.strerror}); choose another file") from None
        text = io.TextIOWrapper(file, encoding="utf-8")
        try:
            yield text
        finally:
            text.detach()  # flushes the buffer, and leaves the file open


def _check_result(out: Path, inputs: Sequence[Path], keys: Set[str]) -> bool:
    """Raise ValueError for a wrong `out`; return whether `out` exists and is no regular file, such as a pipe."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out} must be a file in a folder that exists")
    for input_path in inputs:
        if out.resolve().is_relative_to(input_path.resolve()):
            raise ValueError(f"--out {out} lies in {input_path}, an input; choose another file")
    if not out.is_file():
        return out.exists()
    with open(out, "rb") as file:
        first = file.readline()
    try:
        known = not first or parse_json(first).keys() >= keys
    except (ValueError, AttributeError):
        known = False
    if not known:
        raise ValueError(f"--out {out} exists and is not a result of this command; choose another file, or remove it")
    return False


def _groups(sequences: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    tokens = 0
    for sequence in sequences:
        group.append(list(sequence))
        tokens += len(sequence)
        if tokens >= _TOKENS_PER_GROUP:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _score_on_rank(send: Callable[[Any], None], options: ScoreOptions, groups: list[list[list[int]]]) -> None:
    device = Devices.find(options.device).current

    def load(kind: type[Worker], path: Path) -> WholeBatches:
        worker = kind.from_pretrained(
            path,
            dims=options.dims,
            device=device,
            max_tokens_per_micro_batch=options.max_tokens,
            **vars(options.engine),
        )
        return WholeBatches(worker)

    actor = load(Actor, options.model)
    critic = None if options.critic is None else load(Critic, options.critic)
    start = 0
    for group in groups:
        batch = Batch.from_sequences(group)
        columns = actor.log_probs(batch, temperature=options.temperature)._asdict()
        if critic is not None:
            columns["values"] = critic.values(batch)
        if dist.get_rank() == 0:
            send((start, {name: [values.tolist() for values in batch.split(c)] for name, c in columns.items()}))
        start += len(group)
