from parallel_models.engine.adapters import describe as describe, require_linears as require_linears
from parallel_models.engine.checkpoint import (
    checkpoint_folder as checkpoint_folder,
    longest_sequence as longest_sequence,
    max_positions as max_positions,
    prediction_layers as prediction_layers,
    stored_dtype as stored_dtype,
)
from parallel_models.engine.checks import (
    options_of as options_of,
    require_flags as require_flags,
    require_kind as require_kind,
    require_number as require_number,
)
from parallel_models.engine.engine import OUTPUTS as OUTPUTS, Loss as Loss, SharedPrompt as SharedPrompt
from parallel_models.engine.hub import download as download, is_name as is_name, located as located
from parallel_models.engine.options import Lora as Lora, require_lora as require_lora
from parallel_models.engine.shared_base import (
    load_heads as load_heads,
    require_base as require_base,
    share_base_ as share_base_,
)
from parallel_models.engine.vision import carry as carry
from parallel_models.generation.decoding import Progress as Progress, unwatched as unwatched
