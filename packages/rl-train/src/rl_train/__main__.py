"""`python -m rl_train`: the same as the console command `rl-train`."""

from rl_train.cli.commands import app

if __name__ == "__main__":
    app(prog_name="rl-train")
