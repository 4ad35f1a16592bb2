"""Prefix sharing: compute a prompt once for many responses (group-relative RL).

    packed:  | prompt a | response a1 | response a2 | prompt b | response b1 | ...

Every piece is a segment. A prompt attends to itself; a response attends to the keys of its prompt and its own keys. For
this the key side of attention lists the rows of the prompt again before the rows of each response. The head computes
one row for each response token: the distribution that predicts the token. The last token of the prompt predicts the
first token of every response.

Shapes: T tokens of the shared batch, J rows of the key side, R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan
from parallel_layers import PackedSequence
from parallel_layers.distributed.collectives import gather_from_sequence_parallel


@dataclass(frozen=True)
class SharedPrefixes:
    """Prompts and their responses, packed with each prompt once, as `share_prefixes` returns them.

    Attributes:
        packed: The T tokens; positions of a response continue those of its prompt.
        key_index: `[J]`, the rows of the key side as indices of tokens.
        cu_seqlens_k: The boundaries of the segments on the key side.
        max_seqlen_k: The length of the longest prompt together with a response.
        rows: `[R]` on the CPU, the token that predicts each scored token.
        labels: `[R]`, the scored tokens: those of the responses, and on request of the prompts.
        lengths: The lengths of the scored pieces, prompt by prompt.
    """

    packed: PackedSequence
    key_index: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int
    rows: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device | str) -> "SharedPrefixes":
        """Return the same batch on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            key_index=self.key_index.to(device),
            cu_seqlens_k=self.cu_seqlens_k.to(device),
            labels=self.labels.to(device),
        )

    def split(self, values: Tensor) -> list[Tensor]:
        """Split `values` `[R, ...]` into one tensor per response, prompt by prompt."""
        return list(values.split(self.lengths))


def share_prefixes(
    prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], *, score_prompts: bool = False
) -> SharedPrefixes:
    """Pack each prompt once with the responses to it.

    Args:
        prompts: One-dimensional tensors of ids, not empty.
        responses: For each prompt, one-dimensional tensors of ids.
        score_prompts: Score the tokens of the prompts, too, but for the first of each: results hold those of a prompt
            before those of its responses.

    Raises:
        ValueError: The counts differ, or a prompt is empty.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts but responses to {len(responses)}")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty: the last token of a prompt predicts the first token of each response")
    pieces, positions, keys, rows, labels, lengths_k = [], [], [], [], [], []
    start = 0
    for prompt, group in zip(prompts, responses, strict=True):
        prompt_rows = torch.arange(start, start + len(prompt))
        for piece, offset in [(prompt, 0), *((response, len(prompt)) for response in group)]:
            own = torch.arange(start, start + len(piece))
            seen = own if offset == 0 else torch.cat([prompt_rows, own])
            pieces.append(piece)
            positions.append(torch.arange(offset, offset + len(piece)))
            keys.append(seen)
            lengths_k.append(len(seen))
            if offset:
                rows.append(torch.cat([prompt_rows[-1:], own])[: len(piece)])
                labels.append(piece.long())
            elif score_prompts:
                rows.append(own[:-1])
                labels.append(piece[1:].long())
            start += len(piece)
    plain = PackedSequence.from_sequences(pieces)
    device = plain.input_ids.device
    nothing = torch.zeros(0, dtype=torch.int64)
    return SharedPrefixes(
        packed=replace(plain, position_ids=torch.cat([nothing, *positions]).to(device)),
        key_index=torch.cat([nothing, *keys]).to(device),
        cu_seqlens_k=torch.tensor([0, *lengths_k]).cumsum(0).int().to(device),
        max_seqlen_k=max(lengths_k, default=0),
        rows=torch.cat([nothing, *rows]),
        labels=torch.cat([nothing.to(device), *labels]),
        lengths=tuple(map(len, labels)),
    )


@dataclass(frozen=True)
class HeadRows:
    """The hidden states of this rank that the head takes, and the places of its results.

    A rank's rows are padded to the largest count of any rank, so that one all-gather joins them.

    Attributes:
        local: [m] indices of this rank's tokens.
        chosen: [c] which of the R rows these are; the remaining m - c are padding.
        order: [R] where each row stands among the gathered sp * m.
    """

    local: Tensor
    chosen: Tensor
    order: Tensor
    plan: BatchPlan

    @property
    def count(self) -> int:
        """R."""
        return len(self.order)

    def take(self, values_R: Tensor, fill: float) -> Tensor:
        """Return this rank's part of a tensor with one entry per response token."""
        mine = values_R[self.chosen.to(values_R.device)]
        return torch.cat([mine, mine.new_full((len(self.local) - len(mine), *mine.shape[1:]), fill)])

    def collect(self, local: Tensor) -> Tensor:
        """Gather `[m, n]` of each rank into `[R, n]` on every rank. Backward: this rank's part of the gradient."""
        whole = gather_from_sequence_parallel(local, self.plan.group, reduce_gradient=False)
        return whole[self.order.to(whole.device)]


def shared_plan(shared: SharedPrefixes, plan: BatchPlan) -> BatchPlan:
    """Return the plan of the T tokens with the key side of shared prefixes; padding attends to itself."""
    index, bounds = shared.key_index, shared.cu_seqlens_k
    padding = torch.arange(plan.num_given, plan.num_tokens, device=index.device)
    if len(padding):
        index, bounds = torch.cat([index, padding]), torch.cat([bounds, bounds[-1:] + len(padding)])
    longest = max(shared.max_seqlen_k, len(padding))
    return replace(plan, key_index=index, cu_seqlens_k=bounds, max_seqlen_k=longest)


def head_rows(shared: SharedPrefixes, plan: BatchPlan) -> HeadRows:
    """Assign every row to the rank that holds its token."""
    part = plan.num_tokens // plan.world_size
    owner = shared.rows // part
    counts = torch.bincount(owner, minlength=plan.world_size)
    most = max(int(counts.max()), 1)
    rank = 0 if plan.group is None else plan.group.rank()
    chosen = (owner == rank).nonzero().flatten()
    local = torch.zeros(most, dtype=torch.int64)
    local[: len(chosen)] = shared.rows[chosen] - rank * part
    order = torch.empty_like(shared.rows)
    for other in range(plan.world_size):
        theirs = (owner == other).nonzero().flatten()
        order[theirs] = other * most + torch.arange(len(theirs))
    return HeadRows(local.to(shared.labels.device), chosen, order, plan)
