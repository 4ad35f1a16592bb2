"""Conversations of several turns: computed tokens and seconds, with keys and values kept over calls and without.

    python benchmarks/turns.py --shape 8b          # 16 conversations of 8 turns of 1024 tokens; calls of a tool
    python benchmarks/turns.py --shape 1b --conversations 64 --rounds 3 --json turns.json
    python benchmarks/turns.py --tiny              # to see that it works, on a CPU too

Each turn is a call: the policy draws, and then further tokens stand for the answer of an environment. "turns" draws
128 of the 1024 tokens of each of 8 turns behind a prompt of 256. "calculator" has the sizes of a question with a tool
in the chat template of a Qwen3: a prompt of 192 tokens, 32 drawn tokens and an answer of 16, in 3 turns. Weights are
random, and nothing stops early. Times are medians of the calls alone, after a first turn that is not counted. At 8B
each token takes 16 GFLOP, and without kept keys 64 conversations compute 2 million prompt tokens.
"""

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import torch
from measure import machine, synchronize, table, write_json
from rollouts import LARGE, SHAPE, TINY, random_engine

from parallel_layers import ParallelDims
from parallel_models import GenerationOptions
from parallel_models.generation import Prompt, draw_responses, end_sessions
from parallel_models.training import ParallelEngine


class Case(NamedTuple):
    """The sizes of conversations, in tokens."""

    turns: int
    prompt: int
    drawn: int
    answer: int

    @property
    def longest(self) -> int:
        """Return the number of tokens of a whole conversation."""
        return self.prompt + self.turns * (self.drawn + self.answer)


CASES = {"turns": Case(8, 256, 128, 896), "calculator": Case(3, 192, 32, 16)}
TINY_CASES = {"turns": Case(3, 70, 8, 64), "calculator": Case(3, 192, 8, 16)}


def converse(engine: ParallelEngine, case: Case, count: int, *, keeps: bool) -> tuple[list[int], list[float]]:
    """Return the prompt tokens that each turn computes, and its seconds."""
    device, vocabulary = engine.grid.device, engine.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = list(torch.randint(1, vocabulary, (count, case.prompt), generator=generator).to(device))
    computed, seconds = [], []
    for turn in range(case.turns):
        options = GenerationOptions(
            case.drawn, max_length=case.longest, max_sequences=count, seed=turn, keep_cache=keeps
        )
        synchronize()
        begun = time.perf_counter()
        drawn = draw_responses(engine, [Prompt(prompt) for prompt in prompts], options, 16384)
        synchronize()
        seconds.append(time.perf_counter() - begun)
        computed.append(sum(drawn.computed))
        answers = torch.randint(1, vocabulary, (count, case.answer), generator=generator).to(device)
        prompts = [torch.cat(parts) for parts in zip(prompts, drawn.tokens, answers, strict=True)]
    end_sessions()
    return computed, seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["1b", *LARGE], default="1b", help="The model.")
    parser.add_argument("--conversations", type=int, default=16, help="Number of conversations.")
    parser.add_argument("--rounds", type=int, default=1, help="Conversations that are counted.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model and short conversations.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape, cases, count = LARGE.get(args.shape, SHAPE), CASES, args.conversations
    if args.tiny:
        shape, cases, count = {**SHAPE, **TINY}, TINY_CASES, 4
    engine = random_engine({"rms_norm_eps": 1e-5} | shape, ParallelDims())
    report: dict[str, Any] = {}
    rows = []
    for name, case in cases.items():
        for keeps in (False, True):
            converse(engine, case._replace(turns=1), count, keeps=keeps)
            rounds = [converse(engine, case, count, keeps=keeps) for _ in range(args.rounds)]
            computed = rounds[0][0]
            whole = statistics.median(sum(seconds) for _, seconds in rounds)
            turns = [statistics.median(times) for times in zip(*(seconds for _, seconds in rounds), strict=True)]
            title = f"{name}, {'kept' if keeps else 'anew'}"
            report[title] = {"computed": computed, "seconds": whole, "seconds of turns": turns}
            rows.append((title, f"{sum(computed)}", f"{whole:.2f}", f"{turns[0]:.2f}", f"{turns[-1]:.2f}"))
    print(json.dumps(machine()))
    print(table(("", "prompt tokens computed", "seconds", "of the first turn", "of the last turn"), rows))
    write_json(args.json, turns=report)


if __name__ == "__main__":
    main()
