from parallel_layers.memory.activations import ActivationOffload as ActivationOffload
from parallel_layers.memory.offload import HostOffload as HostOffload
from parallel_layers.memory.random_states import RngStates as RngStates
from parallel_layers.memory.recompute import (
    checkpoint as checkpoint,
    recompute_call as recompute_call,
    recomputed_part as recomputed_part,
)
from parallel_layers.memory.savings import memory_savings as memory_savings
from parallel_layers.memory.streamed import StreamedTensors as StreamedTensors
from parallel_layers.memory.tiles import TiledMLP as TiledMLP
from parallel_layers.model.options import Recompute as Recompute, require_recompute as require_recompute
