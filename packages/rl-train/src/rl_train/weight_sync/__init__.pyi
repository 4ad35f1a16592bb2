from rl_train.weight_sync.buckets import (
    BUCKET_BYTES as BUCKET_BYTES,
    WeightFormat as WeightFormat,
    checksum as checksum,
    in_buckets as in_buckets,
    unpack as unpack,
)
