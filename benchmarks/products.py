"""The products of a training step under load: what a large product reaches once the GPU is as busy as a step keeps it.

    python benchmarks/products.py [--tokens 16384] [--json FILE] [--rounds N] [--tiny]

Of each linear layer of Llama 3 8B, and of a quarter of its head, the three products of a step: the output, and the
gradients of the input and of the weight; bf16, random data. They run one after another without a pause, as in a step,
in another order every round. So the GPU is at its power limit, where its clock falls: rates are lower than those of the
ceiling, which is one product at a time with pauses between (`measure.ceilings`). The last row is that of all products
together.

The peer, where it is installed: quack's kernels (of quack-kernels, which flash-attn-4 brings), for each product the
faster of two tiles, with tiles handed out while they run.
"""

import argparse
import importlib.util
import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from measure import CUDA, DEVICE, Call, ceilings, machine, milliseconds, synchronize, table, write_json
from torch import Tensor

# Name -> (outputs, inputs) of the weight.
LINEARS = {
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
    "head, a quarter": (32064, 4096),
}
TINY = {"qkv_proj": (96, 64), "down_proj": (64, 128)}
# Of quack: rows and columns of a tile, and whether two groups of warps take turns at multiplying and at writing.
TILES = {"128x256": (128, 256, False), "128x192": (128, 192, True)}
Product = Callable[[Tensor, Tensor, Tensor], object]


def by_torch(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def by_quack(rows: int, columns: int, turns: bool, a: Tensor, b: Tensor, out: Tensor) -> None:
    from quack.gemm import gemm

    counter = torch.zeros(1, dtype=torch.int32, device=a.device)
    gemm(a, b.T, out, None, counter, rows, columns, 2, 1, pingpong=turns, is_dynamic_persistent=True)


def products() -> dict[str, Product]:
    found: dict[str, Product] = {"torch": by_torch}
    if CUDA and importlib.util.find_spec("quack"):
        found |= {f"quack {name}": partial(by_quack, *tile) for name, tile in TILES.items()}
    return found


def operands(tokens: int, outputs: int, inputs: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return what each product of a layer multiplies, and room for the result."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    x, weight, dy = normal(tokens, inputs), normal(outputs, inputs), normal(tokens, outputs)
    return {
        "output": (x, weight.T, torch.empty_like(dy)),
        "input's gradient": (dy, weight, torch.empty_like(x)),
        "weight's gradient": (dy.T, x, torch.empty_like(weight)),
    }


def under_load(calls: list[Call], rounds: int) -> list[float]:
    """Median milliseconds of each call, among the others; nothing waits between them."""
    if not CUDA:
        return [milliseconds(call) for call in calls]
    orders = random.Random(0)
    marks: list[dict[int, tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    for _ in range(rounds + 1):
        marks.append({})
        for i in orders.sample(range(len(calls)), len(calls)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            calls[i]()
            end.record()
            marks[-1][i] = begin, end
    synchronize()
    # The first round is a warm-up.
    return [statistics.median(m[i][0].elapsed_time(m[i][1]) for m in marks[1:]) for i in range(len(calls))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    measured = ceilings()
    linears, tokens = (TINY, 64) if options.tiny else (LINEARS, options.tokens)
    found = products()
    cases: dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]] = {
        (name, kind): case for name, sizes in linears.items() for kind, case in operands(tokens, *sizes).items()
    }
    largest = {case: float((a.float() @ b.float()).abs().max()) for case, (a, b, _) in cases.items()}
    times: dict[str, list[float]] = {}
    for peer, multiply in found.items():
        for case, (a, b, out) in cases.items():
            multiply(a, b, out.fill_(torch.nan))
            error = float((out.float() - a.float() @ b.float()).abs().max()) / largest[case]
            assert error < 0.01, f"{peer}, {case}: {error}"
    calls = [[partial(multiply, *case) for case in cases.values()] for multiply in found.values()]
    all_times = iter(under_load(list(chain.from_iterable(calls)), options.rounds))
    for peer in found:
        times[peer] = [next(all_times) for _ in cases]
    best = {"torch": times["torch"]}
    if len(found) > 1:
        best["quack"] = [min(of) for of in zip(*(times[peer] for peer in found if peer != "torch"), strict=True)]
    flops = [2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b, _ in cases.values()]
    rows: list[list[object]] = [
        [*case, *(count / of[i] * 1e-9 for of in best.values())]
        for i, (case, count) in enumerate(zip(cases, flops, strict=True))
    ]
    rows.append(["all", "", *(sum(flops) / sum(of) * 1e-9 for of in best.values())])
    print(machine(), measured)
    print(table(["layer", "product", *(f"{peer} TFLOP/s" for peer in best)], rows))
    write_json(options.json, ceilings=measured, cases=[*cases], flops=flops, milliseconds=times)


if __name__ == "__main__":
    main()
