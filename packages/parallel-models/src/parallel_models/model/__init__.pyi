from parallel_models.model.boundary import Boundary as Boundary
from parallel_models.model.decoder import Chunk as Chunk, VisualStates as VisualStates, cache_entries as cache_entries
from parallel_models.model.language_models import PackedModel as PackedModel
