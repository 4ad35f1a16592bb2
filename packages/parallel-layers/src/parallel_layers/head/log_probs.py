"""Log-probabilities and entropies from hidden states, without materialising the logits `[T, V]`, or from logits.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import gpu, on_gpu
from parallel_layers.head.arguments import check_head, check_labels, logit_transform
from parallel_layers.head.invariant import check_invariant
from parallel_layers.head.operators import log_probs_op
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.vocabulary import group_name, true_vocab_size
from parallel_layers.module.autocast import as_operand


class LogProbs(NamedTuple):
    """Results for each token, in fp32 (fp64 for fp64 inputs)."""

    log_probs: Tensor
    """`[T]`, log-probability of each label; 0 for ignored labels."""
    entropy: Tensor | None
    """`[T]`, entropy of each token's distribution in nats, also for ignored labels; None without `entropy=True`."""


def linear_log_probs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    keep_probabilities: bool | Literal["auto"] = False,
    sampling_mask: SamplingMask | None = None,
    blocks: int = 0,
) -> LogProbs:
    """Return the log-probability of each label, and the entropy, under a language-model head.

    With `z = softcap * tanh(logit_scale * hidden @ weight^T / softcap) / temperature` and `p = softmax(z)`,

        log_probs = z_label - logsumexp(z)        entropy = -sum_j p_j log p_j

    The forward walks tiles of the vocabulary with four fp32 numbers a token (`head.chunked`), and saves the
    log-sum-exp and the entropy. The backward recomputes the logits tile by tile:

        dz_j = g_log_prob (1[j = label] - p_j) - g_entropy p_j (z_j - logsumexp + entropy)

    The gradient of the hidden states is summed in fp32.

    Every rank of `group` passes the same labels and hidden states and its own rows of the head: rank r holds the rows
    `r * V ... (r + 1) * V - 1` of the (padded) vocabulary. Results are bitwise equal on all ranks, and the hidden
    states' gradient is complete.

    Forward: all-gather of the statistics `[4, T]`; sequence parallel: also of the hidden states. Backward: all-reduce
    of the hidden states' gradient; sequence parallel: all-gather and reduce-scatter.

    Args:
        hidden_TH: Hidden states after the final norm, `[T, H]`; with `sequence_parallel` `[T/tp, H]`.
        weight_VH: This rank's rows of the head, in the same dtype. torch.autocast rounds both to its dtype first.
        labels_T: `[T]` integers: the token whose probability is returned (already shifted; see `next_token_labels`).
            -100 is the label of tokens without a label; their log-prob is 0.
        group: The tensor-parallel group; None for an unsharded head.
        temperature: A positive number, or a tensor `[T]`. It gets no gradient.
        entropy: Return the entropy.
        sequence_parallel: The hidden states are sharded over `group` along the tokens.
        vocab_size: The size of the vocabulary without padding; rows beyond it have no effect. Default: all rows;
            required with several ranks.
        logit_scale: Factor on the logits.
        logit_softcap: Soft-cap of the scaled logits (Gemma 2, arXiv:2408.00118); None for no cap.
        keep_probabilities: Keep the probabilities, `[T, V]` in bf16, for the backward, which then takes two GEMMs
            instead of three. It has an effect only where the fused kernels run. The last backward through a graph
            overwrites them; a backward with `retain_graph` takes a tenth more memory. "auto": keep them where the GPU
            has room for them, the head's gradient and a tenth of its memory.
        sampling_mask: The tokens that each label was drawn from, T rows on the device of the labels, the same on all
            ranks: log-probs and entropies are those of the distribution over these tokens alone. Rows without ids give
            0. The logits' GEMMs are those of the whole vocabulary; the mask adds at most 32 MiB at a time.
        blocks: Compute results whose bits depend only on a token's hidden state and the head, at tp 1, 2, 4, ...
            `blocks` (see `head.invariant`); gradients are the ordinary gradients, and nothing is kept. 0: the ordinary
            results.

    Returns:
        `LogProbs(log_probs, entropy)`, `[T]` fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: Shapes or dtypes do not fit; the rows cannot hold the vocabulary; a temperature, scale or cap is not
            positive; ranks have different rows or vocabularies (compared once for each group and size); a label is
            outside the vocabulary, or not in its row of the sampling mask. The last three are raised on every rank.
            With `blocks`: it is not a power of two, the group's size does not divide it, ranks do not hold
            `ceil(vocab_size / tp)` rows each, or the dtype is fp64.
    """
    hidden_TH, weight_VH = as_operand(hidden_TH), as_operand(weight_VH)
    vocab_size = true_vocab_size(len(weight_VH), vocab_size, group)
    check_head(hidden_TH, weight_VH)
    labels_T = check_labels(hidden_TH, labels_T, sampling_mask, vocab_size, group, sequence_parallel)
    transform = logit_transform(temperature, logit_scale, logit_softcap, len(labels_T))
    temperatures_T = transform.temperature if isinstance(transform.temperature, Tensor) else None
    numbers = list(transform if temperatures_T is None else transform._replace(temperature=1.0))
    mask = [] if sampling_mask is None else [sampling_mask.ids, sampling_mask.offsets]
    if blocks:
        check_invariant(weight_VH, vocab_size, blocks, group)
    trains = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    if keep_probabilities == "auto":
        keep_probabilities = trains and has_room(len(labels_T), weight_VH)
    keep = keep_probabilities and not blocks and trains
    log_probs, entropy_T, *_ = log_probs_op(
        hidden_TH, weight_VH, labels_T, temperatures_T, mask, numbers, vocab_size, sequence_parallel,
        group_name(group), keep, blocks,
    )  # fmt: skip
    return LogProbs(log_probs, entropy_T if entropy else None)


def has_room(num_tokens: int, weight_VH: Tensor) -> bool:
    """Return whether a GPU has room for a head's probabilities, its gradient, and a tenth of the GPU's memory.

    False on other devices and in compiled code.
    """
    if not on_gpu(weight_VH) or torch.compiler.is_compiling():
        return False
    free, total = gpu.mem_get_info(weight_VH.device)
    # torch holds memory that no tensor uses.
    free += gpu.memory_reserved(weight_VH.device) - gpu.memory_allocated(weight_VH.device)
    probabilities = 2 * num_tokens * len(weight_VH)
    # A 16-bit gradient, and its fp32 copy.
    gradient = (weight_VH.itemsize + 4) * weight_VH.numel() if weight_VH.requires_grad else 0
    return probabilities + gradient + total // 10 <= free


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    entropy: bool = True,
) -> LogProbs:
    """Return the log-probability of each label, `z_label - logsumexp(z)`, and the entropy, `-sum_j p_j log p_j`.

    Rank r holds the columns of the entries `r * V ... (r + 1) * V - 1` of the (padded) vocabulary, and all labels. If
    the logits come from a GEMM, `linear_log_probs` gives the same results without holding them.

    Forward: all-gather of the statistics `[4, T]`. The backward is `linear_log_probs`' and communicates nothing;
    upstream gradients must be the same on all ranks. Both work in tiles and make no temporary of the logits' size.

    Args:
        logits: `[..., V]`, this rank's columns. Results are finite for any finite logits; logits of -inf are entries of
            probability zero.
        labels: `[...]` integers of the whole vocabulary, the same on all ranks.
        group, vocab_size, entropy: As in `linear_log_probs`.

    Returns:
        `LogProbs(log_probs, entropy)`, `[...]` fp32 (fp64 for fp64 logits), bitwise equal on all ranks.

    Raises:
        ValueError: As `linear_log_probs`, for shapes, vocabularies and labels.
    """
    if logits.ndim < 1 or labels.shape != logits.shape[:-1] or not logits.is_floating_point():
        raise ValueError(
            f"logits {logits.dtype} {list(logits.shape)} must be floating [..., V], labels {list(labels.shape)} [...]"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    rows, vocab_size = logits.reshape(-1, logits.shape[-1]), true_vocab_size(logits.shape[-1], vocab_size, group)
    unchanged = [1.0, 0.0, 1.0]
    log_probs, entropies, *_ = log_probs_op(
        rows, None, labels.reshape(-1), None, [], unchanged, vocab_size, False, group_name(group), False, 0
    )
    return LogProbs(log_probs.view(labels.shape), entropies.view(labels.shape) if entropy else None)
