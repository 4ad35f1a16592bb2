"""Test functions on several ranks of one machine: `RankPool`, `shared_pool` and `run_ranks`."""

from parallel_layers.testing.pool import RankDied, RankPool, RankTimeout, run_ranks, shared_pool

__all__ = ["RankDied", "RankPool", "RankTimeout", "run_ranks", "shared_pool"]
