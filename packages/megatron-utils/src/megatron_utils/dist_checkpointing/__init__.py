"""Training checkpoints on Megatron-Core's distributed format, across any change of grid."""

from megatron_utils.dist_checkpointing.checkpoint import Loaded, PendingSave, load_checkpoint, save_checkpoint
from megatron_utils.dist_checkpointing.folder import latest_step

__all__ = ["Loaded", "PendingSave", "latest_step", "load_checkpoint", "save_checkpoint"]
