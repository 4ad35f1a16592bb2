"""The quickstart: make a checkpoint, check it, train it as `rl-train train` does, and check the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from parallel_layers import ParallelDims
from parallel_models import OptimizerOptions, SamplingOptions
from rl_train.cluster.fork_server import prepare
from rl_train.cluster.launch import Devices
from rl_train.loop.checked_run import check_run
from rl_train.loop.folder import check_foreign, check_output, locked, write_options
from rl_train.loop.run import train_in_place
from rl_train.loop.score import ScoreOptions, score
from rl_train.options.groups import CriticOptions, ObjectiveOptions
from rl_train.options.options import TrainOptions
from rl_train.quickstart.task import RESPONSE_LENGTH, make_checkpoint, write_prompts
from rl_train.report.html_report import PAGE, draw_curve, missing_plots
from rl_train.report.lines import read_lines


def quickstart(
    out: Path, steps: int, seed: int, device: str | None, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Make a checkpoint, train it by PPO on 2 ranks, and compare both checkpoints with transformers.

    The arguments are the command's options; `tell` is called with the metrics of every step and with messages
    (`rl_train.report.terminal.Display`). The result has JSON values.

    Raises:
        RankFailed: A rank failed.
        ValueError: An option is out of its range, `out` cannot take the results, or another run is at work there.
    """
    if steps < 10:
        raise ValueError(f"steps={steps} must be at least 10: the reward is compared between tenths")
    files = ["reward.png", "prompts.jsonl", "options.json", "metrics.jsonl"]
    check_output(out, files=files, checkpoints=["start", "actor", "critic"])
    check_foreign(out, mark="start")
    with locked(out):
        return _run(out, steps, seed, device, tell)


def _run(
    out: Path, steps: int, seed: int, device: str | None, tell: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    began = time.monotonic()
    devices = Devices.find(device)
    # One CUDA device runs one rank: NCCL does not put two ranks on a device.
    ranks = 1 if devices.count == 1 else 2
    dims = ParallelDims(tp=ranks)
    prepare("rl_train.loop.score", "rl_train.loop.run")
    start, prompts = out / "start", out / "prompts.jsonl"
    make_checkpoint(start, seed)
    write_prompts(prompts)
    tell({"message": f"made a small Llama and its tokenizer in {start}"})
    described = f"{ranks} x {devices.type} ({devices.backend}), tp {ranks}" + (", sequence parallel" * (ranks > 1))
    tell({"message": f"starting {described}"})

    parity = _max_difference(start, dims, device)
    tell({"message": f"actor against transformers: largest difference in log-probs {parity:.1e}"})

    run = TrainOptions(
        model=start,
        prompts=prompts,
        reward="rl_train.quickstart.task:reward",
        out=out,
        algorithm="ppo",
        dims=f"tp={ranks}",
        device=device,
        steps=steps,
        prompts_per_step=64,
        stop_ids="",
        seed=seed,
        epochs=2,
        mini_batch=32,
        save_every=0,
        sampling=SamplingOptions(RESPONSE_LENGTH),
        optimizer=OptimizerOptions(3e-3),
        critic=CriticOptions(learning_rate=3e-3),
        objective=ObjectiveOptions(lam=0.95, kl_coefficient=0.002, entropy_coefficient=0.01),
    )
    write_options(run)
    last: dict[str, Any] = {}

    def on_event(event: Mapping[str, Any]) -> None:
        last.update(event)
        tell(event)

    train_in_place(check_run(run), on_event)

    reload = _max_difference(out / "actor", dims, device)
    tell({"message": f"saved actor, reloaded by transformers: largest difference in log-probs {reload:.1e}"})
    records = read_lines(out / "metrics.jsonl")
    rewards = [record["reward"] for record in records]
    curve, advice = out / "reward.png", missing_plots()
    if advice is None:
        title = "Learning to continue the alphabet"
        draw_curve(curve, {"title": title, "names": ["reward"], "stacked": False}, records)
    else:
        curve = out / PAGE
        tell({"message": f"the rewards are in {curve}; {advice}"})
    tenth = len(rewards) // 10
    return {
        "parity_max_abs": parity,
        "reload_max_abs": reload,
        "reward_first": sum(rewards[:tenth]) / tenth,
        "reward_last": sum(rewards[-tenth:]) / tenth,
        "seconds": time.monotonic() - began,
        "tokens_per_second": sum(record["tokens"] for record in records) / sum(record["seconds"] for record in records),
        "checkpoint": str(out / "actor"),
        "critic": str(out / "critic"),
        "curve": str(curve),
        "sample": last["sample"]["prompt"] + last["sample"]["response"],
        "ranks": described,
        "steps": steps,
        "seed": seed,
    }


def _max_difference(folder: Path, dims: ParallelDims, device: str | None) -> float:
    """Return the largest difference of log-probs between the sharded actor and transformers, of one checkpoint."""
    generator = torch.Generator().manual_seed(0)
    # Ragged lengths; tp does not divide their sum.
    sequences = [torch.randint(1, 30, (length,), generator=generator).tolist() for length in (11, 1, 17, 6)]
    records: list[dict[str, Any]] = []
    score(ScoreOptions(folder, dims=dims, device=device), sequences, records.append)
    expected = transformers_log_probs(folder, sequences)
    return max(
        float((torch.tensor(record["log_probs"]) - log_probs).abs().max())
        for record, log_probs in zip(records, expected, strict=True)
    )


@torch.no_grad()
def transformers_log_probs(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Return each token's log-prob by plain transformers, `[L]` for each sequence, 0 for the first token."""
    # transformers takes seconds to import, and only the checks need it in this process.
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    rows = []
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        predicted = model(tokens[None]).logits[0].float().log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), predicted[:-1].gather(-1, tokens[1:, None])[:, 0]]))
    return rows
