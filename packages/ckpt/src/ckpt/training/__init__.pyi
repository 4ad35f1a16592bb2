from ckpt.training.checkpoint import PendingSave as PendingSave, open_step as open_step
from ckpt.training.rng import capture_rng as capture_rng
from ckpt.training.runs import (
    latest_step as latest_step,
    saved_steps as saved_steps,
    steps_of_latest as steps_of_latest,
)
