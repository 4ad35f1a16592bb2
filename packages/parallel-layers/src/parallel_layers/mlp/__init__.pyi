from parallel_layers.mlp.activations import XIELU as XIELU
from parallel_layers.mlp.layer import (
    ACTIVATIONS as ACTIVATIONS,
    activation_function as activation_function,
    gated as gated,
)
