from parallel_layers.norm.layer_norm import LayerNorm as LayerNorm
from parallel_layers.norm.rms import HeadShardedRMSNorm as HeadShardedRMSNorm, rms_norm as rms_norm
