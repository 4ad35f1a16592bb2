from parallel_models.model.boundary import Boundary as Boundary
from parallel_models.model.decoder import Chunk as Chunk, VisualStates as VisualStates, cache_entries as cache_entries
from parallel_models.model.packed_model import PackedModel as PackedModel
