"""`SavedRollouts`: the responses of a run that `--save-rollouts` has kept, as samples of its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ckpt.files import Store
from parallel_models.engine import located
from rl_models import Batch
from rl_train.data.codec import TextCodec
from rl_train.trajectories.rollout_files import FILE, ROLLOUTS
from rl_train.trajectories.shown_turns import VALUES, shown_turns

# The number of a response in the run, and a function that reads it as a sample.
Response = tuple[int, Callable[[], dict[str, Any]]]
_FIELDS = {field: name for name, (field, _) in VALUES.items()}


class SavedRollouts:
    """The responses in the Parquet files of a run.

    Args:
        out: The folder of the run, or its URL.
        model: The model of the run, whose tokenizer has the texts of single tokens; without it a response is one text.

    Attributes:
        rewards: The step and the reward of each response, in the order of the steps.

    Raises:
        FileNotFoundError: The run has no rollouts.
        ValueError: A file is damaged.
    """

    def __init__(self, out: Path, model: str) -> None:
        self._model, pattern = model, FILE.format(0).replace("0" * 8, "*")
        if (store := Store.of(out / ROLLOUTS)) is None:
            self._system, self._folder = None, str(out / ROLLOUTS)
            files = sorted(map(str, (out / ROLLOUTS).glob(pattern)))
        else:
            self._system, self._folder = store.files, store.path
            with store.errors():
                store.files.invalidate_cache()
                names = store.files.find(store.path, maxdepth=1)
            files = sorted(name for name in names if PurePosixPath(name).match(pattern))
        if not files:
            raise FileNotFoundError(f"{out} has no {ROLLOUTS}")
        heads = self._read(files, ["step", "sample", "reward", "source"])
        self._named = len(heads["source"].unique()) > 1
        columns = heads.select(["step", "sample", "reward"]).to_pydict()
        rows = zip(columns["step"], columns["reward"], columns["sample"], strict=True)
        self.rewards = [(step, reward) for step, reward, sample in rows if sample == 0]
        self._firsts = dict[int, int]()
        for number, (step, _) in enumerate(self.rewards):
            self._firsts.setdefault(step, number)

    @cached_property
    def _codec(self) -> TextCodec:
        try:
            return TextCodec(Path(located(self._model, weights=False)))
        except ValueError:  # the model is no longer there
            return TextCodec(Path(self._model))

    def prompts_of(self, step: int) -> Iterator[Sequence[Response]]:
        """Yield the responses of a step, prompt by prompt."""
        table = self._read([f"{self._folder}/{FILE.format(step)}"])
        begins = [row for row, sample in enumerate(table["sample"].to_pylist()) if sample == 0]
        numbers, responses = table["response"].to_pylist(), list[Response]()
        for place, (begin, end) in enumerate(pairwise([*begins, len(numbers)])):
            if numbers[begin] == 0 and responses:
                yield responses
                responses = []
            responses.append((self._firsts[step] + place, partial(self._sample, table, begin, end)))
        if responses:
            yield responses

    def _read(self, files: list[str], columns: list[str] | None = None) -> Any:
        """Return the table of files."""
        from pyarrow import ArrowException, parquet  # of the extra `datasets`

        try:
            return parquet.read_table(files, filesystem=self._system, columns=columns)
        except FileNotFoundError:
            raise
        except (ArrowException, OSError) as error:
            raise ValueError(f"{self._folder} cannot be read as Parquet: {error}") from None

    def _sample(self, table: Any, begin: int, end: int) -> dict[str, Any]:
        """Return the rows of an episode as one record of `samples.jsonl`."""
        rows = table.slice(begin, end - begin).to_pylist()
        first = rows[0]
        drawn = first["mask"].index(True) if True in first["mask"] else len(first["mask"])
        prompt = first["tokens"][:drawn] if first["prompt_text"] is None else first["prompt_text"]
        named = {"source": first["source"]} if self._named else {}
        return named | {
            "step": first["step"],
            "line": first["line"],
            "prompt": prompt,
            "reward": first["reward"],
            "response_length": sum(sum(row["mask"]) for row in rows),
            "truncated": first["truncated"],
            "turns": [turn for row in rows for turn in self._turns(row)],
        }

    def _turns(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if not self._codec.available and row["response_text"] is not None:
            return [{"role": "policy", "text": row["response_text"]}]
        tokens, mask = torch.tensor(row["tokens"]), torch.tensor(row["mask"])
        absent = [math.nan] * len(tokens)
        fields = {field: torch.tensor(row[name] or absent) for field, name in _FIELDS.items()}
        (turns,) = shown_turns(Batch(tokens, (len(tokens),), mask, fields), self._codec)
        return turns
