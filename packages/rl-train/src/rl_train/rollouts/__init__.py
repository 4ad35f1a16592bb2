"""Rollouts: engines that answer prompts with the policy's weights, behind one interface."""

from rl_models.workers.generation import SamplingOptions
from rl_train.rollouts.apart import Apart
from rl_train.rollouts.handover import Contents
from rl_train.rollouts.interface import LocalEngine, RolloutEngine
from rl_train.rollouts.native import NativeEngine
from rl_train.rollouts.on_ray import EngineOnRay
from rl_train.rollouts.over_ranks import EngineOnRanks
from rl_train.rollouts.process import processes
from rl_train.rollouts.vllm import Vllm, VllmEngine

__all__ = [
    "Apart",
    "Contents",
    "EngineOnRanks",
    "EngineOnRay",
    "LocalEngine",
    "NativeEngine",
    "RolloutEngine",
    "SamplingOptions",
    "Vllm",
    "VllmEngine",
    "processes",
]
