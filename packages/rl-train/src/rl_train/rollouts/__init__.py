"""Rollouts: engines that answer prompts with the policy's weights, behind one interface."""

from rl_models.workers.generation import SamplingOptions
from rl_train.rollouts.interface import RolloutEngine
from rl_train.rollouts.native import NativeEngine

__all__ = ["NativeEngine", "RolloutEngine", "SamplingOptions"]
