from megatron_utils.dist_checkpointing.checkpoint import (
    Loaded as Loaded,
    PendingSave as PendingSave,
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from megatron_utils.dist_checkpointing.folder import latest_step as latest_step
