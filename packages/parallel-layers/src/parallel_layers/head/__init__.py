"""Head and losses over a sharded vocabulary, without materialised logits."""

from parallel_layers.head.linear_log_probs import LogProbs, linear_log_probs
from parallel_layers.head.vocab_parallel_head import VocabParallelHead
from parallel_layers.head.vocab_parallel_log_probs import vocab_parallel_log_probs

__all__ = ["LogProbs", "VocabParallelHead", "linear_log_probs", "vocab_parallel_log_probs"]
