from parallel_layers.attention.cache import LayerCache as LayerCache, SequenceCache as SequenceCache
from parallel_layers.inference.block_tables import OutOfBlocks as OutOfBlocks
from parallel_layers.inference.cache import PagedKVCache as PagedKVCache
from parallel_layers.inference.decode_steps import DecodeSteps as DecodeSteps, decodes_in_blocks as decodes_in_blocks
from parallel_layers.inference.float8 import float8_attributes as float8_attributes
from parallel_layers.inference.sampling import sample as sample, sample_with_mask as sample_with_mask
from parallel_layers.inference.states import Checkpoint as Checkpoint
from parallel_layers.inference.truncation import truncate as truncate
from parallel_layers.inference.view import decoding_attributes as decoding_attributes
