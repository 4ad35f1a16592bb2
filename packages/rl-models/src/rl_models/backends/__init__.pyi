from rl_models.backends.megatron.load import FLOAT8 as FLOAT8
from rl_models.backends.options import BackendOptions as BackendOptions
from rl_models.backends.registry import (
    BACKENDS as BACKENDS,
    Backend as Backend,
    offered as offered,
    require_optimizer as require_optimizer,
    require_options as require_options,
    row_of as row_of,
)
from rl_models.backends.transformers.hub import load_model as load_model, save_model as save_model
from rl_models.backends.transformers.hub_layout import HubLayout as HubLayout
