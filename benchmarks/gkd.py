"""SmolLM2 learns from itself after GRPO, by `rl-train train` and by TRL's GKD trainer: the same prompts and sizes.

    python benchmarks/gkd.py --model FOLDER --peers trl    # FOLDER: examples/smollm2 makes it
    python benchmarks/gkd.py --model FOLDER --small --dtype float32 --prompts-per-step 8    # on a CPU

The teacher is the model after some steps of GRPO, by `examples/smollm2`, or --teacher. The student is the model before
them: it draws a response to each prompt, and learns by the reverse KL to the teacher over the whole vocabulary. Greedy
answers to the held-out questions are scored every few steps. Seconds are those of steps alone, without start and
evaluation. GiB are the most that a GPU has in use in a run, without what it had in use before. TRL keeps fp32 weights
and computes in bf16, as rl-train's optimizer does.
"""

import argparse
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import torch
from grpo import EXAMPLE, TrlRun
from measure import flags, machine, records_of, table, write_json

TEACHER, STUDENT, TRL = "grpo", "rl-train", "trl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, help="folder of the teacher (default: made by GRPO)")
    parser.add_argument("--teacher-steps", type=int, default=25, help="steps of GRPO")
    parser.add_argument("--teacher-samples", type=int, help="responses to a prompt in GRPO (default: the TOML file's)")
    parser.add_argument("--small", action="store_true", help="the sizes of examples/smollm2/small.toml, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("gkd"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts-per-step", type=int, default=256)
    parser.add_argument("--share", type=int, default=128, help="sequences of one pass of TRL")
    parser.add_argument("--max-new-tokens", type=int, help="(default: that of the TOML file)")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--held-out", type=int, help="held-out questions (default: those of examples/smollm2)")
    parser.add_argument("--dtype", default="bfloat16", help="of rl-train; float32 is faster on CPUs without bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", nargs="*", choices=(TRL,), default=[])
    parser.add_argument("--json")
    parser.add_argument("--run", choices=(TRL,), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = "small" if options.small else "full"
    options.given = tomllib.loads((EXAMPLE / f"{options.size}.toml").read_text())
    options.max_new_tokens = options.max_new_tokens or options.given["max_new_tokens"]
    options.teacher = options.teacher or options.out / TEACHER / "actor"
    if options.run:
        by_trl(options)
        return
    sys.path.insert(0, str(EXAMPLE))
    from run import TASKS
    from task import make_task

    task = TASKS[options.size]
    make_task(options.out / "task", **task | {"held_out": options.held_out or task["held_out"]})
    rows, curves = [], {}
    for name in [TEACHER] * (not options.teacher.is_dir()) + [STUDENT, *options.peers]:
        gib, records = run(options, name)
        steps = [record["seconds"] for record in records if record["step"]]
        held_out = {record["step"]: record["eval/reward"] for record in records if "eval/reward" in record}
        curves[name] = {"held-out reward": held_out, "KL": {r["step"]: r["kl"] for r in records if "kl" in r}}
        later = steps[1:] or steps
        rows.append([name, steps[0], sum(later) / len(later), gib, held_out[0], held_out[max(held_out)]])
    heads = ("run", "first step, s", "step, s", "GiB", "held-out at first", "held-out at last")
    print(machine())
    print(table(heads, rows))
    for name, run_curves in curves.items():
        for what, curve in filter(lambda pair: pair[1], run_curves.items()):
            print(f"{what} of {name} by step:", ", ".join(f"{step}: {value:.3f}" for step, value in curve.items()))
    write_json(options.json, runs=[dict(zip(heads, row, strict=True)) for row in rows], curves=curves)


def run(options: argparse.Namespace, name: str) -> tuple[float, list[dict[str, Any]]]:
    """Run to the end, and return the GiB and the records of the metrics."""
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*sys.argv, "--run", name, "--teacher", str(options.teacher)]
    process = subprocess.Popen([sys.executable, *(arguments if name == TRL else by_rl_train(options, name))])
    ended, used = threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.02):
            used.append(torch.cuda.device_memory_used())

    if torch.cuda.is_available():
        before = torch.cuda.device_memory_used()
        watching = threading.Thread(target=watch)
        watching.start()
    if process.wait():
        raise SystemExit(f"{name} ended with status {process.returncode}")
    ended.set()
    gib = (max(used) - before) / 2**30 if torch.cuda.is_available() else float("nan")
    return gib, records_of(folder)


def by_rl_train(options: argparse.Namespace, name: str) -> list[str]:
    """Return the arguments of `rl-train train`, of GRPO or of the distillation."""
    values: dict[str, Any] = {
        "config": EXAMPLE / f"{options.size}.toml",
        "model": options.model,
        "prompts": options.out / "task" / "prompts.jsonl",
        "eval-prompts": options.out / "task" / "eval.jsonl",
        "eval-every": options.eval_every,
        "max-new-tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "save-every": 0,
        "seed": options.seed,
        "out": options.out / name,
    }
    if name == TEACHER:
        values |= {"steps": options.teacher_steps, "eval-every": options.teacher_steps}
        values |= {"samples": options.teacher_samples or options.given["samples"]}
    else:
        values |= {"algorithm": "on-policy-distillation", "reference": options.teacher, "samples": 1}
        values |= {"objective.divergence": "reverse_kl", "steps": options.steps}
        values |= {"prompts-per-step": options.prompts_per_step}
    return ["-m", "rl_train", "train", *flags(values)]


def by_trl(options: argparse.Namespace) -> None:
    """Learn by TRL's GKDTrainer, and write `metrics.jsonl` as rl-train does."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    # The last message is what the trainer would learn from off policy.
    setting = TrlRun(
        options,
        options.given,
        TRL,
        "loss",
        lambda chat, row: {"messages": [*chat, {"role": "assistant", "content": str(row["answer"])}]},
    )
    setting.tokenizer.pad_token = setting.tokenizer.pad_token or setting.tokenizer.eos_token  # GKDTrainer wants one
    share = min(options.share, options.prompts_per_step)
    config = GKDConfig(
        per_device_train_batch_size=share,
        gradient_accumulation_steps=options.prompts_per_step // share,
        max_new_tokens=options.max_new_tokens,
        temperature=1.0,
        lmbda=1.0,
        beta=1.0,
        max_length=512,
        **setting.config,
    )
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        for folder, dtype in ((options.model, torch.float32), (options.teacher, torch.bfloat16))
    )
    GKDTrainer(
        student,
        teacher,
        config,
        train_dataset=setting.data,
        processing_class=setting.tokenizer,
        callbacks=[setting.callback()],
    ).train()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
