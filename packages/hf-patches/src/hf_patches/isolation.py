"""Measure how much the sequences of a packed batch influence each other in one token mixer: attention, a recurrence."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_patches.batch import BatchPlan
from hf_patches.proofs import normal


def measure_leak(mix: Callable[..., Tensor], inputs: Sequence[Tensor], plan: BatchPlan, *, gradients: bool) -> float:
    """Return the largest change, over all ranks, of a result that must not change when other sequences change.

    The second half of every other sequence is negated, first of the even and then of the odd sequences. All outputs
    outside of these halves must stay the same. With `gradients`, the upstream gradients of these sequences are negated,
    too, and the gradients of the inputs in the other sequences must stay the same.

    Args:
        mix: Function of the inputs that returns the outputs, `[T / sp, ...]`.
        inputs: Tensors `[T / sp, ...]` of this rank.
        plan: The boundaries of the sequences.
        gradients: Compare gradients, too. Some attention kernels do not repeat theirs bit for bit.
    """
    cu_seqlens = plan.cu_seqlens
    tokens = torch.arange(plan.num_tokens, device=cu_seqlens.device)[plan.local_tokens]
    sequences = torch.searchsorted(cu_seqlens, tokens.int(), right=True) - 1
    late = tokens - cu_seqlens[sequences] >= (cu_seqlens.diff() // 2)[sequences]
    none = torch.zeros_like(late)
    output, input_gradients = _run(mix, inputs, none, none, gradients)
    change_T = torch.zeros(len(tokens), device=tokens.device)
    for parity in (0, 1):
        chosen = sequences % 2 == parity
        moved_output, moved_gradients = _run(mix, inputs, late & chosen, chosen, gradients)
        pairs = [(output, moved_output, late & chosen)]
        pairs += [(*pair, chosen) for pair in zip(input_gradients, moved_gradients, strict=True)]
        for before, after, free in pairs:
            difference_T = (after - before).abs().flatten(1).amax(1).float()
            change_T = torch.maximum(change_T, difference_T.masked_fill(free, 0.0))
    return plan.gather(change_T[:, None]).max().item()


def _run(
    mix: Callable[..., Tensor], inputs: Sequence[Tensor], moved: Tensor, pulled: Tensor, gradients: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the output for inputs with negated rows, and the gradients of a weighted sum with other negated rows."""
    operands = [_negated(x.detach(), moved).requires_grad_(gradients) for x in inputs]
    if not gradients:
        return mix(*operands), ()
    with torch.enable_grad():
        output = mix(*operands)
        weights = normal(tuple(output.shape), torch.Generator().manual_seed(1)).to(output)
        return output.detach(), torch.autograd.grad(output, operands, _negated(weights, pulled))


def _negated(x: Tensor, rows: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (x.dim() - 1)), -x, x)
