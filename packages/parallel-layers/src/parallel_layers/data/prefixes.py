"""Prefix sharing: compute a prompt once for many responses (group-relative RL).

    packed:  | prompt a | response a1 | response a2 | prompt b | response b1 | ...

Every piece is a segment. A prompt attends to itself; a response attends to the keys of its prompt and its own keys. For
this the key side of attention lists the rows of the prompt again before the rows of each response (`SharedKeys`). Heads
compute one row for each scored token: the prediction of this token. The last token of the prompt predicts the first
token of every response.

Shapes: T tokens of the shared batch, J rows of the key side, R scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel_layers.attention.shared_keys import SharedKeys
from parallel_layers.data.packing import PackedSequence


@dataclass(frozen=True)
class SharedPrefixes:
    """Prompts and their responses, packed with each prompt once, as `share_prefixes` returns them.

    Attributes:
        packed: The T tokens with the key side of attention; positions of a response continue the positions of its
            prompt.
        rows: `[R]` on the CPU, the token that predicts each scored token.
        labels: `[R]`, the scored tokens: the responses' tokens, and on request the prompts' tokens.
        lengths: The lengths of the scored pieces, prompt by prompt.
    """

    packed: PackedSequence
    rows: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device | str) -> SharedPrefixes:
        """Return the same batch on another device."""
        return replace(self, packed=self.packed.to(device), labels=self.labels.to(device))

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
        score_prompts: Score the tokens of the prompts, too, except the first token of each prompt. The results of a
            prompt come before the results of its responses.

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
            piece_rows = torch.arange(start, start + len(piece))
            key_rows = piece_rows if offset == 0 else torch.cat([prompt_rows, piece_rows])
            pieces.append(piece)
            positions.append(torch.arange(offset, offset + len(piece)))
            keys.append(key_rows)
            lengths_k.append(len(key_rows))
            if offset:
                rows.append(torch.cat([prompt_rows[-1:], piece_rows])[: len(piece)])
                labels.append(piece.long())
            elif score_prompts:
                rows.append(piece_rows[:-1])
                labels.append(piece[1:].long())
            start += len(piece)
    plain = PackedSequence.from_sequences(pieces)
    device = plain.input_ids.device
    nothing = torch.zeros(0, dtype=torch.int64)
    shared_keys = SharedKeys(
        torch.cat([nothing, *keys]), torch.tensor([0, *lengths_k]).cumsum(0).int(), max(lengths_k, default=0)
    )
    return SharedPrefixes(
        packed=replace(
            plain, position_ids=torch.cat([nothing, *positions]).to(device), shared_keys=shared_keys.to(device)
        ),
        rows=torch.cat([nothing, *rows]),
        labels=torch.cat([nothing.to(device), *labels]),
        lengths=tuple(map(len, labels)),
    )
