"""`LowRank`: the trainable factors of a frozen weight's low-rank adapter, and the form in which a GEMM takes them.

LoRA (https://arxiv.org/abs/2106.09685): `W + scaling · B A` with A `[r, I]` and B `[O, r]`, scaling alpha / r, or
alpha / sqrt(r) (rsLoRA, https://arxiv.org/abs/2312.03732).

Shape suffixes: I input and O output features, r the rank, n adapted parts of a fused weight, E experts, of which this
rank has e, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel
from parallel_layers.module.initialization import as_linear, draw, normal
from parallel_layers.module.parallel_module import ParallelModule
from parallel_layers.module.seeds import shared_seed
from parallel_layers.module.sharding import blocks_of, full_shape


class Factors(NamedTuple):
    """The factors of a linear layer: `x W^T + (x D^T) U^T`.

    Attributes:
        down: `[R, I]`.
        up: `[O, R]`, with the scaling.
        dropout: Applied to x before down.
    """

    down: Tensor
    up: Tensor
    dropout: Callable[[Tensor], Tensor] | None = None


class LowRank(ParallelModule):
    """The adapter of one weight of this rank; the owner of the weight has it as a submodule.

    Parameters, divided as the weight is (`parallel_layers.model.lora.add_lora_`):

        linear       A `[n r, I]`: A of each adapted part, one after another. B `[rows, r]`: their rows of W.
        embedding    A `[r, V]`, B `[H, r]`
        experts      A `[e r, I]`, B `[O, r, e]`; shared by all experts: `[r, I]` or `[O, r, 1]`

    Args:
        down, up: The local shapes of A and B.
        rank, scaling: r, and the factor of B A.
        parts: The rows of each part of the weight on this rank, and the name of its adapter, which seeds the initial
            weights; an empty name: the part has no adapter.
        fan_in: The input features of the whole weight; 0: an embedding.
        seed: Seed of the initial weights: A as in a linear layer, B zero (an embedding: A zero, B from N(0, 1)).
        dropout: The probability of dropout of the adapter's input while training.
        shared: The factor that all experts of a layer share, "A" or "B"; empty: none.
        dtype, device: Dtype and device of the parameters.

    Attributes:
        enabled: The adapter takes part; see `without_adapters`.
    """

    def __init__(
        self,
        down: Sequence[int],
        up: Sequence[int],
        *,
        rank: int,
        scaling: float,
        parts: Sequence[tuple[int, str]],
        fan_in: int,
        seed: int = 0,
        dropout: float = 0.0,
        shared: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.scaling, self.parts, self.fan_in = rank, scaling, tuple(parts), fan_in
        self.seed, self.dropout, self.shared, self.enabled = seed, dropout, shared, True
        self.A = nn.Parameter(torch.empty(*down, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.empty(*up, dtype=dtype, device=device))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial weights, which depend on the seed and the names of the adapters, not on the grid."""
        drawn, zero = ("A", "B") if self.fan_in else ("B", "A")
        getattr(self, zero).zero_()
        parameter, fill = getattr(self, drawn), as_linear(self.fan_in) if self.fan_in else normal(1.0)
        if parameter.is_meta:
            return
        names = [name for _, name in self.parts if name]
        rows, *further_dims = full_shape(self, drawn)
        for (local, *inside), (full, *columns) in blocks_of(self, drawn):
            for number, name in enumerate(names):
                # Several parts, one after another, have all their rows on every rank.
                begin = number * self.rank
                target, source = (
                    (local, full) if len(names) == 1 else (slice(begin, begin + self.rank), slice(self.rank))
                )
                ranges = [(source.start or 0, source.stop), *((column.start, column.stop) for column in columns)]
                values = draw([rows // len(names), *further_dims], ranges, self.seed, f"{name}.lora_{drawn}", fill)
                parameter[(target, *inside)] = values.to(parameter)

    def factors(
        self,
        *,
        down_group: ProcessGroup | None = None,
        up_group: ProcessGroup | None = None,
        dropout_over: tuple[ProcessGroup | None, int] = (None, 0),
    ) -> Factors:
        """Return the factors of a linear layer.

        Args:
            down_group, up_group: The ranks over which a factor's gradient is summed, in the backward.
            dropout_over: The group that divides a dim of the layer's input, and the dim: dropout draws for all ranks
                and keeps this rank's part, so that the mask is the same at every size of the group.
        """
        down = copy_to_tensor_parallel(self.A, down_group)
        up = copy_to_tensor_parallel(self.B, up_group) * self.scaling
        names = [name for _, name in self.parts]
        if len(names) > 1:
            up_blocks = iter(up.split([rows for rows, name in self.parts if name]))
            width, offset, blocks = self.rank * sum(map(bool, names)), 0, []
            for rows, name in self.parts:
                if name:
                    blocks.append(F.pad(next(up_blocks), (offset, width - self.rank - offset)))
                    offset += self.rank
                else:
                    blocks.append(up.new_zeros(rows, width))
            up = torch.cat(blocks)
        drops = self.dropout > 0 and self.training
        return Factors(down, up, (lambda x: _drop(x, self.dropout, *dropout_over)) if drops else None)

    def delta(self, down_group: ProcessGroup | None = None) -> Tensor:
        """Return `scaling · B A` `[O, I]`, this rank's part of it."""
        factors = self.factors(down_group=down_group)
        return factors.up @ factors.down

    def of_experts(
        self,
        *,
        down_group: ProcessGroup | None = None,
        up_group: ProcessGroup | None = None,
        expert_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the factors of stacked experts: down `[e, r, I]` and up `[e, O, r]`, with the scaling.

        A factor that all experts of a layer share is a matrix, and its gradient is summed over `expert_group`.
        """
        down, up = copy_to_tensor_parallel(self.A, down_group), copy_to_tensor_parallel(self.B, up_group)
        if self.shared == "A":
            down = copy_to_tensor_parallel(down, expert_group)
        else:
            down = down.view(-1, self.rank, down.shape[-1])
        if self.shared == "B":
            return down, copy_to_tensor_parallel(up, expert_group)[..., 0] * self.scaling
        return down, (up * self.scaling).permute(2, 0, 1).contiguous()


def enabled(lora: LowRank | None) -> LowRank | None:
    """Return an adapter that takes part, else None."""
    return lora if lora is not None and lora.enabled else None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the base weights alone inside the block: the reference of a policy, without a second copy."""
    on = [module for module in model.modules() if isinstance(module, LowRank) and module.enabled]
    for module in on:
        module.enabled = False
    try:
        yield
    finally:
        for module in on:
            module.enabled = True


def _drop(x: Tensor, probability: float, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return dropout of `x`, whose mask comes from a seed that torch's default CPU generator gives.

    Ranks with the same state of that generator, such as in `RngStates.fork("replicated")`, draw one mask for the whole
    input; recomputation draws the same mask again.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    shape = list(x.shape)
    shape[dim] *= ranks
    generator = torch.Generator(x.device).manual_seed(shared_seed())
    mask = torch.rand(shape, generator=generator, device=x.device, dtype=torch.float32) >= probability
    local_mask = mask.narrow(dim, rank * x.shape[dim], x.shape[dim])
    return x * local_mask / (1 - probability)
