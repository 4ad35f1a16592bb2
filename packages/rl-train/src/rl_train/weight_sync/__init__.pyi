from rl_train.weight_sync.buckets import (
    BUCKET_BYTES as BUCKET_BYTES,
    WeightFormat as WeightFormat,
    in_buckets as in_buckets,
    unpack as unpack,
)
from rl_train.weight_sync.changed_values import changes_since as changes_since
