"""Log-probabilities and entropies straight from hidden states: the logits `[T, V]` are never materialised.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.autocast import as_operand, wide
from parallel_layers.head.linear_operators import linear_log_probs_op
from parallel_layers.head.vocabulary import group_name, true_vocab_size


class LogProbs(NamedTuple):
    """Per-token results: fp32 whatever the weights are (fp64 for fp64 inputs)."""

    log_probs: Tensor
    """`[T]`, log-probability of each label; 0 where the label is ignored."""
    entropy: Tensor | None
    """`[T]`, entropy of each token's distribution in nats, ignored labels included; None when not asked for."""


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
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    accumulate_main_grad: bool = False,
    keep_probabilities: bool = False,
    check_labels: bool = True,
) -> LogProbs:
    """Log-probability of each label, and entropy, under a language-model head.

    With `z = softcap * tanh(logit_scale * hidden @ weight^T / softcap) / temperature` and `p = softmax(z)`,

        log_probs = z_label - logsumexp(z)        entropy = -sum_j p_j log p_j

    The forward walks tiles of the vocabulary and keeps four fp32 numbers a token (see `losses.softmax`); only the
    log-sum-exp and the entropy are saved. The backward recomputes the logits tile by tile:

        dz_j = g_log_prob (1[j = label] - p_j) - g_entropy p_j (z_j - logsumexp + entropy)

    The gradient of the hidden states is summed in fp32; each slice of the weight's gradient is written once. A weight
    or hidden states that need no gradient cost nothing in the backward.

    Vocabulary parallelism: every rank of `group` calls this with the same labels and hidden states, and with its own
    rows of the head: rank r holds rows `r * V ... (r + 1) * V - 1` of the (padded) vocabulary. Forward: one all-gather
    of `[4, T]` statistics; results are bitwise equal on all ranks. Backward: one all-reduce of the hidden states'
    gradient, so it comes back complete. With `sequence_parallel`, every rank passes its `[T / tp, H]` of the hidden
    states; they are gathered here (and again in the backward), and their gradient comes back as this rank's rows
    (reduce-scatter).

    Args:
        hidden_TH: hidden states after the final norm, `[T, H]`, or `[T / tp, H]` with `sequence_parallel`.
        weight_VH: this rank's rows of the head, of the same dtype. torch.autocast rounds both to its own first, as it
            does for any linear layer; results and sums stay fp32.
        labels_T: `[T]`, integer: the token whose probability is asked for (already shifted; see `next_token_labels`).
        group: the tensor-parallel group; None when the head is not sharded.
        temperature: positive number, or a tensor `[T]` of them. A constant: it gets no gradient.
        entropy: whether to return the entropy.
        sequence_parallel: whether hidden states are sharded over `group` along the tokens.
        vocab_size: the true vocabulary; rows beyond it are padding, invisible in results and gradients. Default: all
            rows; required with several ranks, which do not know how many of their rows are padding.
        ignore_index: the label that means "no label": log-prob 0, no gradient from it.
        logit_scale: factor on the product.
        logit_softcap: soft-cap of the scaled product (Gemma 2, arXiv:2408.00118); None for none.
        accumulate_main_grad: add the weight's gradient to `weight_VH.main_grad`, which the caller has made, in fp32
            (fp64 for an fp64 weight); return none.
        keep_probabilities: keep the probabilities, `[T, V]` rounded to bf16, from the forward to the backward, which
            then needs two matrix products instead of three. Where fused kernels run; elsewhere it changes nothing. The
            last backward through a graph writes their gradient over them; one with `retain_graph` takes a tenth more.
        check_labels: whether a label outside the vocabulary is an error: a ValueError, or for CUDA labels an assertion
            on the device, as in `VocabParallelEmbedding`. Unchecked, such a label gives NaN, no plausible number.

    Returns:
        `LogProbs(log_probs, entropy)`, fp32 `[T]` (fp64 for fp64 inputs, so that gradients can be checked).

    Raises:
        ValueError: shapes or dtypes that do not fit, a vocabulary that the rows cannot hold, a temperature, scale or
            cap that is not positive, ranks with unequal rows or vocabularies (on every rank alike; they compare both
            once for each group and size), or (on every rank alike) a label outside the vocabulary.
    """
    main_grad = getattr(weight_VH, "main_grad", None) if accumulate_main_grad else None
    if accumulate_main_grad and not _can_accumulate(main_grad, weight_VH):
        raise ValueError(
            f"accumulate_main_grad=True needs weight_VH.main_grad, a {wide(weight_VH.dtype)} tensor of shape "
            f"{list(weight_VH.shape)}; "
            f"it is {None if main_grad is None else (main_grad.dtype, list(main_grad.shape))}"
        )
    hidden_TH, weight_VH = as_operand(hidden_TH), as_operand(weight_VH)
    size = 1 if group is None else group.size()
    vocab_size = true_vocab_size(len(weight_VH), vocab_size, group)
    _validate(hidden_TH, weight_VH, labels_T, temperature, size, sequence_parallel, logit_scale, logit_softcap)
    # A one-element tensor is spread over the tokens: reading it on the host would wait for the device.
    temperatures_T = temperature.detach().expand(len(labels_T)) if isinstance(temperature, Tensor) else None
    log_probs, entropy_T, *_ = linear_log_probs_op(
        hidden_TH,
        weight_VH,
        labels_T,
        temperatures_T,
        main_grad,
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(logit_scale),
        float(logit_softcap or 0.0),
        vocab_size,
        ignore_index,
        check_labels,
        keep_probabilities and torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad),
        sequence_parallel,
        group_name(group),
    )
    return LogProbs(log_probs, entropy_T if entropy else None)


def _can_accumulate(main_grad: Tensor | None, weight_VH: Tensor) -> bool:
    return main_grad is not None and main_grad.shape == weight_VH.shape and main_grad.dtype == wide(weight_VH.dtype)


def linear_policy_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> Tensor:
    """`loss(log_probs, entropy)` of a language-model head, one matrix product cheaper than by `linear_log_probs` alone.

    A loss of each token's log-prob and entropy (a policy gradient, PPO's clipped objective, a KL estimate) needs the
    logits in its backward only through the probabilities. Here the forward keeps those, rounded to bf16, `[T, V]` of
    this rank, and the backward goes straight to the gradients of hidden states and head: three products instead of
    four. Log-probs, entropies and the loss are the same bits; gradients agree within bf16 rounding. The price is that
    memory, from here to the backward: use it where a micro-batch's bf16 probabilities fit.

    Args:
        hidden_TH: as in `linear_log_probs`.
        weight_VH: as in `linear_log_probs`.
        labels_T: as in `linear_log_probs`.
        loss: a differentiable function of `(log_probs [T], entropy [T])`, both fp32.
        options: keyword arguments of `linear_log_probs`, except `entropy` and `keep_probabilities`.

    Returns:
        What `loss` returns. Communication and errors are those of `linear_log_probs`.
    """
    out = linear_log_probs(hidden_TH, weight_VH, labels_T, entropy=True, keep_probabilities=True, **options)
    assert out.entropy is not None
    return loss(out.log_probs, out.entropy)


def _validate(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    temperature: float | Tensor,
    group_size: int,
    sequence_parallel: bool,
    logit_scale: float,
    logit_softcap: float | None,
) -> None:
    """Raise ValueError for arguments that do not fit together; looks at shapes and numbers, never at device memory."""
    if hidden_TH.ndim != 2 or weight_VH.ndim != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden states {list(hidden_TH.shape)} and head {list(weight_VH.shape)} must be [T, H] and [V, H]; "
            "flatten batch and sequence first"
        )
    if hidden_TH.dtype != weight_VH.dtype or not hidden_TH.is_floating_point():
        raise ValueError(
            f"hidden states ({hidden_TH.dtype}) and head ({weight_VH.dtype}) must share a floating dtype; "
            "cast one of them, or run the model under torch.autocast"
        )
    num_tokens = len(hidden_TH) * (group_size if sequence_parallel else 1)
    if labels_T.shape != (num_tokens,) or labels_T.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels must be int64 [{num_tokens}], one for each token of the whole sequence "
            f"(hidden states {list(hidden_TH.shape)}, sequence_parallel={sequence_parallel}, group of {group_size}), "
            f"got {labels_T.dtype} {list(labels_T.shape)}"
        )
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive")
    elif temperature.shape not in ((), (num_tokens,)):
        raise ValueError(f"a temperature tensor must be [{num_tokens}], one a token; got {list(temperature.shape)}")
    if not logit_scale > 0:
        raise ValueError(f"logit_scale={logit_scale} must be positive")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap} must be positive, or None for no cap")
