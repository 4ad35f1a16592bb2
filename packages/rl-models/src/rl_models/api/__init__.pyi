from rl_models.api.model_calls import ModelCalls as ModelCalls
from rl_models.api.whole_batches import WholeBatches as WholeBatches
from rl_models.api.worker import Worker as Worker
