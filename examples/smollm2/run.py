"""Make SmolLM2-135M-Instruct and an arithmetic task, and train the one on the other by `rl-train train`.

    python examples/smollm2/run.py            # one GPU
    python examples/smollm2/run.py --small    # two CPU cores, 10 minutes

`OUT/task` gets the questions and `OUT/run` the run. The same command resumes a run that was stopped.
"""

import argparse
import os
import sys
from pathlib import Path

from model import make_model
from task import make_task

HERE = Path(__file__).resolve().parent
MODEL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rl-train" / "smollm2-135m-instruct"
# The questions of each run; its options are in the TOML file of the same name.
TASKS = {
    "full": {"prompts": 4096, "held_out": 256, "terms": (2, 2), "largest": 99},
    "small": {"prompts": 336, "held_out": 64, "terms": (2, 2), "largest": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="easier questions and fewer responses, for two CPU cores")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model; made if missing")
    parser.add_argument(
        "--out", type=Path, help="folder for the questions and the run (default: smollm2-full or smollm2-small)"
    )
    given, options = parser.parse_known_args()
    name = "small" if given.small else "full"

    out = given.out or Path(f"smollm2-{name}")
    make_model(given.model)
    make_task(out / "task", **TASKS[name])
    files = {
        "config": HERE / f"{name}.toml",
        "model": given.model,
        "prompts": out / "task" / "prompts.jsonl",
        "eval-prompts": out / "task" / "eval.jsonl",
        "out": out / "run",
    }
    command = [sys.executable, "-m", "rl_train", "train"]
    for option, file in files.items():
        command += [f"--{option}", str(file)]
    # Further options go to `rl-train train`, such as `--seed 1`. The command takes this process over, so that it alone
    # answers Ctrl-C.
    os.execv(sys.executable, [*command, *options])


if __name__ == "__main__":
    main()
