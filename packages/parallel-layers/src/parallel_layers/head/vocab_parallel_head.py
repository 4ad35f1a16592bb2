"""`VocabParallelHead`: the output embedding of a language model, sharded over a tensor-parallel group.

Shape suffixes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.head.embedding import vocab_range
from parallel_layers.head.linear_log_probs import LogProbs, linear_log_probs
from parallel_layers.initialization import as_linear, fill_parameter_, shared_seed
from parallel_layers.parallel_module import ParallelModule
from parallel_layers.sharding import Block, Sharding, set_sharding


class VocabParallelHead(ParallelModule):
    """A language-model head with its vocabulary, padding and soft-cap.

    Rank r holds the rows `r * n .. (r + 1) * n - 1` with `n = ceil(V / tp)`, as in `VocabParallelEmbedding`. Rows from
    V on are padding: zero, without effect on results and gradients. Communication as in `linear_log_probs`.

    Args:
        hidden_size: H.
        vocab_size: V.
        group: The tensor-parallel group.
        sequence_parallel: Hidden states are this rank's tokens, `[T/tp, H]`.
        logit_scale: Factor on the logits.
        logit_softcap: Soft-cap of the scaled logits (Gemma 2); None for no cap.
        allocate_weight: False for a tied head, which is called with the embedding's weight.
        counted: False for a second copy of a parameter that the gradient norm counts elsewhere (the tied head on the
            last stage of a pipeline).
        dtype: The dtype of the weight.
        device: The device of the weight.

    The initial weight is drawn from U(-1/sqrt(H), 1/sqrt(H)), by one number from torch's default CPU generator.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        allocate_weight: bool = True,
        counted: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.group, self.sequence_parallel = group, sequence_parallel and group is not None
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap
        rows = -(-vocab_size // (1 if group is None else group.size()))
        self.weight_shape = (rows, hidden_size)
        self.register_parameter("weight", None)
        if allocate_weight:
            self.weight = nn.Parameter(torch.empty(self.weight_shape, dtype=dtype, device=device))
            if group is not None or not counted:
                set_sharding(
                    self, "weight", Sharding(group, 0, vocab_size, (Block(*vocab_range(vocab_size, group), counted),))
                )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows from U(-1/sqrt(H), 1/sqrt(H)) and set the padding to 0."""
        if self.weight is not None:
            fill_parameter_(self, "weight", shared_seed(), as_linear(self.hidden_size))

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
        keep_probabilities: bool = False,
    ) -> LogProbs:
        """Return the log-probability of each label and the entropy of each prediction, `[T]` fp32 each.

        `hidden` is `[T, H]` (sequence parallel: `[T/tp, H]`), `labels` `[T]`; `weight` replaces the head's own. The
        options and errors are those of `linear_log_probs`.
        """
        weight = self.weight if weight is None else weight
        if weight is None:
            raise ValueError("this head was built with allocate_weight=False; call head(hidden, labels, weight)")
        if tuple(weight.shape) != self.weight_shape:
            raise ValueError(
                f"weight has shape {list(weight.shape)}, but each rank's part of {self.vocab_size} entries is "
                f"{list(self.weight_shape)}; divide the table as VocabParallelEmbedding does"
            )
        return linear_log_probs(
            hidden,
            weight,
            labels,
            group=self.group,
            temperature=temperature,
            entropy=entropy,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            keep_probabilities=keep_probabilities,
        )

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.hidden_size}, {self.vocab_size}, rows {self.weight_shape[0]}, softcap={self.logit_softcap}"
