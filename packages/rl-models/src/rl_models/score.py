"""`rl-models score`: log-probability, entropy and value of every token of the user's own data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_layers import ParallelDims
from rl_models.actor import Actor
from rl_models.batch import Batch
from rl_models.config import ModelConfig
from rl_models.critic import Critic
from rl_models.launch import Devices, run_on_ranks

# Sequences are sent to the ranks and come back in groups of about so many tokens.
_TOKENS_PER_GROUP = 65536


@dataclass(frozen=True)
class ScoreOptions:
    """What to score with.

    Attributes:
        model: checkpoint folder of a causal language model.
        critic: of a value model; None: no values.
        tp: tensor-parallel ranks.
        temperature: the logits are divided by it.
        max_tokens: the most tokens of one forward pass.
        device: "cpu" or "cuda"; None: CUDA where there is one.
    """

    model: Path
    critic: Path | None = None
    tp: int = 1
    temperature: float = 1.0
    max_tokens: int = 16384
    device: str | None = None


def score(
    options: ScoreOptions, sequences: Sequence[Sequence[int]], on_record: Callable[[dict[str, Any]], None]
) -> None:
    """Score sequences of token ids; `on_record` gets one record for each, in order.

    A record has `index` (of the sequence), `tokens`, `log_probs` and `entropy`, with a critic `values`: lists of equal
    length, each number belonging to the token at its place, 0 for the first token, which follows nothing.

    Raises:
        RankFailed: a rank failed.
        ValueError: there are fewer devices than ranks.
    """
    devices = Devices.find(options.device)

    def on_event(event: tuple[int, dict[str, list[list[float]]]]) -> None:
        start, columns = event
        for offset, row in enumerate(zip(*columns.values(), strict=True)):
            index = start + offset
            on_record({"index": index, "tokens": list(sequences[index]), **dict(zip(columns, row, strict=True))})

    groups = list(_groups(sequences))
    run_on_ranks(_score_on_rank, options.tp, options, groups, devices=devices, on_event=on_event)


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
    dims = ParallelDims(tp=options.tp)
    actor = Actor.from_pretrained(options.model, dims=dims, max_tokens_per_micro_batch=options.max_tokens)
    critic = None
    if options.critic is not None:
        critic = Critic.from_pretrained(options.critic, dims=dims, max_tokens_per_micro_batch=options.max_tokens)
    start = 0
    for group in groups:
        batch = Batch.from_sequences(group)
        columns = actor.log_probs(batch, temperature=options.temperature)._asdict()
        if critic is not None:
            columns["values"] = critic.values(batch)
        if actor.grid.rank("tp") == 0:
            rows = {name: [part.tolist() for part in batch.split(column.cpu())] for name, column in columns.items()}
            send((start, rows))
        start += len(group)


def read_sequences(path: Path, model: Path, max_tokens: int) -> list[list[int]]:
    """Read JSON lines: `{"tokens": [ids]}`, or `{"text": "..."}` for the tokenizer in the model's folder.

    Raises:
        ValueError: a line is no such object, or has ids outside the vocabulary or too many; names the line.
    """
    vocab_size = ModelConfig.from_hf(model).vocab_size
    encode = _Encoder(model)
    sequences = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            tokens = _tokens_of(line, encode)
            if outside := [token for token in tokens if not 0 <= token < vocab_size]:
                raise ValueError(f"token ids {outside[:3]} are outside the vocabulary of {vocab_size}")
            if len(tokens) > max_tokens:
                raise ValueError(f"{len(tokens)} tokens are more than --max-tokens {max_tokens}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        sequences.append(tokens)
    if not sequences:
        raise ValueError(f"{path} has no lines to score")
    return sequences


def _tokens_of(line: str, encode: Callable[[str], list[int]]) -> list[int]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict) or len({"tokens", "text"} & value.keys()) != 1:
        raise ValueError('expected an object with either "tokens" (a list of ids) or "text" (a string)')
    if "text" in value:
        if not isinstance(value["text"], str):
            raise ValueError(f'"text" must be a string, got {type(value["text"]).__name__}')
        tokens = encode(value["text"])
    else:
        tokens = value["tokens"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError('"tokens" must be a list of integers')
    if not tokens:
        raise ValueError("no tokens")
    return tokens


class _Encoder:
    """The tokenizer of a checkpoint, loaded when the first text needs it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokenizer.json"
        self.tokenizer: Any = None

    def __call__(self, text: str) -> list[int]:
        if self.tokenizer is None:
            if not self.file.is_file():
                raise ValueError(f'"text" needs {self.file}, which does not exist; give "tokens" instead')
            from tokenizers import Tokenizer  # only text needs it

            self.tokenizer = Tokenizer.from_file(str(self.file))
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids
