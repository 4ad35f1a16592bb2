"""The further micro-batches of an update, forward and backward: bf16 weights whose gradients are summed in fp32.

    python benchmarks/micro_batches.py [--only NAME ...] [--tokens N ...] [--json FILE] [--rounds N] [--tiny]

Models: eight layers of Llama 3 8B with embedding and head (as in `step.py`), and a layer of routed experts of
Qwen3-30B-A3B, gpt-oss-120b, Mixtral 8x7B and DeepSeek-V3 (as in `moe.py`).

    in place       what an `Actor` does with weights that FSDP2 does not divide: backwards add to the sums
    by autograd    backwards make gradients in bf16, which autograd casts and adds
    megatron       Megatron-Core's experts, whose GEMMs (Transformer Engine's) add to `main_grad`

"difference" is that between the sums of "in place" and "by autograd" after two micro-batches: the largest of all
weights, norm over norm. Peak memory is that above weights and sums.
"""

import argparse
import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import moe
import step
import torch
from measure import CUDA, DEVICE, ceilings, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor, nn

from parallel_layers.training import Destination, sum_in_place_

IN_PLACE, BY_AUTOGRAD, MEGATRON = "in place", "by autograd", "megatron"
DENSE = "Llama 3 8B, 8 layers"
MicroBatch = Callable[[], Any]


def of_llama(hf: dict[str, Any], tokens: int) -> tuple[nn.Module, MicroBatch]:
    task = step.Task.random(hf, [min(tokens, 4096)] * max(1, tokens // 4096), None)
    model, log_probs = step.log_probs_of_ours(task, step.ours(task), "default")
    return model, lambda: log_probs().sum().backward()


def of_experts(sizes: moe.Sizes, tokens: int) -> tuple[nn.Module, MicroBatch]:
    weights = moe.Weights.random(sizes, tokens, skewed=False)
    layer = moe.ours(sizes, weights)
    x = weights.x.requires_grad_()
    return layer, lambda: layer(x).backward(weights.d_out)


def of_megatron(sizes: moe.Sizes, tokens: int) -> tuple[nn.Module, MicroBatch]:
    weights = moe.Weights.random(sizes, tokens, skewed=False)
    layer = moe.megatron_layer(sizes, weights, gradient_accumulation_fusion=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    forward, x = moe.by_megatron(layer), weights.x.requires_grad_()

    def run() -> None:
        forward(x).backward(weights.d_out)
        for parameter in layer.parameters():
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad += parameter.grad
            parameter.grad = None

    return layer, run


def by_autograd(micro_batch: MicroBatch) -> None:
    with mock.patch.object(Destination, "of", lambda weight: Destination(weight.dtype, None)):
        micro_batch()


def difference(model: nn.Module, calls: dict[str, MicroBatch]) -> float:
    found: dict[str, list[Tensor]] = {}
    for call in (calls[BY_AUTOGRAD], calls[IN_PLACE]):
        model.zero_grad(set_to_none=True)
        call()
        call()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(name, []).append(parameter.grad.clone())
    return max(float((b - a).norm() / a.norm().clamp(min=1e-30)) for a, b in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models alone")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 4096], help="of a micro-batch")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches of a variant in a row")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    sizes = moe.TINY if options.tiny else moe.MODELS
    build: dict[str, Callable[[int], tuple[nn.Module, MicroBatch]]] = {
        DENSE: partial(of_llama, step.TINY if options.tiny else step.LLAMA_3_8B)
    }
    build |= {name: partial(of_experts, of_model) for name, of_model in sizes.items()}
    has_megatron = CUDA and importlib.util.find_spec("megatron") and importlib.util.find_spec("transformer_engine")
    rows: list[dict[str, Any]] = []
    for name in options.only or build:
        for tokens in [64] if options.tiny else options.tokens:
            model, micro_batch = build[name](tokens)
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32
            sum_in_place_(model.parameters())
            calls = {IN_PLACE: micro_batch, BY_AUTOGRAD: partial(by_autograd, micro_batch)}
            row: dict[str, Any] = {"model": name, "tokens": tokens, "difference": difference(model, calls)}
            if has_megatron and name in sizes:
                try:
                    _, calls[MEGATRON] = of_megatron(sizes[name], tokens)
                    calls[MEGATRON]()
                except Exception as error:
                    calls.pop(MEGATRON, None)
                    print(f"{MEGATRON} left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
            in_a_row = {variant: moe.repeated(call, options.steps) for variant, call in calls.items()}
            times = side_by_side(in_a_row, rounds=options.rounds, warm_up=1)
            row |= {f"{variant}: ms": timing.median / options.steps for variant, timing in times.items()}
            row["by autograd / in place"] = times[BY_AUTOGRAD].median / times[IN_PLACE].median
            row |= {f"{variant}: GiB": peak_gib(calls[variant]) for variant in (IN_PLACE, BY_AUTOGRAD)}
            rows.append(row)
            print(row, flush=True)
            del model, micro_batch, calls, in_a_row
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
    print(machine(), ceilings(), DEVICE)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    print(table(heads, [[row.get(head, float("nan")) for head in heads] for row in rows]))
    write_json(options.json, rows=rows)


if __name__ == "__main__":
    main()
