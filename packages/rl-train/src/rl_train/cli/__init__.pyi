from rl_train.cli.commands import app as app
