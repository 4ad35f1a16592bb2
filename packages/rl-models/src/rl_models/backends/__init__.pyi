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
from rl_models.backends.transformers.engine import HubLayout as HubLayout
