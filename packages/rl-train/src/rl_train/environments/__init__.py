"""Environments: tasks that give both the prompts of a run and their reward."""
