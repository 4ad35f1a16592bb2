"""Distillation: the divergence of a student's next-token distribution from a teacher's, without the logits `[T, V]`.

Shape suffixes: T tokens, H hidden, V this rank's rows of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.device.gpus import on_gpu
from parallel_layers.head.arguments import check_head, logit_transform, whole_length
from parallel_layers.head.chunked import LogitTransform
from parallel_layers.head.divergence import DIVERGENCES, Divergence
from parallel_layers.head.log_probs import linear_log_probs
from parallel_layers.head.outcomes import outcome_divergence, outcome_logits
from parallel_layers.head.teachers import Teacher, TeacherHead, TeacherTopK
from parallel_layers.head.two_heads import HeadOptions, head_divergence
from parallel_layers.head.vocabulary import IGNORE_INDEX, check_rows, check_token_ids, true_vocab_size
from parallel_layers.module.autocast import as_operand


def linear_distillation(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    teacher: Teacher,
    *,
    divergence: str = "forward_kl",
    mixture: float | None = None,
    group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Tensor:
    """Return each token's divergence between a teacher's distribution p and the student's q, in nats.

    - "forward_kl": KL(p, q) = sum_j p_j log(p_j / q_j), "reverse_kl": KL(q, p);
    - "jensen_shannon" (generalised; GKD, arXiv:2306.13649), with the share s = `mixture` and m = s p + (1 - s) q:
      s KL(p, m) + (1 - s) KL(q, m);
    - "skewed_forward_kl": KL(p, s p + (1 - s) q), "skewed_reverse_kl": KL(q, s q + (1 - s) p) (DistiLLM,
      arXiv:2402.03898).

    By teacher:

    - `TeacherHead`: over the whole vocabulary. Tiles of it hold the logits of both sides, each transformed as in
      `linear_log_probs`. The forward takes one pass over them, or two for a mixture where teacher's rows are sent or
      heads are converted; the backward recomputes the tiles.
    - `TeacherTopK`: over K + 1 outcomes, the listed tokens and all others together. This is a lower bound of the
      divergence over the vocabulary (data-processing inequality). The teacher's last outcome has the mass that the
      listed tokens leave, at least the dtype's epsilon.
    - `TeacherSamples`: "reverse_kl" alone, estimated by tokens drawn from the student: the value `log q - log p` of the
      drawn token, whose gradient is the score function's, `(log q - log p) d log q`. Both are unbiased; 0 for a label
      of -100.

    Gradients flow to the student's hidden states and head. No divergence is multiplied by a squared temperature.

    Communication of a `TeacherHead`: all-gather of six numbers a token over `group` (mixtures: two more), in the
    backward that of `linear_log_probs`. If the teacher's head is sharded otherwise than the student's, its group
    gathers the head's rows in parts in every pass; logits are never sent. `TeacherTopK`: all-gather of K + 1 numbers.

    Args:
        hidden_TH, weight_VH: The student's hidden states and rows of the head, as in `linear_log_probs`.
        teacher: What the teacher is known by.
        divergence: A name of the list above.
        mixture: The share s of the list above, between 0 and 1; only for divergences that have it.
        group, temperature, sequence_parallel, vocab_size, logit_scale, logit_softcap: The student's, as in
            `linear_log_probs`.

    Returns:
        `[T]` fp32 (fp64 for a student in fp64), bitwise equal on all ranks of `group`. It is infinite where the
        definition is.

    Raises:
        ValueError: The divergence is unknown, `mixture` or the teacher does not fit it; shapes, dtypes or numbers of
            tokens do not fit; a temperature, scale or cap is not positive; vocabularies differ without `ids`; or ids
            are outside the vocabulary or repeated.
    """
    kind = _divergence(divergence, mixture)
    hidden_TH, weight_VH = as_operand(hidden_TH), as_operand(weight_VH)
    check_head(hidden_TH, weight_VH, "the student's ")
    vocab_size = true_vocab_size(len(weight_VH), vocab_size, group)
    check_rows(len(weight_VH), vocab_size, group, hidden_TH.device)
    num_tokens = whole_length(hidden_TH, group, sequence_parallel)
    transform = logit_transform(temperature, logit_scale, logit_softcap, num_tokens)
    if isinstance(teacher, TeacherHead):
        return _from_head(hidden_TH, weight_VH, teacher, kind, vocab_size, group, sequence_parallel, transform)
    if isinstance(teacher, TeacherTopK):
        _check_listed(teacher, num_tokens, vocab_size)
        logits_TN = outcome_logits(hidden_TH, weight_VH, teacher.ids, transform, vocab_size, group, sequence_parallel)
        return outcome_divergence(teacher.log_probs, logits_TN, teacher.ids, kind)
    if divergence != "reverse_kl":
        raise ValueError(
            f"sampled tokens estimate the reverse KL alone, not divergence={divergence!r}; pass "
            "divergence='reverse_kl', or a TeacherHead or TeacherTopK"
        )
    if teacher.log_probs.shape != (num_tokens,):
        raise ValueError(f"the teacher's log-probs must be [{num_tokens}], got {list(teacher.log_probs.shape)}")
    log_q, _ = linear_log_probs(
        hidden_TH, weight_VH, teacher.labels, group=group, temperature=temperature, entropy=False,
        sequence_parallel=sequence_parallel, vocab_size=vocab_size, logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )  # fmt: skip
    difference = (log_q - teacher.log_probs).detach().masked_fill(teacher.labels == IGNORE_INDEX, 0.0)
    return difference + difference * (log_q - log_q.detach())


def _from_head(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    teacher: TeacherHead,
    divergence: Divergence,
    vocab_size: int,
    group: ProcessGroup | None,
    sequence_parallel: bool,
    transform: LogitTransform,
) -> Tensor:
    num_tokens = whole_length(hidden_TH, group, sequence_parallel)
    hidden, weight = as_operand(teacher.hidden.detach()), as_operand(teacher.weight.detach())
    check_head(hidden, weight, "the teacher's ")
    teacher_size = true_vocab_size(len(weight), teacher.vocab_size, teacher.group)
    check_rows(len(weight), teacher_size, teacher.group, weight.device)
    if (teacher_tokens := whole_length(hidden, teacher.group, teacher.sequence_parallel)) != num_tokens:
        raise ValueError(f"the student has {num_tokens} tokens and the teacher {teacher_tokens}; pass the same tokens")
    options = HeadOptions(
        divergence,
        vocab_size,
        group,
        sequence_parallel,
        teacher.group,
        teacher.sequence_parallel,
        _student_ids(teacher, vocab_size, teacher_size),
        logit_transform(
            teacher.temperature, teacher.logit_scale, teacher.logit_softcap, num_tokens, "the teacher's "
        ),
        transform,
    )  # fmt: skip
    return head_divergence(hidden_TH, weight_VH, hidden, weight, options)


def _divergence(name: str, mixture: float | None) -> Divergence:
    if name not in DIVERGENCES:
        raise ValueError(f"divergence={name!r} is unknown; use one of {', '.join(DIVERGENCES)}")
    has_mixture = DIVERGENCES[name](0.5).mixes
    if has_mixture != (mixture is not None):
        needs = "needs a mixture between 0 and 1" if has_mixture else "takes no mixture"
        raise ValueError(f"divergence={name!r} {needs}, got mixture={mixture}")
    if mixture is not None and not 0.0 < mixture < 1.0:
        raise ValueError(f"mixture={mixture} must be between 0 and 1; use forward_kl or reverse_kl for the limits")
    return DIVERGENCES[name](0.5 if mixture is None else mixture)


def _check_listed(teacher: TeacherTopK, num_tokens: int, vocab_size: int) -> None:
    ids, log_probs = teacher.ids, teacher.log_probs
    if ids.shape != log_probs.shape or ids.ndim != 2 or len(ids) != num_tokens or ids.is_floating_point():
        raise ValueError(
            f"the teacher's ids ({ids.dtype} {list(ids.shape)}) and log-probs {list(log_probs.shape)} must be "
            f"integers and numbers [{num_tokens}, K]"
        )
    if not 0 < ids.shape[1] < vocab_size:
        raise ValueError(f"the teacher lists {ids.shape[1]} tokens; list 1 to {vocab_size - 1} of the vocabulary")
    check_token_ids(ids, vocab_size, ignore_index=-1)
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if on_gpu(ids) or torch.compiler.is_compiling():
        torch._assert_async(~repeated.any(), "a row of the teacher's ids has a token twice")
    elif not ids.is_meta and repeated.any():
        row, column = repeated.nonzero()[0].tolist()
        raise ValueError(f"row {row} of the teacher's ids lists token {int(ordered[row, column])} twice; list it once")


def _student_ids(teacher: TeacherHead, vocab_size: int, teacher_size: int) -> Tensor | None:
    """Return the student's id of each row of the teacher's padded head, -1 for none; None for equal vocabularies."""
    if teacher.ids is None:
        if vocab_size != teacher_size:
            raise ValueError(
                f"the student's vocabulary has {vocab_size} entries and the teacher's {teacher_size}; pass the teacher "
                "ids=..., the teacher's id of each of the student's ids, or vocab_size=... without padding"
            )
        return None
    ids = teacher.ids.to(teacher.weight.device)
    if ids.shape != (vocab_size,) or ids.is_floating_point():
        raise ValueError(f"ids must be integers [{vocab_size}], got {ids.dtype} {list(ids.shape)}")
    shared = (ids >= 0).nonzero()[:, 0]
    targets = ids[shared].long()
    if not len(shared) or int(targets.max()) >= teacher_size or len(targets.unique()) != len(targets):
        raise ValueError(f"ids must be different ids of the teacher's vocabulary 0..{teacher_size - 1}, or -1")
    padded = len(teacher.weight) * (1 if teacher.group is None else teacher.group.size())
    return targets.new_full((padded,), -1).index_put((targets,), shared)
