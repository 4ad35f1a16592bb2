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
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, machine, table, write_json
from rollouts import LARGE, SHAPE, TINY, write_model

# The tied embedding of a random model draws the last token again and again.
SHAPES: dict[str, dict[str, Any]] = {"1b": SHAPE | {"tie_word_embeddings": False}, "8b": LARGE["8b"]}
REWARD = "import random\n\ndef reward(prompt, response, row):\n    return random.random()\n"


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
        folder, work = (args.folder or Path(name) / "model").absolute(), Path(name)
        if not list(folder.glob("*.safetensors")):
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder, shape, weights=True)
            if CUDA:
                torch.cuda.empty_cache()
        random = torch.Generator().manual_seed(0)
        rows = torch.randint(1, shape["vocab_size"], (4096, 5 if args.tiny else 128), generator=random).tolist()
        (work / "prompts.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
        (work / "random_rewards.py").write_text(REWARD)
        os.chdir(work)
        for mode in args.modes:
            report[mode] = measure(folder, work, shape["vocab_size"], mode, args)
            print(mode, json.dumps(report[mode]), flush=True)
    print(json.dumps(machine()))
    columns = list(next(iter(report.values())))
    print(table(("", *columns), [(mode, *figures.values()) for mode, figures in report.items()]))
    write_json(args.json, modes=report)


PHASES = ("generating", "scoring", "estimating", "learning", "syncing_weights")
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one-off": {"staleness": 1},
    "in-flight": {"in_flight": True},
    "recompute": {"in_flight": True, "rollouts.stale_cache": "recompute"},
}


def measure(folder: Path, work: Path, vocab_size: int, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Run the steps of a mode, and return its figures."""
    from rl_train.loop import check_run, train
    from rl_train.options import TrainOptions

    how = MODES[mode] | ({"staleness": args.staleness} if "in_flight" in MODES[mode] else {})
    staleness = how.get("staleness", 0)
    warm_up = 2 + staleness
    large = {"lora_rank": 16, "recompute": "full"} if args.shape == "8b" else {}
    options = TrainOptions(
        model=folder,
        prompts=work / "prompts.jsonl",
        reward="random_rewards:reward",
        out=work / mode,
        # In the last steps of a run nothing is drawn any more.
        steps=warm_up + args.rounds + staleness,
        prompts_per_step=args.prompts,
        samples=8,
        max_new_tokens=args.longest,
        rollouts={
            "engine": args.engine,
            "devices": "1" if CUDA else "cpu",
            "max_sequences": 8 * args.prompts,
            "memory": 0.85,
        },
        stop_ids=",".join(map(str, range(vocab_size // args.mean))),
        learning_rate=1e-6,
        save_every=0,
        show_every=0,
        device="cuda" if CUDA else "cpu",
        **large,
        **how,
    )
    ends = dict[int, float]()

    def follow(event: Mapping[str, Any]) -> None:
        if "step" in event and "reward" in event:
            ends[event["step"]] = time.time()

    with busy_shares() as shares:
        train(check_run(options), follow)
    records = [json.loads(line) for line in (work / mode / "metrics.jsonl").read_text().splitlines()]
    records = records[warm_up : warm_up + args.rounds]
    seconds = sum(record["seconds"] for record in records)
    tokens = sum(record["response_length"] * record["responses"] for record in records)
    idle = [100 - mean_share(shares, gpu, ends[warm_up], ends[warm_up + args.rounds]) for gpu in (0, 1)]
    return {
        "tokens/s": tokens / seconds,
        "s a step": seconds / len(records),
        **{f"{phase} %": 100 * sum(record[f"seconds_{phase}"] for record in records) / seconds for phase in PHASES},
        "learner idle %": idle[0],
        "drawer idle %": idle[1],
        "mean staleness": sum(record.get("staleness_mean", 0) for record in records) / len(records),
        "tokens a response": tokens / sum(record["responses"] for record in records),
    }


@contextmanager
def busy_shares() -> Iterator[list[tuple[float, int, float]]]:
    """Yield a list that is, after the block, of (time, GPU, percent of the last moment in which a kernel ran)."""
    shares: list[tuple[float, int, float]] = []
    if not CUDA:
        yield shares
        return
    query = ["nvidia-smi", "--query-gpu=timestamp,index,utilization.gpu", "--format=csv,noheader,nounits"]
    query += ["-lms", "200"]
    with tempfile.TemporaryFile("w+") as file, subprocess.Popen(query, stdout=file) as process:
        try:
            yield shares
        finally:
            process.terminate()
            process.wait()
            file.seek(0)
            for line in file.read().splitlines():
                stamp, gpu, percent = line.split(", ")
                moment, _, fraction = stamp.partition(".")
                seconds = time.mktime(time.strptime(moment, "%Y/%m/%d %H:%M:%S")) + float(f"0.{fraction}")
                shares.append((seconds, int(gpu), float(percent)))


def mean_share(shares: list[tuple[float, int, float]], gpu: int, begin: float, end: float) -> float:
    """Return the mean percent of a GPU between two times; NaN without any."""
    percents = [percent for seconds, number, percent in shares if number == gpu and begin <= seconds <= end]
    return sum(percents) / len(percents) if percents else float("nan")


if __name__ == "__main__":
    main()
