"""One agreement a call: ranks compare what they were given in one message, and learn which ranks are missing."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store

from ckpt.transfer import all_gather_json, described, raise_first
from parallel_models import Grid
from rl_models.calls.tensor_digests import Digest

# The messages that this process has sent in each group. It numbers them, so that a rank can see which ranks lag.
_SENT: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Given:
    """The arguments of one rank, as a message for the other ranks.

    `alike` must be the same on ranks that differ in tp, cp or pp alone, `everywhere` on all ranks. A value is a
    `Digest`, or is compared by its `repr`. `told` is a JSON value for the other ranks.
    """

    alike: Mapping[str, object] = field(default_factory=dict)
    everywhere: Mapping[str, object] = field(default_factory=dict)
    told: Any = None


@dataclass(frozen=True)
class Told:
    """The `told` of one rank; `place` is the rank's place in dp."""

    rank: int
    place: int
    value: Any


def agree_on_call(grid: Grid, call: str, prepare: Callable[[], Given], **everywhere: object) -> list[Told]:
    """Check a call on every rank, compare its arguments, and exchange what the ranks need to know of each other.

    `prepare` checks this rank's arguments and may raise. The further arguments must be the same on all ranks, and are
    compared before the errors of `prepare`.

    Returns:
        The `told` of each rank, in rank order.

    Communication: one small all-gather.

    Raises:
        ValueError: Ranks make different calls or pass different arguments; names the argument and two ranks' values; on
            every rank alike.
        RuntimeError: Some ranks do not make the call before the time limit of the group; names these ranks and their
            last calls.
        Exception: The error of `prepare` on the first rank where it failed, as in `ckpt.agree`.
    """
    if grid.everyone is None:
        return [Told(0, 0, prepare().told)]
    error, given = None, Given()
    try:
        given = prepare()
    except Exception as caught:  # any error: the other ranks must not wait for this rank
        error = caught
    own = {
        "call": call,
        "options": _message(everywhere),
        "failure": None if error is None else described(error),
        "place": grid.rank("dp"),
        "everywhere": _message(given.everywhere),
        "alike": _message(given.alike),
        "told": given.told,
    }
    messages = _gather(own, grid.everyone, call)
    for rank, message in enumerate(messages):
        if message["call"] != messages[0]["call"]:
            raise ValueError(
                f"rank 0 calls {messages[0]['call']} and rank {rank} calls {message['call']}; make the same calls in "
                "the same order on every rank"
            )
    _require_same(messages, "options")
    raise_first(error, [message["failure"] for message in messages])
    _require_same(messages, "everywhere")
    _require_same(messages, "alike")
    return [Told(rank, message["place"], message["told"]) for rank, message in enumerate(messages)]


def _message(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value if isinstance(value, Digest) else repr(value) for name, value in values.items()}


def _require_same(messages: Sequence[Mapping[str, Any]], part: str) -> None:
    """Raise ValueError if a part of the messages differs between ranks; "alike" between ranks of one place in dp."""
    places = [message["place"] if part == "alike" else 0 for message in messages]
    for rank, message in enumerate(messages):
        first = places.index(places[rank])
        ours, theirs = messages[first][part], message[part]
        for name in ours | theirs:
            one, other = _read(ours.get(name)), _read(theirs.get(name))
            if one.same(other) if isinstance(one, Digest) and isinstance(other, Digest) else one == other:
                continue
            text = f"rank {first} was given {name}: {one!s:.300} and rank {rank} {name}: {other!s:.300}"
            if part != "alike":
                raise ValueError(f"{text}; give every rank the same")
            raise ValueError(
                f"ranks {first} and {rank} differ in tp, cp or pp alone and work on the same sequences, but {text}; "
                "give them the same, and divide data by the place in dp, not by the rank"
            )


def _read(value: Any) -> Digest | str:
    """Return a value of a message as a digest or a text."""
    if value is None:
        return "nothing"
    return Digest(*value) if isinstance(value, list) else str(value)


def _gather(message: Any, group: ProcessGroup, call: str) -> list[Any]:
    """Return the message of every rank.

    Raises:
        RuntimeError: Some ranks have sent no message; names them.
    """
    number = _SENT[group] = _SENT.get(group, 0) + 1
    store = _get_process_group_store(group)
    store.set(_key(group.rank()), f"{number} {call} at {_caller()} on {socket.gethostname()}")
    try:
        return all_gather_json(message, group)
    except RuntimeError as error:
        try:
            absent = list(_absent(group, number))
        except RuntimeError:
            absent = ["rank 0 of the job, which keeps the list of calls, has ended"]
        if not absent:
            raise
        raise RuntimeError(
            f"{call} is called by every rank of the model's grid, and some ranks have not called it in time: "
            f"{'; '.join(absent)}; call it on every rank, or look for what has ended or delays these ranks"
        ) from error


def _key(rank: int) -> str:
    return f"rl_models.call.{rank}"


def _absent(group: ProcessGroup, number: int) -> Iterator[str]:
    """Describe the ranks that have not sent message `number`, with their last calls."""
    store = _get_process_group_store(group)
    for rank in range(group.size()):
        sent, _, last = store.get(_key(rank)).decode().partition(" ") if store.check([_key(rank)]) else ("0", "", "")
        if int(sent) < number:
            yield f"rank {rank} was last in {last}" if last else f"rank {rank} has made no call yet"


def _caller() -> str:
    """Return the file and line of the program that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("rl_models."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
