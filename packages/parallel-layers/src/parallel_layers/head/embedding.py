"""The input and the output embedding of a language model, with the vocabulary sharded over a tensor-parallel group.

Shape suffixes: T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from parallel_layers.head.log_probs import LogProbs, linear_log_probs
from parallel_layers.head.vocabulary import check_token_ids, vocab_range
from parallel_layers.kernels.embedding import add_embedding_gradient_, embedding_gradient
from parallel_layers.linear.invariant import linear as invariant_linear
from parallel_layers.linear.low_rank import LowRank, enabled
from parallel_layers.module.initialization import as_linear, fill_parameter_, normal
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.seeds import shared_seed
from parallel_layers.module.sharding import Block, Sharding, set_sharding
from parallel_layers.training.weight_gradients import Destination

R = TypeVar("R")


class VocabParallelEmbedding(ParallelModule):
    """Look up rows of a table `[V, H]` whose rows are sharded over the group.

    Rank r holds the rows `r * n .. (r + 1) * n - 1` with `n = ceil(V / tp)`; rows from V on are padding and zero. Each
    rank looks up the ids that it holds and contributes zeros for the others, so the sum over the ranks is exact.

    Forward: all-reduce; `sequence_parallel`, which returns only this rank's tokens: reduce-scatter. Backward: none;
    sequence parallel: all-gather. The gradient of a row is complete on the rank that holds the row. It is summed in
    fp32 in the order of the tokens, so that equal inputs give equal bits.

    Initial rows are drawn from N(0, 1): ranks with equal seeds hold shards of one table. `counted`: see
    `VocabParallelHead`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        counted: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.first, self.last = vocab_range(num_embeddings, group)
        rows = -(-num_embeddings // (1 if group is None else group.size()))
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, dtype=dtype, device=device))
        self.lora: LowRank | None
        self.register_module("lora", None)
        if group is not None or not counted:
            set_sharding(self, "weight", Sharding(group, 0, num_embeddings, (Block(self.first, self.last, counted),)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows from N(0, 1) and set the padding to 0."""
        fill_parameter_(self, "weight", shared_seed(), normal(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of all `ids` `[T, ...]`: `[T, ..., H]`, sequence parallel `[T/tp, ..., H]`.

        Raises:
            ValueError: An id is outside `0 .. V - 1`; on every rank. CUDA ids and compiled code are checked by an
                assertion on the device; call `check_token_ids` before the copy to the GPU to get the ValueError.
        """
        check_token_ids(ids, self.num_embeddings)
        outside = (ids < self.first) | (ids >= self.last)
        local = (ids - self.first).masked_fill(outside, 0)
        gradient_rows = local.masked_fill(outside, len(self.weight))
        rows = look_up(self.weight, local, gradient_rows)
        if (lora := enabled(self.lora)) is not None:
            down, up, _ = lora.factors(up_group=self.group)
            rows = rows + F.linear(F.embedding(local, down.t()), up)
        if self.group is None:
            return rows
        rows = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        reduce = reduce_scatter_to_sequence_parallel if self.sequence_parallel else reduce_from_tensor_parallel
        # At most one addend is not zero, so the sum is exact in any dtype.
        return reduce(rows, self.group, reduce_dtype=rows.dtype)


def look_up(weight: Tensor, ids: Tensor, gradient_rows: Tensor) -> Tensor:
    """Return the rows `ids` `[T, ...]` of a table `[V, H]`: `[T, ..., H]`.

    The backward adds the gradient of each row to its row in `gradient_rows`, and leaves out ids of V or more.
    """
    rows: Tensor = _LookUp.apply(ids, gradient_rows, weight, Destination.of(weight))
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, gradient_rows: Tensor, weight: Tensor, destination: Destination) -> Tensor:
        ctx.save_for_backward(gradient_rows)
        ctx.rows, ctx.destination = len(weight), destination
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy, gradient_rows = dy.reshape(-1, dy.shape[-1]), ctx.saved_tensors[0].reshape(-1)
        if (total := ctx.destination.sum) is not None:
            add_embedding_gradient_(total, dy, gradient_rows)
            return None, None, None, None
        return None, None, embedding_gradient(dy, gradient_rows, ctx.rows, ctx.destination.dtype), None


class VocabParallelHead(ParallelModule):
    """The head of a causal, value, reward or token-classification model: a linear from hidden states to V outcomes.

    A language model calls the head for log-probs of labels. `values` are the outcomes themselves, for a value (V = 1),
    several rewards, or the labels of tokens; these heads are `replicated`.

    Rank r holds the rows `r * n .. (r + 1) * n - 1` with `n = ceil(V / tp)`, as in `VocabParallelEmbedding`. Rows from
    V on are padding: zero, without effect on results and gradients. Communication as in `linear_log_probs`.

    Args:
        hidden_size: H.
        vocab_size: V.
        group: The tensor-parallel group.
        sequence_parallel: Hidden states are this rank's tokens, `[T/tp, H]`.
        logit_scale: Factor on the logits.
        logit_softcap: Soft-cap of the scaled logits (Gemma 2); None for no cap.
        bias: Add a bias `[V]` to the values, for a replicated head.
        replicated: Every rank holds all rows and computes all values.
        allocate_weight: False for a tied head, which is called with the embedding's weight.
        counted: False for a second copy of a parameter that the gradient norm counts elsewhere (the tied head on the
            last stage of a pipeline).
        dtype, device: Dtype and device of the weight.

    The initial weight is drawn from U(-1/sqrt(H), 1/sqrt(H)).
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
        bias: bool = False,
        replicated: bool = False,
        allocate_weight: bool = True,
        counted: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.group, self.sequence_parallel = group, sequence_parallel and group is not None
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap
        if bias and not replicated:
            raise ValueError("bias=True needs replicated=True: linear_log_probs takes no bias")
        self.replicated = replicated
        rows = -(-vocab_size // (1 if group is None or replicated else group.size()))
        self.weight_shape = (rows, hidden_size)
        self.lora: LowRank | None
        self.register_module("lora", None)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(vocab_size, dtype=dtype, device=device))
        if allocate_weight:
            self.weight = nn.Parameter(torch.empty(self.weight_shape, dtype=dtype, device=device))
            if (group is not None and not replicated) or not counted:
                block = Block(*vocab_range(vocab_size, group), counted)
                set_sharding(self, "weight", Sharding(group, 0, vocab_size, (block,)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows from U(-1/sqrt(H), 1/sqrt(H)) and set the padding to 0."""
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                fill_parameter_(self, name, shared_seed(), as_linear(self.hidden_size))

    def effective_weight(self) -> Tensor:
        """Return the weight `[ceil(V/tp), H]` with the adapter merged; gradients flow to the adapter."""
        weight: Tensor = self.weight
        return weight if (lora := enabled(self.lora)) is None else weight + lora.delta(down_group=self.group)

    def run(self, function: Callable[[Tensor, Tensor], R], hidden: Tensor) -> R:
        """Return `function(hidden, weight)` with the effective weight; FSDP2 can take this method as a forward."""
        return function(hidden, self.effective_weight())

    def values(self, hidden: Tensor, *, tp_invariant: bool = False) -> Tensor:
        """Return `hidden @ weight^T + bias` `[T, V]`, in fp32 or for fp64 states in fp64, on every rank.

        `hidden` is `[T, H]`, under sequence parallelism `[T/tp, H]`. Backward: each rank contributes the gradients of
        its own tokens, which are summed for the weight; the gradient of the values is the same on every rank.
        Communication under sequence parallelism: one all-gather of the values.

        Args:
            hidden: The hidden states.
            tp_invariant: Compute by `parallel_layers.invariant.linear`.

        Raises:
            ValueError: The head is not replicated.
        """
        if not self.replicated:
            raise ValueError("a vocabulary-parallel head gives log-probs; build the head with replicated=True")
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        states, weight = hidden.to(dtype), self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.sequence_parallel:
            weight = copy_to_tensor_parallel(weight, self.group)
            bias = None if bias is None else copy_to_tensor_parallel(bias, self.group)
        if tp_invariant:
            values = invariant_linear(states, weight, bias)
        elif self.vocab_size == 1:  # the sum of a matrix-vector product does not depend on the number of tokens
            values = (states @ weight[0])[:, None]
            values = values if bias is None else values + bias
        else:
            values = F.linear(states, weight, bias)
        if self.sequence_parallel:
            # Every rank computes the same loss from all values, so the backward takes this rank's gradients.
            values = gather_from_sequence_parallel(values, self.group, reduce_gradient=False)
        return values

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool = True,
        keep_probabilities: bool | Literal["auto"] = False,
    ) -> LogProbs:
        """Return the log-probability of each label and the entropy of each prediction, `[T]` fp32 each.

        `hidden` is `[T, H]` (sequence parallel: `[T/tp, H]`), `labels` `[T]`; `weight` replaces the head's weight. See
        `linear_log_probs` for the options and errors.
        """
        if weight is None and self.weight is not None:
            weight = self.effective_weight()
        if weight is None:
            raise ValueError("this head was built with allocate_weight=False; call head(hidden, labels, weight)")
        if tuple(weight.shape) != self.weight_shape:
            raise ValueError(
                f"weight has shape {list(weight.shape)}, but each rank's part of {self.vocab_size} entries is "
                f"{list(self.weight_shape)}; divide the table as VocabParallelEmbedding does"
            )
        return linear_log_probs(
            hidden, weight, labels, group=self.group, sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size, logit_scale=self.logit_scale, logit_softcap=self.logit_softcap,
            temperature=temperature, entropy=entropy, keep_probabilities=keep_probabilities,
        )  # fmt: skip
