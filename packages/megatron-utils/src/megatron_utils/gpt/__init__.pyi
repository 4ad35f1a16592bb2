from megatron_utils.gpt.config import (
    FAMILIES as FAMILIES,
    require_expressible as require_expressible,
    transformer_config as transformer_config,
)
from megatron_utils.gpt.lora import Part as Part, add_lora_ as add_lora_, same_draws as same_draws
from megatron_utils.gpt.memory import save_memory as save_memory
from megatron_utils.gpt.model import (
    PackedGPTModel as PackedGPTModel,
    build_gpt as build_gpt,
    require_multiples as require_multiples,
)
