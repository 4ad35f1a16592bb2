"""Transports send the tokens of a linear layer: before its product, after its product, or during its GEMMs.

A column-parallel layer gathers tokens and multiplies (`gather_product`); its backward multiplies, sums over the ranks,
and gathers the input again for dW (`product_scatter_beside_gather`). A row-parallel layer multiplies and sums
(`product_scatter`); its backward gathers dy and multiplies (`gather_product_and_x`). Each transport has these four:

    LOCAL                         Nothing is sent.
    WHOLE["serial"]               Every rank has all tokens: no gather; an all-reduce replaces the scatter.
    DIVIDED["serial"]             Sequence parallelism: one collective, then one GEMM, or the other way round.
    DIVIDED["collectives"]        Asynchronous collectives over chunks of every rank's tokens. Any backend.
    DIVIDED["symmetric-memory"]   GPUs write to each other's memory by their copy engines, which leaves all SMs to the
                                  GEMMs; see `symmetric_memory`. NVLink; no multicast.
    WHOLE["tree"], DIVIDED["tree"]   Sums in one order at every number of ranks, for the product of `invariant`.

Chunks cost time: GEMMs of few rows leave SMs idle in their last wave of tiles (one wave takes as long as NVLink needs
for some 2000 tokens, at any layer size), and the host launches more kernels. Hence the rule of "auto" for CUDA tensors
from `AUTO_ROWS` tokens a rank on: "symmetric-memory" where the group has it, else "collectives", with GEMMs of at least
`CHUNK_ROWS` tokens; "serial" below, and on a CPU, whose cores do the sending too. In a CUDA graph the host does not
count: ask for a transport by name there. Compiled code is "serial" in every case.

Shape suffixes: T tokens, I input features, O output features; `tp` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed import async_collectives
from parallel_layers.linear.products import PLAIN, Product
from parallel_layers.linear.symmetric_memory import (
    gather_matmul,
    matmul_reduce_scatter,
    matmul_reduce_scatter_beside_gather,
    why_not_symmetric_memory,
)

Used = TypeVar("Used")

Overlap = Literal["auto", "serial", "collectives", "symmetric-memory"]

CHUNK_ROWS = 2048
"""A chunk has at least this number of tokens of each rank, where that leaves two chunks."""

AUTO_ROWS = 8192
"""Tokens of each rank from which "auto" overlaps."""

MAX_SCATTERED = 4
"""Chunks of a scatter; the last chunk's transfer is exposed."""


class Call(NamedTuple):
    """The arguments of a transport beside the operands.

    Attributes:
        group: The tensor-parallel group, or None; `LOCAL` does not read it.
        dtype: dtype of the product, and of its sum over the ranks; None: x's.
        product: How the operands are multiplied.
    """

    group: Any
    dtype: torch.dtype | None
    product: Product = PLAIN

    def part(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's part of the sum over the ranks; the first rank adds the bias."""
        return self.product(x, weight, bias if self.group.rank() == 0 else None, self.dtype)


class Transport:
    """The four exchanges of a linear layer where nothing is sent: the layer is whole, or its caller sums the parts."""

    def gather(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """Return all tokens `[T, ..., I]`."""
        return x

    def gather_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Return `gather(x) W^T + b`, `[T, ..., O]`."""
        return call.product(self.gather(x, call.group), weight, bias, call.dtype)

    def gather_product_and_x(self, x: Tensor, weight: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Return `gather(x) W^T` in x's dtype and `gather(x)`, which is good until the group's next exchange."""
        gathered = self.gather(x, group)
        return PLAIN(gathered, weight, None, x.dtype), gathered

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Return the sum over the ranks of `x W^T + b`, with the bias of one rank alone.

        Without sequence parallelism the result is `[T, ..., O]`, with it this rank's `[T/tp, ..., O]`.

        Raises:
            ValueError: `tp` does not divide T under sequence parallelism.
        """
        return call.product(x, weight, bias, call.dtype)

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, call: Call, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        """Return the `product_scatter` of dy, and what `use` makes of `gather(x)`.

        The gather runs under the GEMM of dx, and the sum of dx under `use`, a GEMM with x.

        Args:
            dy: `[T, ..., O]`, the gradient of all tokens' products.
            weight: `[I, O]`.
            x: `[T/tp, ..., I]`, the layer's input.
            call: Group, dtype and product of dx.
            use: Function of `gather(x)`, which is good until `use` returns.
        """
        return call.product(dy, weight, None, call.dtype), use(x)


class _Replicated(Transport):
    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        y = call.part(x, weight, bias)
        return async_collectives.wait(async_collectives.start_all_reduce(y, call.group, owned=True))

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, call: Call, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        dx = async_collectives.start_all_reduce(call.product(dy, weight, None, call.dtype), call.group, owned=True)
        async_collectives.head_start(dx)
        used = use(x)
        return async_collectives.wait(dx), used


class _Serial(Transport):
    def gather(self, x: Tensor, group: ProcessGroup) -> Tensor:
        return async_collectives.all_gather(x, group)

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        async_collectives.check_divisible(x, 0, call.group)
        return async_collectives.reduce_scatter(call.part(x, weight, bias), call.group)

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, call: Call, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        async_collectives.check_divisible(dy, 0, call.group)
        gathered = async_collectives.start_all_gather(x, call.group)
        async_collectives.head_start(gathered)
        dx = async_collectives.start_reduce_scatter(call.product(dy, weight, None, call.dtype), call.group)
        async_collectives.head_start(dx)
        used = use(async_collectives.wait(gathered))
        return async_collectives.wait(dx), used


class _Overlapped(_Serial):
    """A product goes to its rows of the output, and a sum to its tokens: no chunk copies a whole activation.

    The backward overlaps by whole collectives, as that of `_Serial`.
    """

    def gather_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Gather in at most `tp - 1` chunks: a chunk's exposed time grows with the ranks that send meanwhile."""
        pieces = max(1, min(x[..., 0].numel() // CHUNK_ROWS, call.group.size() - 1))
        return _gather_product(x, weight, bias, call, pieces)[0]

    def gather_product_and_x(self, x: Tensor, weight: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Gather in one piece, so that the gathered tokens lie in order."""
        y, gathered = _gather_product(x, weight, None, Call(group, x.dtype), 1)
        return y, gathered.view(len(x) * group.size(), *x.shape[1:])

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        async_collectives.check_divisible(x, 0, call.group)
        size = call.group.size()
        rows = x.reshape(size, -1, x.shape[-1])
        own = rows.shape[1]
        bias = bias if call.group.rank() == 0 else None
        y = rows.new_empty(own, weight.shape[0], dtype=call.dtype)
        sums = []
        for chunk in _chunks(own, max(2, min(own // CHUNK_ROWS, MAX_SCATTERED))):
            parts = y.new_empty(size, chunk.stop - chunk.start, weight.shape[0])
            for other in range(size):
                call.product.into(parts[other], rows[other, chunk], weight, bias)
            sums.append(async_collectives.start_reduce_scatter_into(y[chunk], parts.flatten(0, 1), call.group))
            async_collectives.head_start(parts)
        for summed in sums:
            summed.wait()
        return y.view(len(x) // size, *x.shape[1:-1], -1)


def _gather_product(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, pieces: int) -> tuple[Tensor, Tensor]:
    """Return the product, own tokens first, and the last piece gathered, `[tp, ..., I]`: with one piece, all of it."""
    size, rank, tokens = call.group.size(), call.group.rank(), len(x)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = rows.new_empty(size, len(rows), weight.shape[0], dtype=call.dtype)
    arriving = [
        (chunk, async_collectives.start_all_gather(rows[chunk], call.group)) for chunk in _chunks(len(rows), pieces)
    ]
    async_collectives.head_start(rows)
    call.product.into(y[rank], rows, weight, bias)
    gathered = rows
    while arriving:
        chunk, started = arriving.pop(0)
        gathered = async_collectives.wait(started).view(size, -1, rows.shape[-1])
        for other in range(size):
            if other != rank:
                call.product.into(y[other, chunk], gathered[other], weight, bias)
    return y.view(size * tokens, *x.shape[1:-1], -1), gathered


def _chunks(rows: int, pieces: int) -> Iterator[slice]:
    """Cut `rows` into at most `pieces` runs, all but the last of the same length, none empty."""
    step = -(-rows // pieces)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


class _SymmetricMemory(_Serial):
    """Products and sums in x's dtype alone: the parts are rounded to it and summed in fp32."""

    def gather_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        return gather_matmul(x, weight, bias, call.group, call.product)[0]

    def gather_product_and_x(self, x: Tensor, weight: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        y, gathered = gather_matmul(x, weight, None, group, return_gathered=True)
        assert gathered is not None
        return y, gathered

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        return matmul_reduce_scatter(x, weight, bias, call.group, call.product)

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, call: Call, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        return matmul_reduce_scatter_beside_gather(dy, weight, x, call.group, use)


class _Tree(_Serial):
    """Each rank has the fp32 sum of a subtree of the contraction, and adds up its own tokens' subtrees."""

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        part = call.product.part_of(call.group.size())(x, weight, None, torch.float32)
        async_collectives.check_divisible(part, 0, call.group)
        return _tree_over_ranks(part, bias, call)


class _ReplicatedTree(_Replicated):
    """Sum as `_Tree` does, then gather the tokens of all ranks. The traffic is at most that of an fp32 all-reduce."""

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        part = call.product.part_of(call.group.size())(x, weight, None, torch.float32)
        padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, -len(x) % call.group.size()))
        return async_collectives.all_gather(_tree_over_ranks(padded, bias, call), call.group)[: len(x)]


def _tree_over_ranks(part: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Return this rank's tokens of the ranks' sum in order of rank, plus the bias: an all-to-all of fp32 `[T, O]`."""
    size, own = call.group.size(), len(part) // call.group.size()
    arrived = async_collectives.wait(async_collectives.start_all_to_all(part, call.group, [own] * size, [own] * size))
    y = tree(arrived.chunk(size) if own else [part])
    y = y if bias is None else y + bias.float()
    return y if call.dtype is None else y.to(call.dtype)


def tree(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of tensors, neighbours first: ((0 + 1) + (2 + 3))."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


LOCAL = Transport()
# By name: with sequence parallelism, and without it, where nothing is there to overlap.
DIVIDED = {
    "serial": _Serial(),
    "collectives": _Overlapped(),
    "symmetric-memory": _SymmetricMemory(),
    "tree": _Tree(),
}
WHOLE = {"serial": _Replicated(), "tree": _ReplicatedTree()}


def check_overlap(name: str) -> None:
    """Raise ValueError when `name` is no way to overlap."""
    if name not in get_args(Overlap):
        raise ValueError(f"overlap={name!r} is unknown; use one of {', '.join(map(repr, get_args(Overlap)))}")


def available_overlaps(group: ProcessGroup | None, device: torch.device | str) -> tuple[str, ...]:
    """Return the values of `Execution.overlap` that layers of `group` can have on `device`, beside "auto".

    Every rank of the group has to ask; all get the same answer. Communication: that of `why_not_symmetric_memory`, once
    for each group and device.
    """
    names = ("collectives", "serial")
    return names if why_not_symmetric_memory(group, torch.device(device)) else ("symmetric-memory", *names)


def choose_overlap(name: str, x: Tensor, rows: int, group: ProcessGroup, dtype: torch.dtype | None = None) -> str:
    """Return the transport for a call: `name`, or for "auto" the one that its size asks for.

    Args:
        name: A value of `Overlap`.
        x: The layer's input.
        rows: Tokens of each rank.
        group: The group over which the tokens are divided.
        dtype: dtype of the product or of its sum over the ranks; None: x's. Symmetric memory has no other; "auto" takes
            its place then.

    Raises:
        ValueError: "symmetric-memory", and the ranks of the group cannot use it (says why; on every rank alike).
    """
    if torch.compiler.is_compiling():
        return "serial"
    rounds = dtype in (None, x.dtype)
    if name == "auto" or (name == "symmetric-memory" and not rounds):
        if not x.is_cuda or rows < AUTO_ROWS:
            return "serial"
        return "symmetric-memory" if rounds and why_not_symmetric_memory(group, x.device) is None else "collectives"
    if name == "symmetric-memory" and (reason := why_not_symmetric_memory(group, x.device)) is not None:
        raise ValueError(f"overlap={name!r} cannot be used: {reason}; use 'auto', 'collectives' or 'serial'")
    return name if rows else "serial"
