from parallel_layers.testing.pool import (
    RankDied as RankDied,
    RankPool as RankPool,
    RankTimeout as RankTimeout,
    run_ranks as run_ranks,
    shared_pool as shared_pool,
)
