"""The samples on the page of a run or of a comparison: which ones, and how much of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any, TypeVar

from rl_train.trajectories.saved_rollouts import Response

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


def samples_of_run(
    rewards: Sequence[tuple[int, float]], prompts_of: Callable[[int], Iterable[Sequence[Response]]]
) -> dict[str, Any]:
    """Return samples of evenly spaced steps, and the indices of the best and the worst samples of the run.

    Args:
        rewards: The step and the reward of each response of the run, in the order of the steps.
        prompts_of: Returns the responses of a step, prompt by prompt, each with its number in `rewards`.
    """
    numbers = range(len(rewards))
    # Of responses with equal rewards the newest ones come first.
    extremes = {
        "best": nsmallest(MOST_EXTREME, numbers, lambda number: (-rewards[number][1], -rewards[number][0])),
        "worst": nsmallest(MOST_EXTREME, numbers, lambda number: (rewards[number][1], -rewards[number][0])),
    }
    wanted = {number for numbers in extremes.values() for number in numbers}
    spaced = evenly_spaced([*dict.fromkeys(step for step, _ in rewards)], MOST_SAMPLED)
    kept, room = dict[int, dict[str, Any]](), 0.0
    for step in sorted({*spaced} | {rewards[number][0] for number in wanted}):
        begins, is_full = True, step not in spaced
        room += 0 if is_full else MOST_CHARACTERS / len(spaced)
        for responses in prompts_of(step):
            kept |= {number: _shortened(read()) for number, read in responses if number in wanted}
            if is_full:
                continue
            records = {number: _shortened(read()) for number, read in responses}
            size = sum(map(_characters, records.values()))
            if is_full := size > room:
                # A step has one response at least.
                records = dict([*records.items()][:begins])
                size = sum(map(_characters, records.values()))
            kept, room, begins = kept | records, room - size, False
    indices = {number: index for index, number in enumerate(sorted(kept))}
    views = {name: [indices[number] for number in numbers] for name, numbers in extremes.items()}
    return {"samples": [kept[number] for number in sorted(kept)], "views": views, "total": len(rewards)}


def samples_of_lines(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `samples_of_run` of the lines of `samples.jsonl`."""
    steps: dict[int, dict[Any, list[Response]]] = {}
    for number, record in enumerate(records):
        prompt = (record.get("line"), record.get("source"))
        steps.setdefault(record["step"], {}).setdefault(prompt, []).append((number, partial(dict, record)))
    rewards = [(record["step"], record["reward"]) for record in records]
    return samples_of_run(rewards, lambda step: steps[step].values()) | {"total": 0}


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
    return {"samples": _fitting(shared[:MOST_SAMPLED]), "views": {}, "total": 0}


def _fitting(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the samples of evenly spaced groups, as many as have at most MOST_CHARACTERS, or those of one group."""
    shortened = [[_shortened(record) for record in group] for group in groups]
    sizes = [sum(map(_characters, group)) for group in shortened]
    for count in range(len(groups), 1, -1):
        places = evenly_spaced(range(len(groups)), count)
        if sum(sizes[place] for place in places) <= MOST_CHARACTERS:
            return [record for place in places for record in shortened[place]]
    return [record for group in shortened[-1:] for record in group]


def _characters(record: Mapping[str, Any]) -> int:
    return len(json.dumps(record))


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without its response, which the turns have, and with the beginning and end of long texts."""
    prompt = _text(record["prompt"])
    if len(prompt) > MOST_OF_PROMPT:
        half, left_out = MOST_OF_PROMPT // 2, len(prompt) - MOST_OF_PROMPT
        prompt = f"{prompt[:half]}\n[{left_out:,} characters are left out here]\n{prompt[-half:]}"
    # Samples of older runs have no turns.
    turns = record["turns"] if "turns" in record else [{"role": "policy", "text": _text(record["response"])}]
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
