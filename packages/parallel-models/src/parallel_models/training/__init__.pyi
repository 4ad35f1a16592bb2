from parallel_models.training.fsdp import (
    backward_each as backward_each,
    drop_gradients as drop_gradients,
    forward_each as forward_each,
    gathered as gathered,
    release as release,
    shard_over_dp as shard_over_dp,
)
from parallel_models.training.loading import (
    MODELS as MODELS,
    build_engine as build_engine,
    require_fit as require_fit,
    require_predictions as require_predictions,
)
from parallel_models.training.parallel_engine import ParallelEngine as ParallelEngine
from parallel_models.training.pipeline import why_no_zero_bubble as why_no_zero_bubble
from parallel_models.training.shared_prefixes import (
    shared_mask as shared_mask,
    shared_pack as shared_pack,
    whole_outputs as whole_outputs,
)
from parallel_models.training.stage import Stage as Stage, compute as compute
from parallel_models.training.trained_model import TrainedModel as TrainedModel
