"""Train SmolLM2 as examples/smollm2 does, by `rl-train train` and by TRL: the same prompts, rewards and sizes.

    python benchmarks/grpo.py --model FOLDER --seeds 3    # FOLDER: examples/smollm2 makes it
    python benchmarks/grpo.py --model FOLDER --seeds 3 --lora-rank 16    # beside full training
    python benchmarks/grpo.py --model FOLDER --seeds 3 --lora-rank 16 --only rl-train-lora --together
    python benchmarks/grpo.py --model FOLDER --steps 25 --peers trl
    python benchmarks/grpo.py --model FOLDER --steps 2 --prompts-per-step 4 --samples 4 --max-new-tokens 8    # on a CPU

Greedy answers to the held-out questions are scored every few steps. Seconds are those of training alone, without start
and evaluation. With --lora-rank each seed also learns with low-rank adapters, at ten times the learning rate.
--together starts all runs at once on the device: rewards are the same, seconds are not. TRL keeps fp32 weights and
computes in bf16, as rl-train's optimizer does, and recomputes no activation.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import flags, machine, table, write_json

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "smollm2"
LORA = "rl-train-lora"
SIZES = ("steps", "prompts_per_step", "samples", "max_new_tokens", "eval_every")


def main() -> None:
    given = tomllib.loads((EXAMPLE / "full.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("grpo"))
    parser.add_argument("--seeds", type=int, default=1)
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=given[name])
    parser.add_argument("--peers", nargs="*", choices=("trl", "trl-vllm"), default=[])
    parser.add_argument("--lora-rank", type=int, default=0, help="also train adapters of this rank")
    rate = float(f"{10 * given['learning_rate']:g}")
    parser.add_argument("--lora-learning-rate", type=float, default=rate, help="of the adapters (default: %(default)s)")
    parser.add_argument("--only", nargs="+", help="these of the runs alone, such as rl-train-lora")
    parser.add_argument("--together", action="store_true", help="start all runs at once")
    parser.add_argument("--json")
    parser.add_argument("--run", choices=("trl", "trl-vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        of_trl(options, given, vllm=options.run == "trl-vllm")
        return
    sys.path.insert(0, str(EXAMPLE))
    from run import TASKS
    from task import make_task

    make_task(options.out / "task", **TASKS["full"])
    names = ["rl-train", *[LORA] * bool(options.lora_rank), *options.peers]
    runs = [(name, seed) for seed in range(options.seeds) for name in options.only or names]
    found, curves, begun = {}, {}, {}
    if options.together:
        begun = {run: begin(options, *run) for run in runs}
    for name, seed in runs:
        process, began = begun.get((name, seed)) or begin(options, name, seed)
        failed = process.wait() != 0
        lines = (options.out / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        title = f"{name}, seed {seed}" + f" (failed after step {records[-1]['step']})" * failed
        found[title] = described(records, time.monotonic() - began)
        curves[title] = {record["step"]: record["eval/reward"] for record in records if "eval/reward" in record}
    columns = list(next(iter(found.values())))
    print(machine())
    print(table(["run", *columns], [[name, *(values[column] for column in columns)] for name, values in found.items()]))
    for name, curve in curves.items():
        print(f"held-out reward of {name} by step:", ", ".join(f"{step}: {value:.3f}" for step, value in curve.items()))
    write_json(options.json, runs=found, held_out=curves)


def begin(options: argparse.Namespace, name: str, seed: int) -> tuple[subprocess.Popen[bytes], float]:
    """Start a run, and return its process and the time."""
    (options.out / f"{name}-{seed}").mkdir(parents=True, exist_ok=True)
    peer = [*sys.argv, "--run", name, "--seed", str(seed), "--out", str(options.out)]
    arguments = of_rl_train(options, seed, name) if name in ("rl-train", LORA) else peer
    return subprocess.Popen([sys.executable, *arguments]), time.monotonic()


def of_rl_train(options: argparse.Namespace, seed: int, name: str) -> list[str]:
    """Return the arguments of `rl-train train`; with the name `LORA` those of training adapters."""
    lora = {"lora-rank": options.lora_rank, "learning-rate": options.lora_learning_rate} if name == LORA else {}
    values = {
        "config": EXAMPLE / "full.toml",
        "model": options.model,
        "prompts": options.out / "task" / "prompts.jsonl",
        "eval-prompts": options.out / "task" / "eval.jsonl",
        **{name.replace("_", "-"): getattr(options, name) for name in SIZES},
        "save-every": 0,
        "seed": seed,
        "out": options.out / f"{name}-{seed}",
        **lora,
    }
    return ["-m", "rl_train", "train", *flags(values)]


class TrlRun:
    """The prompts and settings of TRL's trainers, and a callback that writes `metrics.jsonl` as rl-train does.

    Args:
        options: The arguments of the benchmark.
        given: The settings of the TOML file.
        name: The name of the run.
        logged: The number of TRL's log that ends a step.
        row: The columns of a row, from its chat and the row.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        given: dict[str, Any],
        name: str,
        logged: str,
        row: Callable[[list[Any], dict[str, Any]], dict[str, Any]],
    ) -> None:
        import pyarrow
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer

        self.options, self.logged = options, logged
        rows, self.held_out = (
            [json.loads(line) for line in (options.out / "task" / file).read_text().splitlines()]
            for file in ("prompts.jsonl", "eval.jsonl")
        )
        self.system = [{"role": "system", "content": given["system_prompt"]}]
        questions = pyarrow.Table.from_pylist([row(self.system + entry["messages"], entry) for entry in rows])
        # Without a fingerprint datasets pickles the table, which fails with pyarrow 24.
        self.data = Dataset(questions, fingerprint="questions")
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left", trust_remote_code=False)
        self.file = options.out / name / "metrics.jsonl"
        self.file.unlink(missing_ok=True)
        self.config = {
            "output_dir": str(self.file.parent / "trl"),
            "max_steps": options.steps,
            "learning_rate": given["learning_rate"],
            "lr_scheduler_type": "constant",
            "max_grad_norm": 1.0,
            "gradient_checkpointing": False,
            "bf16": True,
            "use_cpu": not torch.cuda.is_available(),
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "seed": options.seed,
            "disable_tqdm": True,
        }

    def callback(self) -> Any:
        """Return the callback of a trainer."""
        import torch
        from transformers import TrainerCallback

        run, options = self, self.options

        class Record(TrainerCallback):
            began = 0.0

            def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
                run.write(0, {"eval/reward": run.greedy(model)})

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.began = self.began or time.monotonic()

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **_: Any
            ) -> None:
                if run.logged not in logs:
                    return
                torch.cuda.synchronize() if torch.cuda.is_available() else None
                values = {"seconds": time.monotonic() - self.began, run.logged: logs[run.logged]}
                values["response_length"] = logs.get("completions/mean_length", 0.0)
                if state.global_step % options.eval_every == 0 or state.global_step == options.steps:
                    values["eval/reward"] = run.greedy(model)
                run.write(state.global_step, values)
                self.began = time.monotonic()

        return Record()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics of a step."""
        with self.file.open("a") as lines:
            lines.write(json.dumps({"step": step, **values}) + "\n")

    def greedy(self, model: Any) -> float:
        """Return the share of right answers to the held-out questions."""
        import torch

        from rl_train.rewards import number_match

        chats = [self.system + row["messages"] for row in self.held_out]
        form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        inputs = self.tokenizer.apply_chat_template(chats, **form).to(model.device)
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
            drawn = model.generate(**inputs, max_new_tokens=self.options.max_new_tokens, do_sample=False)
        texts = self.tokenizer.batch_decode(drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        pairs = zip(texts, self.held_out, strict=True)
        return sum(number_match(None, text, row)[0] for text, row in pairs) / len(texts)


def of_trl(options: argparse.Namespace, given: dict[str, Any], *, vllm: bool) -> None:
    """Train by TRL's GRPOTrainer, and write the same `metrics.jsonl`."""
    from trl import GRPOConfig, GRPOTrainer

    from rl_train.rewards import number_match

    name = f"{options.run}-{options.seed}"
    run = TrlRun(options, given, name, "reward", lambda chat, row: {"prompt": chat, "answer": row["answer"]})

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [number_match(None, completion[0]["content"], {"answer": right})[0] for completion, right in pairs]

    whole = options.prompts_per_step * options.samples
    share = min(256, whole)
    config = GRPOConfig(
        per_device_train_batch_size=share,
        gradient_accumulation_steps=whole // share,
        num_generations=options.samples,
        max_completion_length=options.max_new_tokens,
        loss_type="grpo",
        use_vllm=vllm,
        vllm_enable_sleep_mode=vllm,
        model_init_kwargs={"dtype": "float32"},
        **run.config,
    )
    trainer = GRPOTrainer(
        str(options.model), reward, config, run.data, processing_class=run.tokenizer, callbacks=[run.callback()]
    )
    trainer.train()


def described(records: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the row of a run: seconds of steps, and when the held-out reward was what."""
    steps = [record for record in records if record["step"]]
    times = [record["seconds"] for record in steps]
    spent, passed, first, within = 0.0, {0.45: "-", 0.6: "-"}, 0.0, 0.0
    for record in records:
        spent += record.get("seconds", 0.0)
        reward = record.get("eval/reward")
        if reward is None:
            continue
        first = reward if record["step"] == 0 else first
        within = reward if spent <= 300 else within
        for mark, when in passed.items():
            passed[mark] = f"{spent:.0f}" if when == "-" and reward >= mark else when
    later = times[1:] or times
    return {
        "first step, s": f"{times[0]:.1f}",
        "step, s": f"{sum(later) / len(later):.2f}",
        "tokens a response": f"{sum(r['response_length'] for r in steps) / len(steps):.0f}",
        "held-out at first": f"{first:.3f}",
        **{f"s to {mark}": when for mark, when in passed.items()},
        "held-out in 300 s": f"{within:.3f}",
        "at last": f"{next(r['eval/reward'] for r in reversed(records) if 'eval/reward' in r):.3f}",
        "whole command, s": f"{seconds:.0f}",
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
