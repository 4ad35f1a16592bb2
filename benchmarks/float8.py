"""The gain and the cost of FP8: decoder layers in bf16, ordinary beside `with_float8`.

    python benchmarks/float8.py [--json FILE] [--rounds N] [--tiny]

One layer and eight of Llama 3 8B, those of `step.py` without embedding and head, on one GPU: 16384 tokens as 4 x 4096,
random weights. The variants are every recipe that this machine can compute; without Transformer Engine the ordinary
layers run alone. All variants share their parameters, which stay in bf16 and are rounded to FP8 for each product.

Times are of the forward under no_grad and of a forward with its backward, one after another in every round; "x" is how
much faster than bf16 in the same rounds. Peak memory is what a forward with its backward holds beside the parameters
and the input, its gradients included.

Errors are of the first sequence alone: the norm of the difference over the norm of what it is compared to, which are
the same layers in fp32 or the ordinary ones in bf16. "dW" is the parameter with the largest error.
"""

import argparse
import copy
from dataclasses import dataclass
from functools import partial

import torch
from measure import DEVICE, ceilings, machine, peak_gib, side_by_side, table, write_json
from step import LLAMA_3_8B, TINY, randomise
from torch import Tensor, nn

from parallel_layers import DecoderConfig, DecoderLayer, ModelConfig, RotaryEmbedding
from parallel_layers.linear import RECIPES, why_not_float8, with_float8

BF16 = "bf16"


class Stack(nn.Module):
    """Decoder layers one after another, on sequences of one length."""

    def __init__(self, config: DecoderConfig, depth: int, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, dtype=torch.bfloat16, device=DEVICE) for _ in range(depth))
        self.rotary = RotaryEmbedding(config.head_dim, device=DEVICE)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """`[T, H]` -> `[T, H]`; T is a multiple of the length."""
        rotary = self.rotary(torch.arange(len(x), device=x.device) % self.length)
        cu_seqlens = torch.arange(0, len(x) + 1, self.length, dtype=torch.int32, device=x.device)
        for layer in self.layers:
            x = layer(x, rotary, cu_seqlens, self.length)
        return x


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(x)
    return y


def forward_and_backward(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter."""
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy)]


def relative_errors(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """The relative errors of the results of `forward_and_backward`."""
    output, dx, *weights = (
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True)
    )
    return {"output": output, "dx": dx, "dW": max(weights)}


def errors(models: dict[str, nn.Module], x: Tensor, dy: Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """By variant and by what it is compared to: "fp32", or the ordinary layers."""
    exact = copy.deepcopy(models[BF16]).float()
    truths = {"fp32": forward_and_backward(exact, x.float(), dy.float())}
    del exact
    truths[BF16] = forward_and_backward(models[BF16], x, dy)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in models.items():
        results = forward_and_backward(model, x, dy)
        found[name] = {against: relative_errors(results, truth) for against, truth in truths.items()}
    return found


@dataclass
class Row:
    """One variant: milliseconds, times bf16's speed, GiB."""

    layers: int
    variant: str
    forward_ms: float
    forward_speed: float
    step_ms: float
    step_speed: float
    peak_gib: float
    errors: dict[str, dict[str, float]]


def measure(config: DecoderConfig, depth: int, count: int, length: int, rounds: int) -> list[Row]:
    """One row for each variant of `depth` layers."""
    ordinary = Stack(config, depth, length)
    randomise(ordinary)
    models: dict[str, nn.Module] = {BF16: ordinary}
    for recipe in RECIPES:
        if why_not_float8(recipe) is None:
            models[recipe] = with_float8(ordinary, recipe)
    x, dy = (torch.randn(count * length, config.hidden_size, device=DEVICE).bfloat16() for _ in range(2))
    found = errors(models, x[:length], dy[:length])
    forwards = {f"{name} forward": partial(forward, model, x) for name, model in models.items()}
    steps = {f"{name} step": partial(forward_and_backward, model, x, dy) for name, model in models.items()}
    timings = side_by_side(forwards | steps, rounds=rounds)
    if failed := {name: timing.failed for name, timing in timings.items() if timing.failed}:
        raise RuntimeError(f"these cannot be timed: {failed}")
    medians = {name: timing.median for name, timing in timings.items()}
    return [
        Row(
            depth,
            name,
            medians[f"{name} forward"],
            medians[f"{BF16} forward"] / medians[f"{name} forward"],
            medians[f"{name} step"],
            medians[f"{BF16} step"] / medians[f"{name} step"],
            peak_gib(steps[f"{name} step"]),
            found[name],
        )
        for name in models
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    measured = ceilings()
    print(machine(), measured)
    left_out = {recipe: why_not_float8(recipe) for recipe in RECIPES}
    for recipe, reason in left_out.items():
        if reason is not None:
            print(f"{recipe} is left out: {reason}")
    hf, count, length = (TINY, 2, 32) if options.tiny else (LLAMA_3_8B, 4, 4096)
    config = ModelConfig.from_hf(hf).decoder
    rows = [row for depth in (1, 8) for row in measure(config, depth, count, length, options.rounds)]
    heads = ["layers", "variant", "forward ms", "x", "fwd + bwd ms", "x", "peak GiB"]
    heads += [f"{what} to {truth}" for truth in ("fp32", BF16) for what in ("output", "dx", "dW")]
    cells = [
        [
            row.layers, row.variant, row.forward_ms, row.forward_speed, row.step_ms, row.step_speed, row.peak_gib,
            *(error for against in row.errors.values() for error in against.values()),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(heads, cells))
    write_json(options.json, ceilings=measured, rows=rows, left_out=left_out)


if __name__ == "__main__":
    main()
