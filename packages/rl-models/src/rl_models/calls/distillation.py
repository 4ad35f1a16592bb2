"""Distillation: the teacher of a batch's tokens, in fields of the batch.

A teacher is known by its final hidden states, in the field `teacher_states` `[T, H]`, beside its head, which the actor
holds; or by its log-probs of K tokens, in `teacher_ids` and `teacher_log_probs` `[T, K]`, with ids of -1 for none. All
stand at the token that they predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ckpt import Checkpoint, Place, layout_for, load_hf
from parallel_layers import PackedSequence
from parallel_layers.head import Distillation, TeacherHead, TeacherTopK
from parallel_models import Engine, Grid, model_config
from rl_models.batch.batch import Batch

# The fields of a batch with a teacher's final hidden states `[T, H]`, or its tokens and their log-probs `[T, K]`.
TEACHER_STATES = "teacher_states"
TEACHER_IDS = "teacher_ids"
TEACHER_LOG_PROBS = "teacher_log_probs"


class Divergence(NamedTuple):
    """A divergence from a teacher, by the names of `parallel_layers.head.linear_distillation`."""

    name: str
    mixture: float | None = None


def load_teacher_head(checkpoint: Checkpoint, grid: Grid, dtype: torch.dtype | None) -> TeacherHead:
    """Return the head of a teacher, with this rank's rows of it and no hidden states; every rank of the grid calls it.

    The rows are divided as those of a policy on the grid; in a pipeline the last stage alone holds them. A rank reads
    one layer beside them.
    """
    config = model_config(checkpoint)
    layers = config.num_layers
    place = Place(tp=(grid.rank("tp"), grid.dims.tp), pp=(layers - 1, layers))
    tensors = load_hf(checkpoint, layout_for(checkpoint, layers=[1] * layers), place, dtype=dtype, group=grid.everyone)
    weight = tensors["lm_head.weight"]
    if grid.rank("pp") < grid.dims.pp - 1:
        weight = weight[:0].clone()
    weight = weight.to(grid.device)
    return TeacherHead(
        weight.new_empty(0, weight.shape[1]),
        weight,
        group=grid.group("tp"),
        vocab_size=config.vocab_size,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
    )


def require_teacher(engine: Engine, batch: Batch, head: TeacherHead | None) -> None:
    """Raise ValueError unless the batch has a teacher that the engine can learn from."""
    if not engine.distils:
        raise ValueError("a divergence needs backend='parallel' and share_prefixes=False")
    states = batch.fields.get(TEACHER_STATES)
    if states is None:
        ids, log_probs = (batch.fields.get(name) for name in (TEACHER_IDS, TEACHER_LOG_PROBS))
        if (
            ids is None
            or log_probs is None
            or ids.dim() != 2
            or ids.shape != log_probs.shape
            or ids.is_floating_point()
        ):
            raise ValueError(
                f"a divergence needs the field {TEACHER_STATES} [T, H], or {TEACHER_IDS} and {TEACHER_LOG_PROBS} "
                f"[T, K], integers and numbers; the batch has {sorted(batch.fields)}"
            )
    elif head is None or states.dim() != 2 or states.shape[1] != head.weight.shape[1]:
        needed = "load_teacher_head(folder)" if head is None else f"[T, {head.weight.shape[1]}], as the teacher's head"
        raise ValueError(f"{TEACHER_STATES} {list(states.shape)} needs {needed}")


def teachers(
    batch: Batch,
    positions: Sequence[Tensor],
    packs: Sequence[PackedSequence],
    head: TeacherHead | None,
    divergence: Divergence,
    temperature: float,
) -> list[Distillation]:
    """Return the teacher of the token after each token of each micro-batch, padding included.

    `positions` says where in the batch the tokens of each micro-batch stand. A `head` has the student's temperature.
    """
    distillations = []
    for indices, packed in zip(positions, packs, strict=True):

        def rows(name: str, padding: float, indices: Tensor = indices, length: int = packed.num_tokens) -> Tensor:
            following = batch[name][indices][1:]
            return F.pad(following, (0, 0, 0, length - len(following)), value=padding)

        if TEACHER_STATES in batch.fields:
            assert head is not None
            teacher = replace(head, hidden=rows(TEACHER_STATES, 0).to(head.weight.dtype), temperature=temperature)
            distillations.append(Distillation(teacher, *divergence))
        else:
            distillations.append(
                Distillation(TeacherTopK(rows(TEACHER_IDS, -1), rows(TEACHER_LOG_PROBS, 0)), *divergence)
            )
    return distillations
