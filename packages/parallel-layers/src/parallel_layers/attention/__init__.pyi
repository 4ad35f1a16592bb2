from parallel_layers.attention.backends import available_backends as available_backends
from parallel_layers.attention.cache import CacheShape as CacheShape
from parallel_layers.attention.config import (
    AttentionConfig as AttentionConfig,
    LatentConfig as LatentConfig,
)
from parallel_layers.attention.context_parallel.ring import ring_attention as ring_attention
from parallel_layers.attention.context_parallel.sequence_layout import (
    Layout as Layout,
    gather_sequence as gather_sequence,
    split_sequence as split_sequence,
)
from parallel_layers.attention.context_parallel.ulysses import (
    exchange_heads as exchange_heads,
    ulysses_attention as ulysses_attention,
)
from parallel_layers.attention.latent import ParallelLatentAttention as ParallelLatentAttention
from parallel_layers.attention.packed import AttentionOptions as AttentionOptions
from parallel_layers.attention.shared_keys import SharedKeys as SharedKeys, repeated_rows as repeated_rows
from parallel_layers.attention.shared_kv import SharedKeysValues as SharedKeysValues
from parallel_layers.model.options import ContextParallel as ContextParallel
