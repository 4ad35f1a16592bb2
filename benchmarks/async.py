"""Learn on one GPU and draw on another: synchronous, one step off policy, and in flight, by `rl-train`'s own loop.

    python benchmarks/async.py                                     # 1B shape, all weights learn
    python benchmarks/async.py --shape 8b --folder /tmp/8b         # 8B shape with LoRA; a second call reads the folder
    python benchmarks/async.py --shape 8b --folder /tmp/8b --modes in-flight recompute
    python benchmarks/async.py --engine vllm
    python benchmarks/async.py --tiny                              # to see that it works, on CPUs

Random weights draw nearly uniformly, so with V / `mean` stop ids the lengths of responses are geometric: `mean` tokens
on average, cut at `longest`. Rewards are random. The first GPU learns by GRPO, the native engine or vLLM draws on the
second one, as many responses at a time as a step has. The first `staleness` + 2 steps and the last `staleness` steps
are not counted. The shares of the loop's phases follow: in "generating" the learner waits for responses. "learner idle"
and "drawer idle" are by nvidia-smi the shares of the time in which no kernel runs on a GPU (- where there is no GPU).
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from measure import CUDA, machine, table, write_json
from random_run import PHASES, run_steps, write_run
from rollouts import LARGE, SHAPE, TINY

# The tied embedding of a random model draws the last token again and again.
SHAPES: dict[str, dict[str, Any]] = {"1b": SHAPE | {"tie_word_embeddings": False}, "8b": LARGE["8b"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="The model.")
    parser.add_argument("--modes", nargs="+", default=["synchronous", "one-off", "in-flight"], choices=MODES)
    parser.add_argument("--engine", choices=["native", "vllm"], default="native", help="What draws.")
    parser.add_argument("--staleness", type=int, default=6, help="Versions that a token in flight may be old.")
    parser.add_argument("--prompts", type=int, default=32, help="Prompts of a step, with 8 responses each.")
    parser.add_argument("--mean", type=int, default=600, help="Mean number of tokens of a response.")
    parser.add_argument("--longest", type=int, default=4096, help="Maximum number of tokens of a response.")
    parser.add_argument("--rounds", type=int, default=6, help="Steps that are counted.")
    parser.add_argument("--folder", type=Path, help="Keep the checkpoint here, or take it from here.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model and few tokens.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.tiny:
        shape, args.prompts, args.mean, args.longest = {**shape, **TINY, "head_dim": 64}, 4, 10, 40
    report = {}
    with tempfile.TemporaryDirectory() as name:
        folder, work = args.folder or Path(name) / "model", Path(name)
        write_run(folder.absolute(), work, shape, prompt=5 if args.tiny else 128)
        os.chdir(work)
        for mode in args.modes:
            report[mode] = measure(folder.absolute(), work, shape["vocab_size"], mode, args)
            print(mode, json.dumps(report[mode]), flush=True)
    print(json.dumps(machine()))
    columns = list(next(iter(report.values())))
    print(table(("", *columns), [(mode, *figures.values()) for mode, figures in report.items()]))
    write_json(args.json, modes=report)


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one-off": {"staleness": 1},
    "in-flight": {"in_flight": True},
    "recompute": {"in_flight": True, "rollouts.stale_cache": "recompute"},
}


def measure(folder: Path, work: Path, vocab_size: int, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Run the steps of a mode, and return its figures."""
    how = MODES[mode] | ({"staleness": args.staleness} if "in_flight" in MODES[mode] else {})
    options = {
        "prompts_per_step": args.prompts,
        "samples": 8,
        "max_new_tokens": args.longest,
        "rollouts": {
            "engine": args.engine,
            "devices": "1" if CUDA else "cpu",
            "max_sequences": 8 * args.prompts,
            **({"memory": 0.85} if args.engine == "vllm" else {}),
        },
        "stop_ids": ",".join(map(str, range(vocab_size // args.mean))),
        "learning_rate": 1e-6,
        **({"lora_rank": 16, "recompute": "full"} if args.shape == "8b" else {}),
        **how,
    }
    warm_up = 2 + how.get("staleness", 0)
    records, idle = run_steps(folder, work, mode, warm_up=warm_up, rounds=args.rounds, options=options)
    seconds = sum(record["seconds"] for record in records)
    tokens = sum(record["response_length"] * record["responses"] for record in records)
    learner, drawer = idle or (math.nan, math.nan)
    return {
        "tokens/s": tokens / seconds,
        "s a step": seconds / len(records),
        **{f"{phase} %": 100 * sum(record[f"seconds_{phase}"] for record in records) / seconds for phase in PHASES},
        "learner idle %": learner,
        "drawer idle %": drawer,
        "mean staleness": sum(record.get("staleness_mean", 0) for record in records) / len(records),
        "tokens a response": tokens / sum(record["responses"] for record in records),
    }


if __name__ == "__main__":
    main()
