"""Run functions on several ranks of this machine, for tests."""

from parallel_layers.testing.pool import RankDied, RankPool, RankTimeout, run_ranks, shared_pool

__all__ = ["RankDied", "RankPool", "RankTimeout", "run_ranks", "shared_pool"]
