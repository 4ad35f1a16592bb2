from rl_models.backends.options import FLOAT8 as FLOAT8, BackendOptions as BackendOptions
from rl_models.backends.registry import (
    BACKENDS as BACKENDS,
    Backend as Backend,
    offered as offered,
    require_optimizer as require_optimizer,
    require_options as require_options,
    row_of as row_of,
)
