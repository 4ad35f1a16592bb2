"""How the head's kernels are best cut up: launches of its two products, and slices of its backward.

    python benchmarks/head_launches.py [--shape TOKENS HIDDEN VOCABULARY] [--json FILE] [--rounds N]

bf16 random data, logits of standard deviation 2, on one GPU of Hopper's kind or later. The forward is the product that
reduces its tiles (with the merge and the labels' logits), the gradient the one that writes them for all slices of the
backward, the backward everything: gradient, hidden states and weight. cuBLAS writes the same product as bf16 logits.
The first launch and the first slice are what `linear_log_probs` takes. "off" is the largest difference from the first
row's results, in parts of their largest number; a launch that does not fit the GPU is a row without times.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from measure import Call, ceilings, machine, side_by_side, table, write_json
from torch import Tensor

from parallel_layers.head import fused
from parallel_layers.head.logit_transform import LogitTransform
from parallel_layers.head.softmax_statistics import UpstreamGradients, finish_statistics
from parallel_layers.kernels import head
from parallel_layers.kernels.runtime import num_multiprocessors

SHAPE = (8192, 4096, 128256)
TRANSFORM, NUMBERS = LogitTransform(1.0, 0.0, 1.0), head.Numbers(1.0, 0.0, 1.0)


def launches(base: head.Launch) -> dict[str, head.Launch]:
    return {
        "as it is": base,
        "16 rows of tiles side by side": replace(base, group=16),
        "two programs a multiprocessor": replace(
            base, entries=128, group=16, stages=base.stages - 1, num_warps=4, programs=2
        ),
    }


def largest_difference(found: Tensor, first: Tensor) -> float:
    return float((found.float() - first.float()).abs().max() / first.float().abs().max())


class Problem:
    """Inputs, and what the forward leaves for the backward."""

    def __init__(self, tokens: int, hidden: int, vocabulary: int) -> None:
        self.hidden = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) * (2 / math.sqrt(hidden))
        self.labels = torch.randint(vocabulary, (tokens,), device="cuda")
        _, logsumexps, entropies = finish_statistics(self.forward(head.REDUCES))
        upstream = torch.randn(2, tokens, device="cuda")
        self.upstream = UpstreamGradients.of_log_probs(upstream[0], upstream[1], logsumexps, entropies)
        self.rows = head.Rows(self.labels, None, upstream[0], upstream[1], logsumexps, entropies)
        self.step = fused.slice_entries(tokens, vocabulary, hidden, num_multiprocessors(self.hidden.device))
        self.grad_hidden = torch.zeros(tokens, hidden, device="cuda")
        self.grad_weight = torch.empty_like(self.weight)

    def forward(self, launch: head.Launch) -> Tensor:
        return head.product_statistics(self.hidden, self.weight, self.labels, None, NUMBERS, launch=launch)

    def gradient(self, launch: head.Launch) -> Tensor:
        """Compute all slices and return the result of the last."""
        buffer = self.hidden.new_empty(len(self.hidden), self.step)
        for first in range(0, len(self.weight), self.step):
            weight = self.weight[first : first + self.step]
            gradient = buffer[:, : len(weight)]
            head.product_gradient(self.hidden, weight, gradient, self.rows, NUMBERS, first_entry=first, launch=launch)
        return gradient

    def backward(self, entries: int) -> Tensor:
        """Returns the gradient of the hidden states."""
        fused.head_gradients(
            self.hidden,
            self.weight,
            self.labels,
            TRANSFORM,
            self.upstream,
            grad_hidden_TH=self.grad_hidden.zero_(),
            grad_weight_VH=self.grad_weight,
            entries_a_slice=entries,
        )
        return self.grad_hidden


def slices(problem: Problem) -> dict[str, int]:
    """Return the library's choice and up to four tiles more or less: cuBLAS fills its last wave differently."""
    steps = [problem.step, *(problem.step + n * head.BLOCK_V for n in range(-4, 5) if n)]
    return {f"{step} entries": step for step in steps if step > 0}


def compare(calls: dict[str, Callable[[], Tensor]], flops: float, rounds: int, **peers: Call) -> list[list[object]]:
    """Rows of variant, ms, TFLOP/s and difference from the first."""
    timings = side_by_side({**calls, **peers}, rounds=rounds)
    first = next(iter(calls.values()))().clone()
    rows: list[list[object]] = []
    for name, timing in timings.items():
        found = calls[name]() if name in calls and not timing.failed else None
        off = float("nan") if found is None else largest_difference(found, first)
        rows.append([name, timing.median, flops / timing.median * 1e-9, off])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=SHAPE, metavar=("TOKENS", "HIDDEN", "VOCABULARY"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="also write every figure to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    measured = ceilings()
    print(machine(), measured, flush=True)
    problem, product = Problem(*options.shape), 2.0 * math.prod(options.shape)
    cublas = {"cuBLAS": lambda: problem.hidden @ problem.weight.T}
    tables = {
        "forward": (
            {name: lambda cut=cut: problem.forward(cut) for name, cut in launches(head.REDUCES).items()},
            product,
            cublas,
        ),
        "gradient": (
            {name: lambda cut=cut: problem.gradient(cut) for name, cut in launches(head.WRITES).items()},
            product,
            cublas,
        ),
        "backward": (
            {name: lambda step=step: problem.backward(step) for name, step in slices(problem).items()},
            3 * product,
            {},
        ),
    }
    found = {}
    for name, (calls, flops, peers) in tables.items():
        found[name] = compare(calls, flops, options.rounds, **peers)
        print("\n" + table([name, "ms", "TFLOP/s", "off"], found[name]), flush=True)
    write_json(options.json, ceilings=measured, shape=options.shape, **found)


if __name__ == "__main__":
    main()
