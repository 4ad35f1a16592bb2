"""Products that overlap with the gather or the scatter of their tokens (sequence parallelism), and when they should.

    gather_product                  all_gather(x) W^T: own tokens are multiplied while the others' arrive
    product_scatter                 reduce_scatter(x W^T): one chunk of tokens is sent while the next is multiplied
    product_scatter_beside_gather   a product's scatter, and a gather that nothing but the next product waits for: each
                                    is sent under a whole product

Three ways, by name:

    "serial"             One collective, then one product, or the other way round.
    "collectives"        The group's own collectives, asynchronous, over chunks of every rank's tokens. Any backend.
    "symmetric-memory"   GPUs write to each other's memory by their copy engines, which leaves all multiprocessors to
                         the product; see `symmetric_memory`. NVLink; no multicast.

Cutting costs: products of few rows leave multiprocessors idle in their last wave of tiles (one such wave takes as long
as some 2000 tokens take over NVLink, whatever the sizes of the layer: both grow with its inputs), and the host has the
pieces to launch. Of a Llama 3 8B shaped step on H200s, symmetric memory saved 5 to 6 % with 8192 tokens on each of two
ranks; with 4096 on each of four the host was behind, so that nothing was saved but in a CUDA graph.
Hence the rule of "auto" for CUDA tensors from 8192 tokens a rank on: "symmetric-memory" where the group has it, else
"collectives", with products of at least 2048 tokens; "serial" below, and on a CPU, whose cores do the sending too.
Where the host does not count, in a CUDA graph, ask for a way by name. The chunks never need a copy of a whole
activation: products are written to their rows of the output, sums to theirs. Compiled code is "serial" whatever is
asked for.

Shape suffixes: T tokens, I input features, O output features, n ranks.
"""

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import symmetric_memory
from parallel_layers.distributed import async_collectives
from parallel_layers.products import product, product_into
from parallel_layers.symmetric_memory import (
    gather_matmul,
    matmul_reduce_scatter,
    matmul_reduce_scatter_beside_gather,
)

Used = TypeVar("Used")

Overlap = Literal["auto", "serial", "collectives", "symmetric-memory"]

CHUNK_ROWS = 2048
"""A chunk has at least so many tokens of each rank, where that leaves two chunks."""

AUTO_ROWS = 8192
"""Tokens of each rank from which "auto" overlaps."""

MAX_SCATTERED = 4
"""Chunks of a scatter: what is not hidden is the last one's."""

_reasons: WeakKeyDictionary[ProcessGroup, dict[torch.device, str | None]] = WeakKeyDictionary()


def check_overlap(name: str) -> None:
    """Raise ValueError when `name` is no way to overlap."""
    if name not in get_args(Overlap):
        raise ValueError(f"overlap={name!r} is unknown; use one of {', '.join(map(repr, get_args(Overlap)))}")


def available_overlaps(group: ProcessGroup | None, device: torch.device | str) -> tuple[str, ...]:
    """The values of `overlap` that linears of `group` can be given on `device`, beside "auto".

    Every rank of the group has to ask; all get the same answer. Communication: that of `why_not_symmetric_memory`, once
    for each group and device.
    """
    device = torch.device(device)
    names = ("collectives", "serial")
    return names if why_not_symmetric_memory(group, device) else ("symmetric-memory", *names)


def choose_overlap(name: str, x: Tensor, rows: int, group: ProcessGroup, dtype: torch.dtype | None = None) -> str:
    """The way for a call: `name`, or for "auto" what its size asks for.

    Args:
        name: A value of `Overlap`.
        x: What is multiplied.
        rows: Tokens of each rank.
        group: Over which they are divided.
        dtype: Of the product or of its sum over the ranks; None: x's. Symmetric memory has no other; its place is then
            taken by "auto".

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
    return name


def why_not_symmetric_memory(group: ProcessGroup | None, device: torch.device) -> str | None:
    """`symmetric_memory.why_not_symmetric_memory`, asked once for each group and device."""
    if group is None:
        return symmetric_memory.why_not_symmetric_memory(group, device)
    reasons = _reasons.setdefault(group, {})
    if device not in reasons:
        reasons[device] = symmetric_memory.why_not_symmetric_memory(group, device)
    return reasons[device]


def gather_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dtype: torch.dtype | None, how: str
) -> Tensor:
    """`all_gather(x) W^T + b` in `dtype` (None: x's), rounded once.

    Args:
        x: `[T/n, ..., I]`, this rank's tokens.
        weight: `[O, I]`.
        bias: `[O]` or None.
        group: Whose ranks' tokens are gathered.
        dtype: Of the product.
        how: "serial", "collectives" or "symmetric-memory"; the last for products in x's dtype.

    Returns:
        `[T, ..., O]`.

    Communication: all-gather of x; "collectives" in at most `n - 1` chunks: what one of them leaves exposed grows with
    the number of ranks that have to send while one of them multiplies.
    """
    if how == "serial" or not x.numel():
        return product(async_collectives.all_gather(x, group), weight, bias, dtype)
    if how == "symmetric-memory":
        return gather_matmul(x, weight, bias, group)[0]
    pieces = max(1, min(x[..., 0].numel() // CHUNK_ROWS, group.size() - 1))
    return _gather_product(x, weight, bias, group, x.dtype if dtype is None else dtype, pieces)[0]


def gather_product_and_x(x: Tensor, weight: Tensor, group: ProcessGroup, how: str) -> tuple[Tensor, Tensor]:
    """`gather_product` in x's dtype, and what was gathered: `[T, ..., O]` and `[T, ..., I]`.

    What was gathered is good until the group's next product here.

    Communication: all-gather of x, never cut, so that its tokens arrive in order.
    """
    if how == "serial" or not x.numel():
        gathered = async_collectives.all_gather(x, group)
        return product(gathered, weight, None, x.dtype), gathered
    if how == "symmetric-memory":
        y, received = gather_matmul(x, weight, None, group, return_gathered=True)
        assert received is not None
        return y, received
    y, gathered = _gather_product(x, weight, None, group, x.dtype, 1)
    return y, gathered.view(len(x) * group.size(), *x.shape[1:])


def _gather_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dtype: torch.dtype, pieces: int
) -> tuple[Tensor, Tensor]:
    """The product, own tokens first, and the last piece that was gathered, `[n, ..., I]`: with one piece, all of it."""
    size, rank, tokens = group.size(), group.rank(), len(x)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = rows.new_empty(size, len(rows), weight.shape[0], dtype=dtype)
    arriving = [(chunk, async_collectives.start_all_gather(rows[chunk], group)) for chunk in _chunks(len(rows), pieces)]
    async_collectives.head_start(rows)
    product_into(y[rank], rows, weight, bias)
    gathered = rows
    while arriving:
        chunk, started = arriving.pop(0)
        gathered = async_collectives.wait(started).view(size, -1, rows.shape[-1])
        for other in range(size):
            if other != rank:
                product_into(y[other, chunk], gathered[other], weight, bias)
    return y.view(size * tokens, *x.shape[1:-1], -1), gathered


def product_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    dtype: torch.dtype,
    how: str,
) -> Tensor:
    """This rank's tokens of `sum over the ranks of x W^T + b`, summed in `dtype`.

    Args:
        x: `[T, ..., I]`, all tokens.
        weight: `[O, I]`.
        bias: `[O]` or None, of the first rank's product alone.
        group: Over whose ranks is summed and scattered.
        dtype: Of the parts and of their sum.
        how: "serial", "collectives" or "symmetric-memory"; the last for sums in x's dtype (it rounds the parts to it
            and sums in fp32).

    Returns:
        `[T/n, ..., O]` in `dtype`.

    Communication: reduce-scatter; "collectives" in two to `MAX_SCATTERED` chunks.

    Raises:
        ValueError: n does not divide T.
    """
    async_collectives.check_divisible(x, 0, group)
    if how == "symmetric-memory" and x.numel():
        return matmul_reduce_scatter(x, weight, bias, group)
    bias = bias if group.rank() == 0 else None
    if how == "serial" or not x.numel():
        return async_collectives.reduce_scatter(product(x, weight, bias, dtype), group)
    size = group.size()
    rows = x.reshape(size, -1, x.shape[-1])
    own = rows.shape[1]
    y = rows.new_empty(own, weight.shape[0], dtype=dtype)
    sums = []
    for chunk in _chunks(own, max(2, min(own // CHUNK_ROWS, MAX_SCATTERED))):
        parts = y.new_empty(size, chunk.stop - chunk.start, weight.shape[0])
        for other in range(size):
            product_into(parts[other], rows[other, chunk], weight, bias)
        sums.append(async_collectives.start_reduce_scatter_into(y[chunk], parts.flatten(0, 1), group))
        async_collectives.head_start(parts)
    for summed in sums:
        summed.wait()
    return y.view(len(x) // size, *x.shape[1:-1], -1)


def product_scatter_beside_gather(
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
    group: ProcessGroup,
    dtype: torch.dtype,
    how: str,
    use: Callable[[Tensor], Used],
) -> tuple[Tensor, Used]:
    """`product_scatter` of dy, and what `use` makes of `all_gather(x)`: the backward of a product of gathered tokens.

    Args:
        dy: `[T, ..., O]`, the gradient of all tokens' products.
        weight: `[I, O]`.
        x: `[T/n, ..., I]`, what was multiplied.
        group: Over whose ranks is gathered, summed and scattered.
        dtype: Of the parts of dx and of their sum.
        how: As in `product_scatter`.
        use: From `[T, ..., I]`, good until it returns, a product of x.

    Returns:
        dx `[T/n, ..., I]` in `dtype`, and what `use` returned.

    Communication: all-gather of x under the product of dx, whose reduce-scatter is under `use`; never cut.

    Raises:
        ValueError: n does not divide T.
    """
    async_collectives.check_divisible(dy, 0, group)
    if how == "symmetric-memory" and x.numel():
        return matmul_reduce_scatter_beside_gather(dy, weight, x, group, use)
    gathered = async_collectives.start_all_gather(x, group)
    async_collectives.head_start(gathered)
    dx = async_collectives.start_reduce_scatter(product(dy, weight, None, dtype), group)
    async_collectives.head_start(dx)
    used = use(async_collectives.wait(gathered))
    return async_collectives.wait(dx), used


def _chunks(rows: int, pieces: int) -> Iterator[slice]:
    """`rows` in at most `pieces` runs, all but the last of the same length, none empty."""
    step = -(-rows // pieces)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
