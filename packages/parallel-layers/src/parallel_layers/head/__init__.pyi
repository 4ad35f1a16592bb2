from parallel_layers.head.chunked import TILE_ELEMENTS as TILE_ELEMENTS, tile_shape as tile_shape
from parallel_layers.head.embedding import look_up as look_up
from parallel_layers.head.fused import BLOCK_V as BLOCK_V, slice_entries as slice_entries
from parallel_layers.head.log_probs import vocab_parallel_log_probs as vocab_parallel_log_probs
from parallel_layers.head.vocabulary import check_token_ids as check_token_ids, vocab_range as vocab_range
