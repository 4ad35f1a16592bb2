"""The quickstart from end to end, in the process that the user started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_models.batch import Batch
from rl_train.cluster.launch import Devices, prepare, run_on_ranks
from rl_train.planner.preflight import check_foreign, check_output, remove_leftovers
from rl_train.quickstart.learn import Settings, learn, probe_batch
from rl_train.quickstart.report import Display, save_curve
from rl_train.quickstart.task import make_checkpoint


@dataclass(frozen=True)
class QuickstartOptions:
    """What a user may choose.

    Attributes:
        out: folder for the checkpoints and the curve.
        steps: of learning, at least 10.
        seed: of the weights, the prompts and the draws.
        device: "cpu", "cuda" or another accelerator that torch finds; None: an accelerator where there is one.
    """

    out: Path = Path("quickstart")
    steps: int = 60
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 10:
            raise ValueError(f"steps={self.steps} must be at least 10: the reward is compared between tenths")
        check_output(self.out, files=["reward.png"], checkpoints=["start", "actor", "critic"])
        check_foreign(self.out, mark="start")


def quickstart(options: QuickstartOptions, display: Display) -> dict[str, Any]:
    """Make a checkpoint, learn from it on 2 ranks, save, reload; returns what is printed.

    Raises:
        RankFailed: a rank failed.
        ValueError: an option is out of its range.
    """
    began = time.monotonic()
    prepare(learn.__module__, "rl_models.engines.transformers.engine")
    devices = Devices.find(options.device)
    # One CUDA device runs one rank: NCCL does not put two ranks on a device.
    ranks = 1 if devices.count == 1 else 2
    start = options.out / "start"
    options.out.mkdir(parents=True, exist_ok=True)
    make_checkpoint(start, options.seed)
    display.say(f"made a small Llama and its tokenizer in {start}")
    described = f"{ranks} x {devices.type} ({devices.backend}), tp {ranks}" + (", sequence parallel" * (ranks > 1))
    display.say(f"starting {described}")

    seen: dict[str, Any] = {"sample": ""}

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "parity":
            seen["parity"] = _max_difference(event["log_probs"], start)
            display.say(f"actor against transformers: largest difference in log-probs {seen['parity']:.1e}")
        else:
            seen["sample"] = event["sample"]
            display.step(event)

    settings = Settings(start, options.out, ranks, options.steps, options.seed, options.device)
    try:
        learned = run_on_ranks(learn, ranks, settings, devices=devices, on_event=on_event)
    finally:
        remove_leftovers(options.out)

    reload_difference = _max_difference(learned["log_probs"], options.out / "actor")
    display.say(f"saved actor, reloaded by transformers: largest difference in log-probs {reload_difference:.1e}")
    rewards = learned["rewards"]
    curve = options.out / "reward.png"
    save_curve(curve, rewards)
    tenth = max(1, len(rewards) // 10)
    return {
        "parity_max_abs": seen["parity"],
        "reload_max_abs": reload_difference,
        "reward_first": sum(rewards[:tenth]) / tenth,
        "reward_last": sum(rewards[-tenth:]) / tenth,
        "seconds": time.monotonic() - began,
        "tokens_per_second": learned["tokens_per_second"],
        "checkpoint": str(options.out / "actor"),
        "critic": str(options.out / "critic"),
        "curve": str(curve),
        "sample": seen["sample"],
        "ranks": described,
        "steps": options.steps,
        "seed": options.seed,
    }


def _max_difference(log_probs: Tensor, folder: Path) -> float:
    """Between an actor's log-probabilities of the probe batch and those of transformers, loaded from a folder."""
    expected = transformers_log_probs(folder, probe_batch())
    return float((log_probs - expected).abs().max())


@torch.no_grad()
def transformers_log_probs(folder: Path, batch: Batch) -> Tensor:
    """`[T]`: each token's log-probability by plain transformers, one sequence at a time."""
    # transformers takes seconds to import, and only the checks need it in this process.
    from transformers import AutoModelForCausalLM

    from rl_models.engines.transformers.hub import load_model

    model, _ = load_model(AutoModelForCausalLM, folder)
    rows = []
    for tokens in batch.split():
        predicted = model(tokens[None]).logits[0].float().log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1), predicted[:-1].gather(-1, tokens[1:, None])[:, 0]]))
    return torch.cat(rows)
