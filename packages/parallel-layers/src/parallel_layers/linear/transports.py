"""Transports send the tokens of a linear layer: before its GEMM, after its GEMM, or during its GEMM.

    Transport                     Nothing is sent.
    WHOLE["serial"]               Every rank has all tokens: no gather; an all-reduce replaces the scatter.
    DIVIDED["serial"]             Sequence parallelism: one collective, then one GEMM, or the other way round.
    DIVIDED["collectives"]        Asynchronous collectives over chunks of every rank's tokens. Any backend.
    DIVIDED["symmetric-memory"]   GPUs write to each other's memory over NVLink; see `symmetric_memory`.
    WHOLE["few-tokens"]           Every rank has the few tokens of a decoding step; one kernel sums over NVLink.
    WHOLE["tree"], DIVIDED["tree"]   Sums in one order at every number of ranks, for `InvariantProduct`.

Chunks cost time: GEMMs of few rows leave SMs idle, and the host launches more kernels. Hence "auto" means, for CUDA
tensors from `AUTO_ROWS` tokens a rank on, "symmetric-memory" where the group has it, else "collectives", with GEMMs of
at least `CHUNK_ROWS` tokens. "auto" means "serial" below, and on a CPU. A CUDA graph repeats the choice of its capture:
name a transport there. Compiled code is always "serial".

Shape suffixes: T tokens, I input features, O output features; `tp` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.device.gpus import on_gpu
from parallel_layers.distributed import async_collectives
from parallel_layers.linear.few_tokens import exchange_few
from parallel_layers.linear.products import Product, multiply_into
from parallel_layers.linear.symmetric_memory import (
    gather_matmul,
    matmul_reduce_scatter,
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


class Transport:
    """The exchanges of a linear layer where nothing is sent: the layer is whole, or its caller sums the parts.

    A column-parallel layer gathers tokens and multiplies (`gather_product`); its backward multiplies, sums over the
    ranks, and gathers the input again for dW (`product_scatter_beside_gather`). A row-parallel layer multiplies and
    sums (`product_scatter`); its backward gathers dy and multiplies (`gather_product`).

    `dtype` is the dtype of the GEMM's result, and of its sum over the ranks; None: x's dtype.
    """

    def __init__(self, group: Any, dtype: torch.dtype | None, product: Product) -> None:
        self.group, self.dtype, self.product = group, dtype, product

    def gather(self, x: Tensor) -> Tensor:
        """Return all tokens `[T, ..., I]`."""
        return x

    def gather_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `gather(x) W^T + b`, `[T, ..., O]`, and `gather(x)`, which some transports give as rows `[..., I]`.

        The gathered tokens are complete only with `keep`, and until the group's next exchange.
        """
        x = self.gather(x)
        return self.product(x, weight, bias, self.dtype), x

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sum over the ranks of `x W^T`, plus b: `[T, ..., O]`; sequence parallel: `[T/tp, ..., O]`."""
        return self.product(x, weight, bias, self.dtype)

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        """Return the `product_scatter` of dy, and `use(gather(x))`; the gathered tensor is valid until `use` returns.

        The gather runs during the GEMM of dx, and the sum of dx during `use`, a GEMM with x. dy `[T, ..., O]`, weight
        `[I, O]`, x `[T/tp, ..., I]`.
        """
        return self.product(dy, weight, None, self.dtype), use(x)


class _ReplicatedTransport(Transport):
    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.product(x, weight, _of_first_rank(bias, self.group), self.dtype)
        return async_collectives.wait(async_collectives.start_all_reduce(y, self.group, owned=True))

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        dx = async_collectives.start_all_reduce(self.product(dy, weight, None, self.dtype), self.group, owned=True)
        async_collectives.head_start(dx)
        used = use(x)
        return async_collectives.wait(dx), used


class _SerialTransport(Transport):
    def gather(self, x: Tensor) -> Tensor:
        return async_collectives.all_gather(x, self.group)

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.product(x, weight, _of_first_rank(bias, self.group), self.dtype)
        return async_collectives.reduce_scatter(y, self.group)

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        gathered = async_collectives.start_all_gather(x, self.group)
        async_collectives.head_start(gathered)
        dx = async_collectives.start_reduce_scatter(self.product(dy, weight, None, self.dtype), self.group)
        async_collectives.head_start(dx)
        used = use(async_collectives.wait(gathered))
        return async_collectives.wait(dx), used


class _Overlap(_SerialTransport):
    """Each GEMM writes its own rows of the output, and each sum its own tokens: no chunk copies a whole activation.

    The backward of a column-parallel layer overlaps by whole collectives, as in `_SerialTransport`.
    """

    def gather_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Gather in at most `tp - 1` chunks: a chunk's exposed time grows with the ranks that send meanwhile.

        With `keep`, the tokens come in one chunk, so that they stay in order.
        """
        size, rank = self.group.size(), self.group.rank()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        pieces = 1 if keep else max(1, min(len(rows) // CHUNK_ROWS, size - 1))
        y = rows.new_empty(size, len(rows), weight.shape[0], dtype=self.dtype)
        arriving = [
            (chunk, async_collectives.start_all_gather(rows[chunk], self.group)) for chunk in _chunks(len(rows), pieces)
        ]
        async_collectives.head_start(rows)
        multiply_into(y[rank], rows, weight, bias)
        gathered = rows
        while arriving:
            chunk, started = arriving.pop(0)
            gathered = async_collectives.wait(started).view(size, -1, rows.shape[-1])
            for peer in range(size):
                if peer != rank:
                    multiply_into(y[peer, chunk], gathered[peer], weight, bias)
        return y.view(size * len(x), *x.shape[1:-1], -1), gathered.flatten(0, -2)

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        async_collectives.check_divisible(x, 0, self.group)
        size = self.group.size()
        rows = x.reshape(size, -1, x.shape[-1])
        num_rows = rows.shape[1]
        bias = _of_first_rank(bias, self.group)
        y = rows.new_empty(num_rows, weight.shape[0], dtype=self.dtype)
        sums = []
        for chunk in _chunks(num_rows, max(2, min(num_rows // CHUNK_ROWS, MAX_SCATTERED))):
            partial_sums = y.new_empty(size, chunk.stop - chunk.start, weight.shape[0])
            for peer in range(size):
                multiply_into(partial_sums[peer], rows[peer, chunk], weight, bias)
            sums.append(async_collectives.start_reduce_scatter_into(y[chunk], partial_sums.flatten(0, 1), self.group))
            async_collectives.head_start(partial_sums)
        for summed in sums:
            summed.wait()
        return y.view(len(x) // size, *x.shape[1:-1], -1)


class _SymmetricMemory(_SerialTransport):
    """Only GEMMs and sums in x's dtype: the ranks' parts are rounded to x's dtype, and summed in fp32."""

    def gather_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        return gather_matmul(x, weight, bias, self.group, keep=keep)

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul_reduce_scatter(x, weight, bias, self.group)[0]

    def product_scatter_beside_gather(
        self, dy: Tensor, weight: Tensor, x: Tensor, use: Callable[[Tensor], Used]
    ) -> tuple[Tensor, Used]:
        return matmul_reduce_scatter(dy, weight, None, self.group, x, use)


class _Tree(_SerialTransport):
    """Each rank has the fp32 sum of a subtree of the contraction, and adds up its own tokens' subtrees."""

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        async_collectives.check_divisible(x, 0, self.group)
        y = tree_scatter(self.product(x, weight, None, torch.float32), self.group)
        return (y if bias is None else y + bias.float()).to(self.dtype)


class _FewTokens(_ReplicatedTransport):
    """The sum of a decoding step's few tokens (`few_tokens`), of parts in x's dtype. No gradient."""

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.product(x, weight, _of_first_rank(bias, self.group))
        return exchange_few(y, self.group, "all-reduce")


class _ReplicatedTree(_ReplicatedTransport):
    """Sum as `_Tree` does, then gather the tokens of all ranks. The traffic is at most an fp32 all-reduce's."""

    def product_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % self.group.size()))
        y = _Tree(self.group, self.dtype, self.product).product_scatter(padded, weight, bias)
        return async_collectives.all_gather(y, self.group)[: len(x)]


# By name: with sequence parallelism, and without it, where there is nothing to overlap.
DIVIDED = {
    "serial": _SerialTransport,
    "collectives": _Overlap,
    "symmetric-memory": _SymmetricMemory,
    "tree": _Tree,
}
WHOLE = {"serial": _ReplicatedTransport, "few-tokens": _FewTokens, "tree": _ReplicatedTree}


def _of_first_rank(bias: Tensor | None, group: ProcessGroup) -> Tensor | None:
    return bias if group.rank() == 0 else None


def _chunks(rows: int, pieces: int) -> Iterator[slice]:
    """Cut `rows` into at most `pieces` runs, all but the last of the same length, none empty."""
    step = -(-rows // pieces)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def tree(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of tensors, neighbours first: ((0 + 1) + (2 + 3))."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def tree_scatter(partial_sum: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum over the ranks, as one tree: `[T, ...]` -> `[T/tp, ...]`, by an all-to-all."""
    size = group.size()
    sizes = [len(partial_sum) // size] * size
    arrived = async_collectives.wait(async_collectives.start_all_to_all(partial_sum, group, sizes, sizes))
    return tree(arrived.chunk(size) if len(partial_sum) else [partial_sum])


def available_overlaps(group: ProcessGroup | None, device: torch.device | str) -> tuple[str, ...]:
    """Return the values of `Execution.overlap` that layers of `group` can have on `device`, beside "auto".

    Every rank of the group calls this; all get the same answer. Communication: as `why_not_symmetric_memory`.
    """
    names = ("collectives", "serial")
    return names if why_not_symmetric_memory(group, torch.device(device)) else ("symmetric-memory", *names)


def choose_overlap(name: str, x: Tensor, rows: int, group: ProcessGroup, dtype: torch.dtype | None = None) -> str:
    """Return the transport for a call on `rows` tokens of each rank: `name`, or for "auto" by size.

    Symmetric memory has GEMMs and sums in x's dtype alone; with another `dtype` "auto" replaces it.

    Raises:
        ValueError: "symmetric-memory", and the ranks of the group cannot use it (says why; on every rank alike).
    """
    if torch.compiler.is_compiling():
        return "serial"
    rounds = dtype in (None, x.dtype)
    if name == "auto" or (name == "symmetric-memory" and not rounds):
        if not on_gpu(x) or rows < AUTO_ROWS:
            return "serial"
        return "symmetric-memory" if rounds and why_not_symmetric_memory(group, x.device) is None else "collectives"
    if name == "symmetric-memory" and (reason := why_not_symmetric_memory(group, x.device)) is not None:
        raise ValueError(f"overlap={name!r} cannot be used: {reason}; use 'auto', 'collectives' or 'serial'")
    return name if rows else "serial"
