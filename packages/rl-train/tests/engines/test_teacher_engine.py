"""A teacher's engines in processes, which are started again, and a teacher's log-probs on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from torch.distributed import ProcessGroup

from parallel_layers.testing import RankPool
from rl_models import Batch
from rl_train.engines.interface import SequenceLogProbs
from rl_train.engines.teacher_engine import ReadingProcesses, TeacherEngine
from rl_train.processes.errors import ProcessLost

SEQUENCES = [[1, 4, 7], [3], [5, 6, 2, 9, 9, 1], [8, 2]]


class Reader:
    """Says of each token that its log-prob is -token."""

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        if [0] in sequences:
            raise ValueError("no token 0")
        return [
            SequenceLogProbs(
                -torch.tensor(row).float(),
                torch.tensor(row).view(-1, 1).expand(-1, top_k + 1),
                -torch.tensor(row).float().view(-1, 1).expand(-1, top_k + 1),
            )
            for row in sequences
        ]

    def close(self) -> None:
        pass


class ReadingProcess:
    """A process with a `Reader`, which is lost in the next `losses` calls."""

    def __init__(self, losses: int = 0) -> None:
        self.losses, self.starts, self.asked = losses, 0, list[list[int]]()

    def start(self) -> None:
        self.starts += 1

    def restart(self) -> None:
        self.start()

    def ready(self) -> None:
        assert self.starts

    def submit(self, method: str, sequences: list[list[int]], top_k: int) -> Future[list[SequenceLogProbs]]:
        assert method == "read"
        self.asked += sequences
        call: Future[list[SequenceLogProbs]] = Future()
        try:
            if self.losses:
                self.losses -= 1
                raise ProcessLost("engine 0 ended its process during read", "ended its process")
            call.set_result(Reader().read(sequences, top_k))
        except (ProcessLost, ValueError) as error:
            call.set_exception(error)
        return call

    def close(self) -> None:
        self.starts = 0


def test_processes_share_the_sequences_and_are_started_again() -> None:
    whole, fragile = ReadingProcess(), ReadingProcess(losses=2)
    readers = ReadingProcesses([whole, fragile])  # type: ignore[list-item]
    results = readers.read(SEQUENCES, 1)
    assert [result.top_ids[:, 1].tolist() for result in results] == SEQUENCES
    assert (whole.starts, fragile.starts) == (1, 3)
    assert sorted(whole.asked + fragile.asked[: len(fragile.asked) // 3]) == sorted(SEQUENCES)
    with pytest.raises(ValueError, match="no token 0"):
        readers.read([*SEQUENCES, [0]], 1)
    whole.losses = 3
    with pytest.raises(ProcessLost, match="ended its process"):
        readers.read(SEQUENCES, 1)
    readers.close()
    assert (whole.starts, fragile.starts) == (0, 0)


def on_ranks(group: ProcessGroup) -> list[object]:
    teacher = TeacherEngine(Reader, group)
    fields = teacher.read(Batch.from_sequences(SEQUENCES), 2)
    (name, drawn), *others = teacher.read(Batch.from_sequences(SEQUENCES), 0).items()
    assert not others
    try:
        teacher.read(Batch.from_sequences([[0]]), 2)
    except ValueError as error:
        refusal = str(error)
    teacher.close()
    listed = [values.tolist() for values in fields.values()]
    return [list(fields), listed, name, drawn.tolist(), "no token 0" in refusal]


def test_every_rank_gets_the_log_probs_and_the_errors_of_the_first(ranks: RankPool) -> None:
    tokens = [token for row in SEQUENCES for token in row]
    expected = [
        ["teacher_ids", "teacher_log_probs"],
        [[[token] * 3 for token in tokens], [[-token] * 3 for token in tokens]],
        "reference_log_probs",
        [-token for token in tokens],
        True,
    ]
    assert ranks.run(on_ranks, world=2, timeout=60) == [expected, expected]
