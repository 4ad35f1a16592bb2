from megatron_utils.testing.cpu import (
    cpu_stand_in as cpu_stand_in,
    device_of as device_of,
    stand_in_is_active as stand_in_is_active,
)
from megatron_utils.testing.models import MIXTURES as MIXTURES, tiny_config as tiny_config, tiny_models as tiny_models
