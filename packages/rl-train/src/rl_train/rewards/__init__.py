"""Rewards: functions of prompts and responses, called in processes of their own."""

from rl_train.rewards.response import Response

__all__ = ["Response"]
