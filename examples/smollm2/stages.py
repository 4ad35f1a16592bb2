"""Train SmolLM2-135M-Instruct in three stages, and evaluate it before and after each, by commands of rl-train.

    python examples/smollm2/stages.py            # one GPU
    python examples/smollm2/stages.py --small    # two CPU cores

1. `rl-train sft` learns sums in the form "The sum is 42.", from answers in a file.
2. `rl-train dpo` prefers right answers to wrong ones; the model of stage 1 has drawn both.
3. `rl-train train` draws answers and learns from their rewards, by GRPO.

The program prints its commands; `stages.toml` has their options. The same command goes on where it was stopped.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from model import make_model
from run import HERE, MODEL
from task import make_task

STAGES = ("sft", "dpo", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="smaller numbers and fewer rows, for two CPU cores")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; made if missing")
    parser.add_argument("--out", type=Path, help="folder of the stages (default: stages-full or stages-small)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the rows and of sampling")
    arguments = parser.parse_args()
    size = "small" if arguments.small else "full"
    make_model(arguments.model)
    run_stages(read_options(size), arguments.model, arguments.out or Path(f"stages-{size}"), arguments.seed)


def read_options(size: str) -> dict[str, dict[str, Any]]:
    """Return the options of each command for a size, "full" or "small"."""
    tables = tomllib.loads((HERE / "stages.toml").read_text())
    return {name: both | tables[size].get(name, {}) for name, both in tables["both"].items()}


def run_stages(options: dict[str, dict[str, Any]], model: Path, out: Path, seed: int) -> list[dict[str, Any]]:
    """Run the stages, and print and return the scores of the model before and after each.

    Args:
        options: The options of each command, see `read_options`.
        model: The folder of the model.
        out: The folder for the questions, the runs and the responses.
        seed: The seed of each command.
    """
    prompts, held_out = out / "task" / "prompts.jsonl", out / "task" / "eval.jsonl"
    if not held_out.is_file():
        make_rows(out / "task", **options["task"])

    def call(command: str, *arguments: Path, **values: Any) -> None:
        values = {**values, **options["model"], **options[command], "seed": seed}
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in values.items()]
        words = [command, *map(str, arguments), *flags]
        print("rl-train", *words, flush=True)
        subprocess.run([sys.executable, "-m", "rl_train", *words], check=True, stdout=subprocess.DEVNULL)

    def evaluate(policy: Path, questions: Path, responses: Path) -> list[dict[str, Any]]:
        if not responses.is_file():
            call("evaluate", policy, prompts=questions, out=responses)
        return [json.loads(line) for line in responses.read_text().splitlines()]

    rows = [scores("before", evaluate(model, held_out, out / "before.jsonl"))]
    policy = model
    for stage in STAGES:
        data = {"prompts" if stage == "train" else "dataset": prompts}
        if stage == "dpo":
            data["dataset"] = out / "pairs.jsonl"
            write_pairs(prompts, evaluate(policy, prompts, out / "drawn.jsonl"), data["dataset"])
        if not (out / stage / "actor").is_dir():
            call(stage, model=policy, out=out / stage, **data)
        policy = out / stage / "actor"
        rows.append(scores(stage, evaluate(policy, held_out, out / f"{stage}.jsonl")))
        steps = [json.loads(line) for line in (out / stage / "metrics.jsonl").read_text().splitlines()]
        rows[-1]["seconds"] = sum(step.get("seconds", 0.0) for step in steps)
    print(f"{'after':<8}{'in the form':>12}{'right':>8}{'best of n':>11}{'seconds of steps':>18}")
    for row in rows:
        shares = f"{row['form']:>12.3f}{row['right']:>8.3f}{row['best']:>11.3f}"
        print(f"{row['after']:<8}{shares}{row['seconds']:>18.1f}")
    return rows


def make_rows(folder: Path, **task: Any) -> None:
    """Write the questions of `make_task` with their answers in the form."""
    make_task(folder, **task)
    for file in (folder / "prompts.jsonl", folder / "eval.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [json.dumps(row | {"answer": f"The sum is {row['answer']}."}) for row in rows]
        file.write_text("\n".join(lines) + "\n")


def write_pairs(prompts: Path, responses: list[dict[str, Any]], file: Path) -> None:
    """Write each right response to a question beside a wrong one to the same question, as far as both are there."""
    questions, lines = prompts.read_text().splitlines(), list[str]()
    for line, answers in itertools.groupby(responses, lambda response: response["line"]):
        right, wrong = list[str](), list[str]()
        for answer in answers:
            (right if answer["reward"] else wrong).append(answer["response"])
        chat = json.loads(questions[line - 1])["messages"]
        pairs = zip(right, wrong, strict=False)
        lines += [json.dumps({"prompt": chat, "chosen": chosen, "rejected": other}) for chosen, other in pairs]
    file.write_text("".join(f"{line}\n" for line in lines))


def scores(after: str, responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares of responses in the form, of right ones, and of questions with a right response."""
    lines = {response["line"] for response in responses}
    return {
        "after": after,
        "seconds": 0.0,
        "form": sum(response["response"].startswith("The sum is ") for response in responses) / len(responses),
        "right": sum(response["reward"] for response in responses) / len(responses),
        "best": len({response["line"] for response in responses if response["reward"]}) / len(lines),
    }


if __name__ == "__main__":
    main()
