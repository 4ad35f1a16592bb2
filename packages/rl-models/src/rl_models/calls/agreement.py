"""Check, in one all-gather per call, that all ranks pass the same arguments; missing ranks are named."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store

from ckpt.transfer import all_gather_json, described, raise_first
from parallel_models import Grid

# The messages that this process has sent in each group. It numbers them, so that a rank can see which ranks lag.
_SENT: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
# The prefix of the keys under which each rank stores the number and the name of its last call.
_CALL_KEY = "rl_models.call."
# The modules that a call passes through; the caller is the program above them.
_OURS = ("rl_models.", "parallel_models.")


class CallArguments(NamedTuple):
    """The checked arguments of a call on one rank. Ranks compare the `repr` of the values.

    Attributes:
        peers: Must be the same on ranks that differ in tp, cp or pp alone.
        everywhere: Must be the same on all ranks.
        report: A JSON value for the other ranks.
    """

    peers: Mapping[str, object] = {}
    everywhere: Mapping[str, object] = {}
    report: Any = None


class RankReport(NamedTuple):
    """The `report` of one rank; `place` is the rank's place in dp."""

    rank: int
    place: int
    value: Any


def agree_on_call(
    grid: Grid, call: str, prepare: Callable[[], CallArguments], **everywhere: object
) -> list[RankReport]:
    """Check a call on every rank, compare its arguments, and exchange the ranks' reports.

    `prepare` checks this rank's arguments and may raise. The further arguments must be the same on all ranks, and are
    compared before the errors of `prepare`.

    Returns:
        The report of each rank, in rank order.

    Communication: one small all-gather.

    Raises:
        ValueError: Ranks make different calls or pass different arguments; names the argument and two ranks' values; on
            every rank alike.
        RuntimeError: Some ranks do not make the call before the time limit of the group; names these ranks and their
            last calls.
        Exception: The error of `prepare` on the first rank where it failed, as in `ckpt.agree`.
    """
    if grid.everyone is None:
        return [RankReport(0, 0, prepare().report)]
    error, arguments = None, CallArguments()
    try:
        arguments = prepare()
    except Exception as caught:  # any error: the other ranks must not wait for this rank
        error = caught
    compared = {"options": everywhere, "everywhere": arguments.everywhere, "peers": arguments.peers}
    message: dict[str, Any] = {
        "call": call,
        "failure": None if error is None else described(error),
        "place": grid.rank("dp"),
        "report": arguments.report,
    }
    message |= {kind: {name: repr(value) for name, value in values.items()} for kind, values in compared.items()}
    messages = _gather(message, grid.everyone, call)
    for rank, message in enumerate(messages):
        if message["call"] != messages[0]["call"]:
            raise ValueError(
                f"rank 0 calls {messages[0]['call']} and rank {rank} calls {message['call']}; make the same calls in "
                "the same order on every rank"
            )
    _require_same(messages, "options")
    raise_first(error, [message["failure"] for message in messages])
    _require_same(messages, "everywhere")
    _require_same(messages, "peers")
    return [RankReport(rank, message["place"], message["report"]) for rank, message in enumerate(messages)]


def _require_same(messages: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Raise ValueError if arguments of a kind differ between ranks; "peers" between ranks of one place in dp."""
    places = [message["place"] if kind == "peers" else 0 for message in messages]
    for rank, message in enumerate(messages):
        first_rank = places.index(places[rank])
        expected, actual = messages[first_rank][kind], message[kind]
        for name in expected | actual:
            if expected.get(name) == actual.get(name):
                continue
            values = [texts.get(name, "nothing")[:300] for texts in (expected, actual)]
            text = f"rank {first_rank} was given {name}: {values[0]} and rank {rank} {name}: {values[1]}"
            if kind != "peers":
                raise ValueError(f"{text}; give every rank the same")
            raise ValueError(
                f"ranks {first_rank} and {rank} differ in tp, cp or pp alone and work on the same sequences, but "
                f"{text}; give them the same, and divide data by the place in dp, not by the rank"
            )


def _gather(message: Any, group: ProcessGroup, call: str) -> list[Any]:
    """Return the message of every rank.

    Raises:
        RuntimeError: Some ranks have sent no message; names them.
    """
    number = _SENT[group] = _SENT.get(group, 0) + 1
    store = _get_process_group_store(group)
    store.set(f"{_CALL_KEY}{group.rank()}", f"{number} {call} at {_caller()[0]} on {socket.gethostname()}")
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


def _absent(group: ProcessGroup, number: int) -> Iterator[str]:
    """Describe the ranks that have not sent message `number`, with their last calls."""
    store = _get_process_group_store(group)
    for rank in range(group.size()):
        key = f"{_CALL_KEY}{rank}"
        count, _, call = store.get(key).decode().partition(" ") if store.check([key]) else ("0", "", "")
        if int(count) < number:
            yield f"rank {rank} was last in {call}" if call else f"rank {rank} has made no call yet"


def warn(message: str) -> None:
    """Warn at the line of the program that called into this package."""
    warnings.warn(message, stacklevel=_caller()[1])


def _caller() -> tuple[str, int]:
    """Return the file and line that called into this package, and the `stacklevel` of this frame for `warnings`."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
        frame, depth = frame.f_back, depth + 1
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", depth
