"""SmolLM2 learns sums in an environment of verifiers, and by a judge that is another model of the run.

    python benchmarks/judged.py --model FOLDER    # FOLDER: examples/smollm2 makes it; one GPU
    python benchmarks/judged.py --model FOLDER --tasks judge --dtype float32 --demonstrations 256 --steps 8 \
        --prompts 8 --samples 4 --largest 20 --held-out 32    # two CPU cores; further options go to `rl-train train`

The environment is the taskset `sums` of examples/smollm2, whose episodes draw by verifiers' TrainClient. The judge is
SmolLM2 after `rl-train sft`: it reads the right result and a response, and answers "Score: 1" or "Score: 0". It learns
this from responses of SmolLM2, and from the same with another last number. The metric `reward/right` is `number-match`.
"""

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import flags, machine, records_of, rl_train, table, write_json

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "smollm2"
QUESTION = "The result is {}. Does the response give it? {}"
RUBRIC = """model = "{model}"
score = 'Score: ([01])'
prompt = "{prompt}"
request = {{ max_tokens = 8, temperature = 0 }}
"""
SYSTEM = "Answer with a number."
VERIFIERS = "verifiers:sums,agent.runtime.type=subprocess,taskset.file={}"
SHOWN = ["reward", "reward/judge", "reward/right", "judge_calls", "judge_cached", "judge_tokens", "judge_unreadable"]
SHOWN += ["seconds_generating", "seconds_scoring", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("judged"))
    parser.add_argument("--tasks", nargs="+", choices=("verifiers", "judge"), default=["verifiers", "judge"])
    parser.add_argument("--demonstrations", type=int, default=2048, help="judgements that the judge learns, 32 a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--held-out", type=int, default=128, help="questions of the evaluation")
    parser.add_argument("--largest", type=int, default=50, help="largest term of a sum of two terms")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json")
    options, further = parser.parse_known_args()
    options.out = options.out.absolute()
    sys.path.insert(0, str(EXAMPLE))
    from task import make_task

    make_task(options.out / "task", prompts=4096, held_out=options.held_out, terms=(2, 2), largest=options.largest)
    files = {"prompts": options.out / "task" / "prompts.jsonl", "eval-prompts": options.out / "task" / "eval.jsonl"}
    curves: dict[str, list[dict[str, Any]]] = {}
    for task in options.tasks:
        values: dict[str, Any] = {
            "steps": options.steps,
            "prompts-per-step": options.prompts,
            "samples": options.samples,
            "max-new-tokens": 16,
            "max-tokens": 2048,  # agents hold a cache for sequences of this length
            "learning-rate": options.learning_rate,
            "eval-every": options.steps,
        }
        if task == "verifiers":
            held_out = VERIFIERS.format(files["eval-prompts"])
            values |= {"environment": VERIFIERS.format(files["prompts"]), "eval-prompts": held_out}
        else:
            rubric = options.out / "judge.toml"
            rubric.write_text(
                RUBRIC.format(model=judge(options), prompt=QUESTION.format("{{ answer }}", "{{ response }}"))
            )
            values |= files | {"reward": f"judge:{rubric},right=number-match@0", "rewards.errors": "zero"}
            values |= {"data.system-prompt": SYSTEM}
        began = time.perf_counter()
        curves[task] = train("train", options, options.model, options.out / task, values, further)
        print(f"{task}: the command took {time.perf_counter() - began:.0f} s")
    print(machine())
    for task, records in curves.items():
        learned = [record for record in records if record["step"]]
        shown = [name for name in SHOWN if name in learned[-1]]
        places = sorted({0, *range(4, len(learned), 5), len(learned) - 1})
        print(table(["step", *shown], [[learned[i]["step"], *(learned[i][name] for name in shown)] for i in places]))
        held_out_names = [name for name in learned[-1] if name.startswith(("eval/reward", "eval/judge"))]
        rows = [[record["step"], *(record[name] for name in held_out_names)] for record in (records[0], records[-1])]
        print(f"{task}, held out:\n{table(['step', *held_out_names], rows)}")
        totals = {name: sum(record.get(name, 0) for record in learned) for name in SHOWN[3:]}
        print(f"{task}, all steps: {totals}")
    write_json(options.json, curves=curves)


def judge(options: argparse.Namespace) -> Path:
    """Return the folder of the model that has learned to compare a response with a result."""
    draws, rows, drawn = random.Random(0), list[dict[str, Any]](), options.out / "drawn.jsonl"
    lines = (options.out / "task" / "prompts.jsonl").read_text().splitlines()[: options.demonstrations // 8]
    questions = options.out / "drawn-for.jsonl"
    questions.write_text("".join(f"{line}\n" for line in lines))
    values = {"prompts": questions, "reward": "number-match", "samples": 4, "max-new-tokens": 16, "out": drawn}
    call("evaluate", options, str(options.model), values=values | {"data.system-prompt": SYSTEM})
    for record in map(json.loads, drawn.read_text().splitlines()):
        result, response = json.loads(lines[record["line"] - 1])["answer"], record["response"]
        rows.append(judgement(result, response, bool(record["reward"])))
        # The same words with a right number in place of a wrong one, or the other way round.
        other = result + draws.choice([-10, -2, -1, 1, 2, 10]) if record["reward"] else result
        changed = re.sub(r"\d+(?=\D*$)", str(other), response) if re.search(r"\d", response) else str(other)
        rows.append(judgement(result, changed, not record["reward"]))
    draws.shuffle(rows)
    file = options.out / "judgements.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"dataset": file, "batch-size": 32, "epochs": 1, "learning-rate": 1e-4}
    train("sft", options, options.model, options.out / "sft", values)
    return options.out / "sft" / "actor"


def judgement(result: int, response: str, right: bool) -> dict[str, Any]:
    """Return a conversation in which the judge reads a response, and gives its score."""
    question = {"role": "user", "content": QUESTION.format(result, response)}
    return {"messages": [question, {"role": "assistant", "content": f"Score: {int(right)}"}]}


def train(
    command: str,
    options: argparse.Namespace,
    model: Path,
    out: Path,
    values: dict[str, Any],
    further: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a command of rl-train that trains, and return the records of its steps."""
    call(command, options, *further, values={"model": model, "out": out, "save-every": 0} | values)
    return records_of(out)


def call(command: str, options: argparse.Namespace, *further: str, values: dict[str, Any]) -> None:
    """Run a command of rl-train in the folder of the taskset."""
    rl_train(EXAMPLE, command, *further, *flags({"dtype": options.dtype, "seed": options.seed, **values}))


if __name__ == "__main__":
    main()
