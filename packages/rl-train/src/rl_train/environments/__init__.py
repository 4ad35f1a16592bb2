"""Environments: tasks that give both the prompts of a run and their reward, and conversations of several turns."""

from rl_train.environments.protocol import Environment, Step

__all__ = ["Environment", "Step"]
