"""`python -m rl_models`: the same as the console command `rl-models`."""

from rl_models.cli import app

if __name__ == "__main__":
    app(prog_name="rl-models")
