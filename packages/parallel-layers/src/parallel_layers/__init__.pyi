from parallel_layers.attention.layer import ParallelAttention as ParallelAttention
from parallel_layers.attention.packed import packed_attention as packed_attention
from parallel_layers.data.packing import (
    PackedSequence as PackedSequence,
    next_token_labels as next_token_labels,
    pack as pack,
    unpack as unpack,
)
from parallel_layers.distributed.parallel_dims import ParallelDims as ParallelDims
from parallel_layers.head.embedding import (
    VocabParallelEmbedding as VocabParallelEmbedding,
    VocabParallelHead as VocabParallelHead,
)
from parallel_layers.head.log_probs import LogProbs as LogProbs, linear_log_probs as linear_log_probs
from parallel_layers.linear.execution import Execution as Execution, Placement as Placement
from parallel_layers.linear.layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    MergedColumnParallelLinear as MergedColumnParallelLinear,
    QKVParallelLinear as QKVParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from parallel_layers.mlp.layer import ParallelMLP as ParallelMLP
from parallel_layers.model.config import ModelConfig as ModelConfig
from parallel_layers.model.decoder import DecoderConfig as DecoderConfig, DecoderLayer as DecoderLayer
from parallel_layers.module.initialization import initialize_ as initialize_
from parallel_layers.norm.rms import RMSNorm as RMSNorm
from parallel_layers.rotary.embedding import RotaryEmbedding as RotaryEmbedding
from parallel_layers.training.gradient_norm import clip_grad_norm_ as clip_grad_norm_
