"""Losses of reinforcement learning, as pure functions of per-token tensors.

Every function takes flat `[T]` tensors, aligned with their tokens (see `rl_models.Batch`), and returns one value per
token. `Actor.update` and `Critic.update` choose the tokens that count and average over micro-batches and data-parallel
ranks, so no function here divides by a number of tokens.
"""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
