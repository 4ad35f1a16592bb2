"""A run of `rl-train` with random weights, prompts and rewards, and how busy the GPUs are in it."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from measure import CUDA
from rollouts import write_model

# Of a step, in its metrics as seconds_*.
PHASES = ("generating", "scoring", "estimating", "learning", "syncing_weights")
REWARD = "import random\n\ndef reward(prompt, response, row):\n    return random.random()\n"


class _Counted(Exception):
    """The counted steps are done."""


def write_run(folder: Path, work: Path, shape: dict[str, Any], prompt: int) -> None:
    """Write `prompts.jsonl`, of `prompt` tokens each, the module `random_rewards`, and a checkpoint where none is."""
    if not list(folder.glob("*.safetensors")):
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder, shape, weights=True)
        if CUDA:
            torch.cuda.empty_cache()
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(1, shape["vocab_size"], (4096, prompt), generator=random).tolist()
    (work / "prompts.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    (work / "random_rewards.py").write_text(REWARD)


def run_steps(
    folder: Path, work: Path, name: str, *, warm_up: int, rounds: int, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[float]]:
    """Train in the folder `name` of `work`, and return the metrics of the counted steps, and each GPU's idle %.

    The run is longer, because in its last steps nothing is drawn any more, and ends after the counted steps.
    """
    from rl_train.loop import check_run, train
    from rl_train.options import TrainOptions

    last = warm_up + rounds
    resolved = TrainOptions(
        model=folder,
        prompts=work / "prompts.jsonl",
        reward="random_rewards:reward",
        out=work / name,
        steps=last + options.get("staleness", 0),
        save_every=0,
        show_every=0,
        device="cuda" if CUDA else "cpu",
        **options,
    )
    ends = dict[int, float]()

    def follow(event: Mapping[str, Any]) -> None:
        if "step" in event and "reward" in event:
            ends[event["step"]] = time.time()
            if event["step"] == last:
                raise _Counted

    with busy_shares() as shares, suppress(_Counted):
        train(check_run(resolved), follow)
    lines = (work / name / "metrics.jsonl").read_text().splitlines()
    gpus = range(torch.cuda.device_count())
    idle = [100 - mean_share(shares, gpu, ends[warm_up], ends[last]) for gpu in gpus]
    return [json.loads(line) for line in lines[warm_up:last]], idle


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
