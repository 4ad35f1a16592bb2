"""The products of a training step under load: what a large product reaches once the GPU is as busy as a step keeps it.

    python benchmarks/products.py [--tokens 16384] [--json FILE] [--rounds N] [--tiny]

Of each linear layer of Llama 3 8B, and of a quarter of its head, the three products of a step: the output, and the
gradients of the input and of the weight; bf16, random data. They run one after another without a pause, each as often
as in a step of eight layers. So the GPU is at its power limit, where its clock falls: rates are lower than those of the
ceiling, which is one product at a time with pauses between (`measure.ceilings`). The last row is the whole sequence.

Beside cuBLAS, where they are installed: quack's kernels (of quack-kernels, which flash-attn-4 brings), each tile of
`TILES` in a sequence of its own. Tiles differ in the power that they need, so a mixed sequence would favour small ones.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from operator import mul

import torch
from measure import CUDA, DEVICE, Call, ceilings, machine, milliseconds, synchronize, table, write_json
from torch import Tensor

from parallel_layers.kernels import Tile, has_quack, is_hopper, multiply

# Name -> (outputs, inputs) of the weight.
LINEARS = {
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
    "head, a quarter": (32064, 4096),
}
TINY = {"qkv_proj": (96, 64), "down_proj": (64, 128)}
# Of quack; "p": two groups of warps take turns at multiplying and at writing.
TILES = {
    "256x192": Tile(256, 192, cluster=(1, 2), dynamic=True),
    "128x256": Tile(128, 256, cluster=(2, 1), dynamic=True),
    "256x128": Tile(256, 128, cluster=(2, 1), dynamic=True),
    "128x192p": Tile(128, 192, True, cluster=(2, 1), dynamic=True),
    "128x128p": Tile(128, 128, True, cluster=(1, 2), dynamic=True),
}
Product = Callable[[Tensor, Tensor, Tensor], object]


def by_torch(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b.T, out=out)


def by_quack(tile: Tile, a: Tensor, b: Tensor, out: Tensor) -> None:
    multiply(a, b, out, tile)


def products() -> dict[str, Product]:
    found: dict[str, Product] = {"cuBLAS": by_torch}
    if CUDA and is_hopper(torch.device("cuda", 0)) and has_quack():
        found |= {f"quack {name}": partial(by_quack, tile) for name, tile in TILES.items()}
    return found


def operands(tokens: int, outputs: int, inputs: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return a and b of each product `a b^T` of a layer, and room for the result."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    x, weight, dy = normal(tokens, inputs), normal(outputs, inputs), normal(tokens, outputs)
    return {
        "output": (x, weight, torch.empty_like(dy)),
        "input's gradient": (dy, weight.T, torch.empty_like(x)),
        "weight's gradient": (dy.T, x.T, torch.empty_like(weight)),
    }


def in_sequence(calls: dict[str, list[Call]], repeats: list[int], rounds: int) -> dict[str, list[float]]:
    """Median milliseconds of each call, in a sequence of its peer's calls alone that follows such a sequence."""
    if not CUDA:
        return {peer: [milliseconds(call) for call in own] for peer, own in calls.items()}
    order = [i for i, times in enumerate(repeats) for _ in range(times)]
    found: dict[str, list[list[float]]] = {peer: [[] for _ in own] for peer, own in calls.items()}
    for _ in range(rounds):
        for peer, own in calls.items():
            for i in order:
                own[i]()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
            marks[0].record()
            for i, mark in zip(order, marks[1:], strict=True):
                own[i]()
                mark.record()
            synchronize()
            for i, (begin, end) in zip(order, pairwise(marks), strict=True):
                found[peer][i].append(begin.elapsed_time(end))
    return {peer: [statistics.median(times) for times in of] for peer, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    measured = ceilings()
    linears, tokens = (TINY, 64) if options.tiny else (LINEARS, options.tokens)
    found = products()
    cases: dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]] = {
        (name, kind): case for name, sizes in linears.items() for kind, case in operands(tokens, *sizes).items()
    }
    largest = {case: float((a.float() @ b.T.float()).abs().max()) for case, (a, b, _) in cases.items()}
    for peer, product in found.items():
        for case, (a, b, out) in cases.items():
            product(a, b, out.fill_(torch.nan))
            error = float((out.float() - a.float() @ b.T.float()).abs().max()) / largest[case]
            assert error < 0.01, f"{peer}, {case}: {error}"
    calls = {peer: [partial(product, *case) for case in cases.values()] for peer, product in found.items()}
    repeats = [4 if name.startswith("head") else 8 for name, _ in cases]
    times = in_sequence(calls, repeats, options.rounds)
    flops = [2 * a.shape[0] * a.shape[1] * b.shape[0] for a, b, _ in cases.values()]
    rows: list[list[object]] = [
        [*case, *(count / of[i] * 1e-9 for of in times.values())]
        for i, (case, count) in enumerate(zip(cases, flops, strict=True))
    ]
    whole = {peer: sum(map(mul, repeats, of)) for peer, of in times.items()}
    total = sum(map(mul, repeats, flops))
    rows.append(["the sequence", "", *(total / ms * 1e-9 for ms in whole.values())])
    print(machine(), measured)
    print(table(["layer", "product", *(f"{peer} TFLOP/s" for peer in times)], rows))
    write_json(options.json, ceilings=measured, cases=[*cases], flops=flops, milliseconds=times, sequence=whole)


if __name__ == "__main__":
    main()
