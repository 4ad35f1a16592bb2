"""Test functions on several ranks of one machine: `RankPool`, `shared_pool` and `run_ranks`.

`peer_memory_on_cpu` stands in for what only GPUs have.
"""

from parallel_layers.testing.peer_memory import peer_memory_on_cpu
from parallel_layers.testing.pool import RankDied, RankPool, RankTimeout, run_ranks, shared_pool

__all__ = ["RankDied", "RankPool", "RankTimeout", "peer_memory_on_cpu", "run_ranks", "shared_pool"]
