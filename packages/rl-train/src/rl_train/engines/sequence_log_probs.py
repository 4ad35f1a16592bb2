"""`SequenceLogProbs`: what a teacher in an engine says of a sequence, in tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceLogProbs(NamedTuple):
    """Log-probs at temperature 1 of the L tokens of a sequence, each given the tokens before it.

    The first token has none: 0, and ids of -1. `top_ids` and `top_log_probs` `[L, K + 1]` are those of the K likeliest
    tokens in place of each token, and of the token itself; ids of -1 where there are fewer.
    """

    log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], rows: Sequence[Mapping[int, float]], top_k: int) -> SequenceLogProbs:
        """Return the log-probs of tokens from the log-probs of ids at each token; none at the first.

        Raises:
            RuntimeError: There is not a row for each token, a row lacks its token or some of the `top_k`, or log-probs
                are not finite or add up to more than 1.
        """
        if len(rows) != len(tokens):
            raise RuntimeError(f"the teacher's engine has log-probs of {len(rows)} of {len(tokens)} tokens")
        width = top_k + 1
        drawn, ids, values = [0.0] * len(tokens), [[-1] * width for _ in tokens], [[0.0] * width for _ in tokens]
        for place, (token, row) in enumerate(zip(tokens[1:], rows[1:], strict=True), start=1):
            if token not in row or not top_k <= len(row) <= top_k + 1:
                raise RuntimeError(
                    f"the teacher's engine has {len(row)} log-probs in place of token {place}, {token}; it must have "
                    f"that of the token and of the {top_k} likeliest"
                )
            if not all(map(math.isfinite, row.values())) or math.fsum(map(math.exp, row.values())) > 1.001:
                raise RuntimeError(
                    f"the teacher's engine gives no log-probs in place of token {place}: {list(row.values())[:3]}; its "
                    "checkpoint may be broken, or the server reports logits"
                )
            drawn[place] = row[token]
            ids[place][: len(row)], values[place][: len(row)] = row, row.values()
        return cls(torch.tensor(drawn), torch.tensor(ids).view(-1, width), torch.tensor(values).view(-1, width))
