"""SmolLM2 learns to call a calculator, as a native environment and as an unchanged client program.

    python benchmarks/agents.py --model FOLDER    # FOLDER: examples/smollm2 makes it; two CPU cores
    python benchmarks/agents.py --model FOLDER --dtype bfloat16 --steps 30 --prompts-per-step 16 --samples 8 \
        --rewards.workers 8    # one GPU; further options go to `rl-train train`

The task is that of examples/calculator: the product of two numbers of two digits. `rl-train sft` first shows the form
of a call, in one answer of four; the others are guesses. Then GRPO learns from the environment `calculator:Calculator`
and from the program `client:solve`, which uses OpenAI's client, with the same prompts, sizes and seeds.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import flags, machine, records_of, rl_train, table, write_json

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "calculator"
# ChatML, with the names of tools and with calls in the form of Hermes: SmolLM2's own template knows no tools.
TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>system\n{{ tool.function.name }}<|im_end|>\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WAYS = {
    "environment": {"environment": "calculator:Calculator", "data.max-turns": 3},
    "agent": {"agent": "client:solve", "agents.max-calls": 3, "agents.concurrent": 128},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("agents"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--demonstrations", type=int, default=400, help="conversations of `rl-train sft`, 16 a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster where the device has it")
    parser.add_argument("--json")
    options, further = parser.parse_known_args()
    options.out = options.out.absolute()
    start = taught(options)
    sys.path.insert(0, str(EXAMPLE))
    from train import write_rows

    write_rows(options.out / "questions.jsonl", 1, 1024)
    curves: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for way, choice in WAYS.items():
            values = choice | {
                "prompts": options.out / "questions.jsonl",
                "prompts-per-step": options.prompts_per_step,
                "samples": options.samples,
                "max-new-tokens": 64,
                "steps": options.steps,
                "learning-rate": options.learning_rate,
                "seed": seed,
            }
            curves[f"{way} {seed}"] = run("train", options, start, options.out / f"{way}-{seed}", values, further)
    print(machine())
    for value in ("reward", "turns"):
        heads = (value, *(str(record["step"]) for record in curves["agent 0"]))
        print(table(heads, [(name, *(record[value] for record in records)) for name, records in curves.items()]))
    write_json(options.json, curves=curves)


def taught(options: argparse.Namespace) -> Path:
    """Return the folder of the model that has seen demonstrations."""
    start, draws = options.out / "start", random.Random(0)
    shutil.copytree(options.model, start, dirs_exist_ok=True)
    (start / "chat_template.jinja").write_text(TEMPLATE)
    rows = [demonstration(draws) for _ in range(options.demonstrations)]
    (options.out / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"dataset": options.out / "demonstrations.jsonl", "batch-size": 16, "steps": len(rows) // 16}
    run("sft", options, start, options.out / "sft", values | {"learning-rate": 1e-4})
    return options.out / "sft" / "actor"


def demonstration(draws: random.Random) -> dict[str, Any]:
    """Return a conversation: one of four calls the calculator and says what it returns, the others guess."""
    a, b = draws.randint(10, 99), draws.randint(10, 99)
    function: dict[str, Any] = {"name": "multiply", "arguments": {"a": a, "b": b}}
    tools = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {}}}]
    answer = [{"role": "assistant", "content": str(draws.randint(100, 9801))}]
    if draws.random() < 0.25:
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        result = {"role": "tool", "name": "multiply", "content": str(a * b)}
        answer = [call, result, {"role": "assistant", "content": str(a * b)}]
    return {"messages": [{"role": "user", "content": f"{a}*{b}"}, *answer], "tools": tools}


def run(
    command: str,
    options: argparse.Namespace,
    model: Path,
    out: Path,
    values: dict[str, Any],
    further: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a command of rl-train in the folder of the calculator, and return the records of its steps."""
    values = values | {"model": model, "out": out, "dtype": options.dtype, "save-every": 0}
    rl_train(EXAMPLE, command, *flags(values), *further)
    return [record for record in records_of(out) if record["step"]]


if __name__ == "__main__":
    main()
