"""Head and losses over a sharded vocabulary, without materialised logits."""

from parallel_layers.head.embedding import VocabParallelEmbedding, VocabParallelHead
from parallel_layers.head.log_probs import LogProbs, linear_log_probs, vocab_parallel_log_probs

__all__ = ["LogProbs", "VocabParallelEmbedding", "VocabParallelHead", "linear_log_probs", "vocab_parallel_log_probs"]
