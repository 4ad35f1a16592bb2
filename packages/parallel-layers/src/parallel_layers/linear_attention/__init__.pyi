from parallel_layers.linear_attention.backends import available_backends as available_backends
from parallel_layers.linear_attention.config import (
    GatedDeltaNetConfig as GatedDeltaNetConfig,
    KimiDeltaConfig as KimiDeltaConfig,
    Mamba2Config as Mamba2Config,
    StateShape as StateShape,
)
from parallel_layers.linear_attention.context_parallel import (
    context_parallel_convolution as context_parallel_convolution,
    context_parallel_delta_rule as context_parallel_delta_rule,
    context_parallel_state_space as context_parallel_state_space,
)
from parallel_layers.linear_attention.convolution import short_convolution as short_convolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule as gated_delta_rule
from parallel_layers.linear_attention.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from parallel_layers.linear_attention.head_exchange import (
    ulysses_delta_rule as ulysses_delta_rule,
    ulysses_state_space as ulysses_state_space,
)
from parallel_layers.linear_attention.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from parallel_layers.linear_attention.mamba2 import Mamba2 as Mamba2
from parallel_layers.linear_attention.state_space import state_space_dual as state_space_dual
