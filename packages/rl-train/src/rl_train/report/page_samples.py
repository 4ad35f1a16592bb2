"""The samples on the page of a run or of a comparison: which ones, and how much of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")

# The page has samples of at most MOST_SAMPLED steps, or prompts that runs share, in at most MOST_CHARACTERS of JSON;
# and the MOST_EXTREME best and worst ones of the run.
MOST_SAMPLED, MOST_EXTREME, MOST_CHARACTERS = 50, 10, 3_000_000
# It has at most so many tokens of a sample, and characters of a prompt.
MOST_TOKENS, MOST_OF_PROMPT = 2000, 8000
# Characters that stand for a token in a text without tokens.
_TOKEN = 4


def evenly_spaced(entries: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` of the entries, with the first and the last one (`most` at least 2)."""
    if len(entries) <= most:
        return entries
    return [entries[place * (len(entries) - 1) // (most - 1)] for place in range(most)]


def samples_of_run(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples of evenly spaced steps, and the indices of the best and the worst samples of the run."""
    steps = [list(group) for _, group in groupby(records, lambda record: record["step"])]
    ordered = sorted(records, key=lambda record: (record["reward"], record["step"]))
    best = ordered[: -MOST_EXTREME - 1 : -1]
    worst = sorted(ordered, key=lambda record: (record["reward"], -record["step"]))[:MOST_EXTREME]
    kept = {id(record): record for record in (*_fitting(steps), *best, *worst)}
    ordered = sorted(kept.values(), key=lambda record: record["step"])
    indices = {id(record): index for index, record in enumerate(ordered)}
    views = {
        name: [indices[id(record)] for record in extremes] for name, extremes in (("best", best), ("worst", worst))
    }
    return {"samples": [_shortened(record) for record in ordered], "views": views}


def shared_samples(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the newest samples of the prompts that several runs share; a prompt's samples have one number."""
    prompts: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run, records in enumerate(runs):
        for record in records:
            of_prompt = prompts.setdefault(json.dumps(record["prompt"]), {})
            newest = of_prompt.setdefault(run, [])
            if newest and newest[0]["step"] != record["step"]:
                newest.clear()
            newest.append({**record, "run": run})
    shared = [[record for records in runs.values() for record in records] for runs in prompts.values() if len(runs) > 1]
    shared.sort(key=lambda records: -max(record["step"] for record in records))
    chosen = _fitting(shared[:MOST_SAMPLED])
    return {"samples": [_shortened(record) for record in chosen], "views": {}}


def _fitting(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Return the samples of at most MOST_SAMPLED evenly spaced groups in at most MOST_CHARACTERS, or of one group."""
    groups = evenly_spaced(groups, MOST_SAMPLED)
    sizes = [sum(len(json.dumps(_shortened(record))) for record in group) for group in groups]
    for count in range(len(groups), 1, -1):
        places = evenly_spaced(range(len(groups)), count)
        if sum(sizes[place] for place in places) <= MOST_CHARACTERS:
            return [record for place in places for record in groups[place]]
    return [record for group in groups[-1:] for record in group]


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without its response, which the turns have, and with the beginning and end of long texts."""
    prompt = _text(record["prompt"])
    if len(prompt) > MOST_OF_PROMPT:
        half, left_out = MOST_OF_PROMPT // 2, len(prompt) - MOST_OF_PROMPT
        prompt = f"{prompt[:half]}\n[{left_out:,} characters are left out here]\n{prompt[-half:]}"
    # Samples of older runs have no turns.
    turns = record.get("turns", [{"role": "policy", "text": _text(record["response"])}])
    rest = {name: value for name, value in record.items() if name not in ("response", "turns", "prompt")}
    return rest | {"prompt": prompt, "turns": _shortened_turns(turns)}


def _shortened_turns(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    total, half = sum(map(_size, turns)), MOST_TOKENS // 2
    if total <= MOST_TOKENS:
        return [*turns]
    note = {"role": "left out", "text": f"{total - MOST_TOKENS:,} tokens"}
    return [*_first(turns, half), note, *reversed([*_first(turns[::-1], half, backwards=True)])]


def _first(turns: Iterable[Mapping[str, Any]], size: int, *, backwards: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the first `size` tokens of turns; backwards their last tokens."""
    for turn in turns:
        count = min(_size(turn), size)
        cut = dict(turn)
        for name in turn.keys() - {"role", "calls"}:
            length = count * _TOKEN if name == "text" else count
            if isinstance(turn[name], list | str):
                cut[name] = turn[name][-length:] if backwards else turn[name][:length]
        yield cut
        size -= count
        if size <= 0:
            return


def _size(turn: Mapping[str, Any]) -> int:
    return len(turn["texts"]) if "texts" in turn else -(-len(turn["text"]) // _TOKEN)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
