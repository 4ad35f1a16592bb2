from ckpt.training.checkpoint import PendingSave as PendingSave, open_step as open_step
from ckpt.training.hugging_face import training_to_hf as training_to_hf
from ckpt.training.megatron import (
    megatron_to_training as megatron_to_training,
    training_to_megatron as training_to_megatron,
)
from ckpt.training.rng import capture_rng as capture_rng
from ckpt.training.runs import (
    latest_step as latest_step,
    saved_steps as saved_steps,
    steps_of_latest as steps_of_latest,
)
