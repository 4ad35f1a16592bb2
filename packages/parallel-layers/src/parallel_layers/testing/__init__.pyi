from parallel_layers.testing.pool import (
    RankDied as RankDied,
    RankPool as RankPool,
    RankTimeout as RankTimeout,
    fork_server as fork_server,
    run_ranks as run_ranks,
    shared_pool as shared_pool,
)
