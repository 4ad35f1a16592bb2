"""SmolLM2 in three stages (SFT, DPO, GRPO), by examples/smollm2/stages.py and by TRL: the same rows, sizes and scores.

    python benchmarks/three_stages.py --model FOLDER --seeds 3 --together    # FOLDER: examples/smollm2 makes it
    python benchmarks/three_stages.py --model FOLDER --size small --steps 2 --peers    # on a CPU

Each stage begins with the model of the stage before, and DPO with pairs that this model has drawn. Seconds are those of
training alone, without start, drawing of pairs and evaluation. GiB are the most that the GPU has in use, without what
it had in use before. TRL keeps fp32 weights and computes in bf16, as rl-train's optimizer does. --together starts the
seeds after the first one at once: scores are the same, their seconds and GiB are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from measure import machine, table, write_json

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "smollm2"
OURS, TRL = "rl-train", "trl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", choices=("full", "small"), default="full", help="the options of stages.toml")
    parser.add_argument("--steps", type=int, help="steps of each stage (default: those of stages.toml)")
    parser.add_argument("--rows", type=int, help="rows to learn from (default: those of stages.toml)")
    parser.add_argument("--out", type=Path, default=Path("three-stages"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--peers", nargs="*", choices=(TRL,), default=[TRL])
    parser.add_argument("--together", action="store_true", help="start the seeds after the first one at once")
    parser.add_argument("--json")
    parser.add_argument("--run", choices=(OURS, TRL), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        one_run(options)
        return
    names = [OURS, *options.peers]
    results = {(name, 0): alone(options, name) for name in names}
    later = [(name, seed) for seed in range(1, options.seeds) for name in names]
    begun: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    for run in later:
        begun[run] = begin(options, *run)
        if not options.together:
            begun[run].wait()
    for (name, seed), process in begun.items():
        results[name, seed] = (float("nan"), read(options, process, name, seed))
    rows = []
    for (name, seed), (gib, stages) in sorted(results.items()):
        for stage in stages:
            apart = seed and options.together
            seconds = float("nan") if apart else stage["seconds"]
            rows.append([f"{name}, seed {seed}", stage["after"], seconds, gib, *(stage[key] for key in SCORES)])
    print(machine())
    heads = ["run", "after", "s of training", "GiB of the run", "in the form", "right", "best of n"]
    print(table(heads, rows))
    write_json(options.json, runs=[dict(zip(heads, row, strict=True)) for row in rows])


SCORES = ("form", "right", "best")


def begin(options: argparse.Namespace, name: str, seed: int) -> "subprocess.Popen[bytes]":
    """Start a run of all stages."""
    return subprocess.Popen([sys.executable, *sys.argv, "--run", name, "--seed", str(seed)])


def read(options: argparse.Namespace, process: "subprocess.Popen[bytes]", name: str, seed: int) -> list[dict[str, Any]]:
    """Wait for a run, and return the scores of its stages."""
    if process.wait():
        raise SystemExit(f"{name}, seed {seed}, ended with status {process.returncode}")
    stages: list[dict[str, Any]] = json.loads((options.out / f"{name}-{seed}" / "scores.json").read_text())
    return stages


def alone(options: argparse.Namespace, name: str) -> tuple[float, list[dict[str, Any]]]:
    """Run seed 0 with the GPU to itself, and return its GiB and scores."""
    import torch

    ended, used, cuda = threading.Event(), [0], torch.cuda.is_available()

    def watch() -> None:
        while not ended.wait(0.02):
            used.append(torch.cuda.device_memory_used())

    before = torch.cuda.device_memory_used() if cuda else 0
    if cuda:
        threading.Thread(target=watch, daemon=True).start()
    stages = read(options, begin(options, name, 0), name, 0)
    ended.set()
    return (max(used) - before) / 2**30 if cuda else float("nan"), stages


def one_run(options: argparse.Namespace) -> None:
    """Run all stages of one seed, and write `scores.json`."""
    sys.path.insert(0, str(EXAMPLE))
    import stages

    tables = stages.read_options(options.size)
    for stage in stages.STAGES if options.steps else ():
        tables[stage]["steps"] = options.steps
    if options.rows:
        tables["task"]["prompts"] = options.rows
    out = options.out / f"{options.run}-{options.seed}"
    if options.run == OURS:
        scores = stages.run_stages(tables, options.model, out, options.seed)
    else:
        scores = TrlStages(stages, tables, options.model, out, options.seed).run()
    (out / "scores.json").write_text(json.dumps(scores))


class TrlStages:
    """The stages by TRL's trainers, in one process that hands its model on."""

    def __init__(self, stages: Any, tables: dict[str, dict[str, Any]], model: Path, out: Path, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        stages.make_rows(out / "task", **tables["task"])
        self.stages, self.tables, self.out, self.seed = stages, tables, out, seed
        self.files = [out / "task" / "prompts.jsonl", out / "task" / "eval.jsonl"]
        self.prompts, self.held_out = (
            [json.loads(line) for line in file.read_text().splitlines()] for file in self.files
        )
        self.system = [{"role": "system", "content": tables["model"]["data.system-prompt"]}]
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
        self.model.to(device)
        torch.manual_seed(seed)

    def run(self) -> list[dict[str, Any]]:
        """Run the stages, and return the scores before and after each."""
        rows = [self.stages.scores("before", self.draw(self.held_out))]
        for stage in self.stages.STAGES:
            seconds = {"sft": self.sft, "dpo": self.dpo, "train": self.by_rewards}[stage]()
            rows.append(self.stages.scores(stage, self.draw(self.held_out)) | {"seconds": seconds})
        return rows

    def sft(self) -> float:
        """Learn the answers."""
        from trl import SFTConfig, SFTTrainer

        rows = [{"prompt": self.chat(row), "completion": assistant(row["answer"])} for row in self.prompts]
        return self.train(SFTTrainer, SFTConfig, "sft", rows, per_device_train_batch_size=self.rows_of("sft"))

    def dpo(self) -> float:
        """Prefer right answers to wrong ones that the model draws."""
        from trl import DPOConfig, DPOTrainer

        self.stages.write_pairs(self.files[0], self.draw(self.prompts), self.out / "pairs.jsonl")
        pairs = [json.loads(line) for line in (self.out / "pairs.jsonl").read_text().splitlines()]
        rows = [
            {"prompt": self.system + pair["prompt"]} | {name: assistant(pair[name]) for name in ("chosen", "rejected")}
            for pair in pairs
        ]
        beta, size = self.tables["dpo"]["beta"], self.rows_of("dpo")
        return self.train(DPOTrainer, DPOConfig, "dpo", rows, beta=beta, per_device_train_batch_size=size)

    def by_rewards(self) -> float:
        """Draw answers and learn from their rewards."""
        from trl import GRPOConfig, GRPOTrainer

        options = self.tables["train"]

        def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
            pairs = zip(completions, answer, strict=True)
            return [float(completion[0]["content"].strip() == right) for completion, right in pairs]

        rows = [{"prompt": self.chat(row), "answer": row["answer"]} for row in self.prompts]
        whole = options["prompts-per-step"] * options["samples"]
        share = min(256, whole)
        return self.train(
            GRPOTrainer,
            GRPOConfig,
            "train",
            rows,
            reward_funcs=reward,
            per_device_train_batch_size=share,
            gradient_accumulation_steps=whole // share,
            num_generations=options["samples"],
            max_completion_length=options["max-new-tokens"],
            loss_type="grpo",
        )

    def rows_of(self, stage: str) -> int:
        """Return the rows of a step."""
        rows: int = self.tables[stage]["batch-size"]
        return rows

    def train(self, kind: Any, config: Any, stage: str, rows: list[dict[str, Any]], **settings: Any) -> float:
        """Train by a trainer of TRL, and return its seconds."""
        import pyarrow
        import torch
        from datasets import Dataset

        options = self.tables[stage]
        further = {name: settings.pop(name) for name in ("reward_funcs",) if name in settings}
        arguments = config(
            output_dir=str(self.out / "trl"),
            max_steps=options["steps"],
            learning_rate=options["learning-rate"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            seed=self.seed,
            disable_tqdm=True,
            **settings,
        )
        # Without a fingerprint datasets pickles the table, which fails with pyarrow 24.
        data = Dataset(pyarrow.Table.from_pylist(rows), fingerprint=f"{stage}-{self.seed}")
        trainer = kind(model=self.model, args=arguments, train_dataset=data, processing_class=self.tokenizer, **further)
        began = time.monotonic()
        trainer.train()
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        seconds = time.monotonic() - began
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        return seconds

    def chat(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the chat of a row."""
        return self.system + row["messages"]

    def draw(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return records of responses at temperature 1, as `rl-train evaluate` writes them."""
        import torch

        options, records = self.tables["evaluate"], list[dict[str, Any]]()
        form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        self.model.eval()
        for start in range(0, len(rows), 256):
            some = rows[start : start + 256]
            inputs = self.tokenizer.apply_chat_template([self.chat(row) for row in some], **form).to(self.model.device)
            with torch.no_grad(), torch.autocast(self.model.device.type, torch.bfloat16, torch.cuda.is_available()):
                drawn = self.model.generate(
                    **inputs,
                    max_new_tokens=options["max-new-tokens"],
                    num_return_sequences=options["samples"],
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            texts = self.tokenizer.batch_decode(drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for place, text in enumerate(texts):
                number = place // options["samples"]
                reward = float(text.strip() == some[number]["answer"])
                records.append({"line": start + number + 1, "response": text, "reward": reward})
        return records


def assistant(text: str) -> list[dict[str, str]]:
    """Return a text as an answer."""
    return [{"role": "assistant", "content": text}]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
