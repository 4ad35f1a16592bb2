"""Tensor-, sequence- and context-parallel transformer layers and collectives for PyTorch, on torch alone."""

from parallel_layers.attention import (
    AttentionConfig,
    LatentConfig,
    ParallelAttention,
    ParallelLatentAttention,
    available_backends,
    packed_attention,
)
from parallel_layers.data.packing import PackedSequence, next_token_labels, pack, unpack
from parallel_layers.decoder import DecoderConfig, DecoderLayer
from parallel_layers.distributed.gradient_norm import clip_grad_norm_
from parallel_layers.distributed.parallel_dims import ParallelDims
from parallel_layers.distributed.training_state import TrainingState
from parallel_layers.head import (
    LogProbs,
    VocabParallelEmbedding,
    VocabParallelHead,
    linear_log_probs,
    vocab_parallel_log_probs,
)
from parallel_layers.initialization import initialize_
from parallel_layers.linear import (
    ColumnParallelLinear,
    Execution,
    MergedColumnParallelLinear,
    Placement,
    QKVParallelLinear,
    RowParallelLinear,
    available_overlaps,
    column_parallel_linear,
    row_parallel_linear,
    with_execution,
)
from parallel_layers.linear.float8 import with_float8
from parallel_layers.memory.random_states import RngStates
from parallel_layers.memory.recompute import checkpoint
from parallel_layers.mlp.layer import ParallelMLP
from parallel_layers.model import ModelConfig
from parallel_layers.norm.rms_norm import RMSNorm
from parallel_layers.rotary import RotaryEmbedding, apply_rotary

__all__ = [
    "AttentionConfig",
    "ColumnParallelLinear",
    "DecoderConfig",
    "DecoderLayer",
    "Execution",
    "LatentConfig",
    "LogProbs",
    "MergedColumnParallelLinear",
    "ModelConfig",
    "PackedSequence",
    "ParallelAttention",
    "ParallelDims",
    "ParallelLatentAttention",
    "ParallelMLP",
    "Placement",
    "QKVParallelLinear",
    "RMSNorm",
    "RngStates",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TrainingState",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "apply_rotary",
    "available_backends",
    "available_overlaps",
    "checkpoint",
    "clip_grad_norm_",
    "column_parallel_linear",
    "initialize_",
    "linear_log_probs",
    "next_token_labels",
    "pack",
    "packed_attention",
    "row_parallel_linear",
    "unpack",
    "vocab_parallel_log_probs",
    "with_execution",
    "with_float8",
]
