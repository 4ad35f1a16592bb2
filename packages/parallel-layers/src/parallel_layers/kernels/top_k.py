"""The k largest scores of each token, for the few columns of a router.

Shape legend: T tokens, E experts, k experts per token.
"""

# Triton reads a kernel's annotations as its own.
# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from parallel_layers.kernels.runtime import cdiv, next_power_of_2, on_its_device, rows_of_program, tl, triton

_ELEMENTS = 2048  # of a program


@triton.jit
def _top_k_kernel(scores_ptr, experts_ptr, tokens, size, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    at = token.to(tl.int64)[:, None] * size + column
    scores = tl.load(scores_ptr + at, mask=(token < tokens)[:, None] & (column < size), other=float("-inf"))
    for number in tl.static_range(K):
        # The minimum keeps a token whose scores are all NaN within the table.
        best = tl.minimum(tl.argmax(scores, axis=1), size - 1)
        tl.store(experts_ptr + token.to(tl.int64) * K + number, best.to(tl.int64), mask=token < tokens)
        scores = tl.where(column == best[:, None], float("-inf"), scores)


@torch.library.custom_op("parallel_layers::top_k", mutates_args=())
def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest fp32 scores, in descending order: `[T, E]` -> `[T, k]` int64.

    The first of equal scores counts as larger. No gradient.
    """
    experts = torch.empty(len(scores_TE), k, dtype=torch.int64, device=scores_TE.device)
    _launch(scores_TE.contiguous(), experts)
    return experts


@top_k.register_fake
def _(scores_TE: Tensor, k: int) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape[0], k, dtype=torch.int64)


@on_its_device
def _launch(scores: Tensor, experts: Tensor) -> None:
    if experts.numel():
        tokens, size = scores.shape
        block = next_power_of_2(size)
        rows = rows_of_program(tokens, max(1, _ELEMENTS // block), scores.device)
        _top_k_kernel[(cdiv(tokens, rows),)](
            *(scores, experts, tokens, size),
            K=experts.shape[1],
            ROWS=rows,
            BLOCK=block,
            num_warps=max(1, min(4, rows * block // 128)),
        )
