"""A layer of experts, forward and backward, beside transformers and Megatron-Core.

    python benchmarks/moe.py [--only NAME ...] [--models NAME ...] [--tokens N] [--json FILE] [--trace FILE]
        [--rounds N] [--tiny]

The router and the routed experts of one layer, at the sizes of Qwen3-30B-A3B, Mixtral 8x7B, gpt-oss-120b and
DeepSeek-V3 (32 of its 256 experts, chosen by softmax; no shared expert): 16 384 tokens, bf16, all gradients. Routing is
even (random weights) or skewed: a term of the router's weights makes the experts' loads fall roughly as Zipf's law.

Variants: ours, in bf16 and in FP8; transformers' modules with `grouped_mm` experts; Megatron-Core's MoELayer with
Transformer Engine's grouped GEMMs, fused permutation and an fp32 router, where both are installed. "ours by torch" has
torch's grouped GEMMs on Hopper, too. "product" is a dense GEMM of the sizes of the layer's first projection: all rows
times the weights of one expert. A rate counts the experts' GEMMs alone, 18 M H I FLOPs for M rows of hidden size H and
experts of size I. "experts alone" is ours without router, permutation and sum. Peak memory is that of a step above
weights and input, with the weights' gradients. Every model's output is compared with ours: the mean difference,
relative to the mean element. A token near a tie goes to other experts by bf16 logits.

Each round times some steps of a variant in a row (`--steps`), as the layers of a model follow one another: a GPU at
its power limit becomes slower in them.

FP8's errors are the norm of the difference from ours in bf16 over the norm, with the same experts for each token.
"FP8 / bf16" is how much faster FP8 is. Megatron-Core's FP8 scales tensors ("tensorwise").
"""

import argparse
import gc
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from float8 import forward_and_backward, relative_errors
from kernel_times import kernel_times
from measure import CUDA, DEVICE, ceilings, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor, nn

from parallel_layers.module import view_of
from parallel_layers.moe import ClampedSwiGLU, GroupedExperts, MoE, MoEConfig, float8_grouped_linear


@dataclass(frozen=True)
class Sizes:
    """Hidden size, intermediate size of an expert, experts, experts per token; gpt-oss has its own activation."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    gpt_oss: bool = False


MODELS = {
    "Qwen3-30B-A3B": Sizes(2048, 768, 128, 8),
    "Mixtral 8x7B": Sizes(4096, 14336, 8, 2),
    "gpt-oss-120b": Sizes(2880, 2880, 128, 4, gpt_oss=True),
    "DeepSeek-V3, 32 experts": Sizes(7168, 2048, 32, 8),
}
TINY = {"tiny": Sizes(32, 16, 8, 2), "tiny gpt-oss": Sizes(32, 16, 8, 2, gpt_oss=True)}
OURS, ALONE, TRANSFORMERS, MEGATRON, PRODUCT = "ours", "experts alone", "transformers", "megatron", "product"
TORCH = "ours by torch"
FP8, MEGATRON_FP8 = "ours FP8", "megatron FP8"
Layer = Callable[[Tensor], Tensor]


@dataclass
class Weights:
    """One layer's weights in the layout of Hugging Face, and the input."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    x: Tensor
    d_out: Tensor

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, *, skewed: bool) -> "Weights":
        torch.manual_seed(0)
        hidden, inner, experts = sizes.hidden, sizes.intermediate, sizes.experts
        on = {"device": DEVICE, "dtype": torch.bfloat16}
        router = torch.randn(experts, hidden, **on) * hidden**-0.5
        x = torch.randn(tokens, hidden, **on)
        if skewed:  # the tokens share one component, by which the router prefers some experts
            x[:, 0] = 4
            router[:, 0] = -torch.arange(1, experts + 1, **on).log() / 4
        gate_up = torch.randn(experts, 2 * inner, hidden, **on) * hidden**-0.5
        down = torch.randn(experts, hidden, inner, **on) * inner**-0.5
        return cls(router, gate_up, down, x, torch.randn_like(x))


def copied(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    """Write values to parameters, and 0 to the biases that have none."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.zero_() if name not in values else parameter.copy_(values[name])


def ours(sizes: Sizes, weights: Weights) -> MoE:
    config = MoEConfig(
        num_experts=sizes.experts, top_k=sizes.top_k, intermediate_size=sizes.intermediate,
        activation=ClampedSwiGLU() if sizes.gpt_oss else "silu", expert_bias=sizes.gpt_oss, router_bias=sizes.gpt_oss,
        input_major_experts=sizes.gpt_oss, alternating_gate_up=sizes.gpt_oss,
    )  # fmt: skip
    layer = MoE(sizes.hidden, config, dtype=torch.bfloat16, device="meta").to_empty(device=DEVICE)
    assert not list(layer.buffers())
    copied(dict(layer.named_parameters()), in_layout("gate", sizes, weights))
    return layer


def experts_in_fp8(module: nn.Module, view: nn.Module) -> None:
    """Change a view as `with_float8` does, without Transformer Engine, which experts do not need."""
    if isinstance(module, GroupedExperts):
        view.__dict__["product"] = float8_grouped_linear


def in_layout(gate: str, sizes: Sizes, weights: Weights) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names; gpt-oss stores them transposed, gate and up by turns."""
    gate_up, down = weights.gate_up, weights.down
    if sizes.gpt_oss:
        gate_up = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).transpose(1, 2)
        down = down.transpose(1, 2)
    return {f"{gate}.weight": weights.router, "experts.gate_up_proj": gate_up, "experts.down_proj": down}


def transformers_layer(sizes: Sizes, weights: Weights) -> nn.Module:
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    common = {"hidden_size": sizes.hidden, "num_experts_per_tok": sizes.top_k, "num_hidden_layers": 1}
    if sizes.gpt_oss:
        config = GptOssConfig(**common, intermediate_size=sizes.intermediate, num_local_experts=sizes.experts)
    else:
        config = Qwen3MoeConfig(
            **common, moe_intermediate_size=sizes.intermediate, num_experts=sizes.experts, norm_topk_prob=True
        )
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        layer: nn.Module = (GptOssMLP if sizes.gpt_oss else Qwen3MoeSparseMoeBlock)(config).to(torch.bfloat16)
    copied(dict(layer.named_parameters()), in_layout("router" if sizes.gpt_oss else "gate", sizes, weights))
    return layer


def by_transformers(layer: nn.Module) -> Layer:
    def forward(x: Tensor) -> Tensor:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out)[0]

    return forward


def megatron_layer(sizes: Sizes, weights: Weights, **options: Any) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=sizes.hidden, num_attention_heads=16, ffn_hidden_size=sizes.intermediate,
        num_moe_experts=sizes.experts, moe_ffn_hidden_size=sizes.intermediate, moe_router_topk=sizes.top_k,
        moe_grouped_gemm=True, moe_token_dispatcher_type="alltoall", moe_permute_fusion=True, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", gated_linear_unit=True, add_bias_linear=sizes.gpt_oss,
        activation_func=quick_gelu if sizes.gpt_oss else torch.nn.functional.silu,
        glu_linear_offset=1.0 if sizes.gpt_oss else 0.0, activation_func_clamp_value=7.0 if sizes.gpt_oss else None,
        bias_activation_fusion=True, bf16=True, params_dtype=torch.bfloat16,
        **{"gradient_accumulation_fusion": False} | options,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=True, num_experts=sizes.experts, moe_grouped_gemm=True)
    layer: nn.Module = build_module(spec, config=config, layer_number=1).to(DEVICE)
    values = {"router.weight": weights.router}
    for number in range(sizes.experts):
        values[f"experts.linear_fc1.weight{number}"] = weights.gate_up[number]
        values[f"experts.linear_fc2.weight{number}"] = weights.down[number]
    copied(dict(layer.named_parameters()), values)
    return layer


def by_megatron(layer: nn.Module) -> Layer:
    return lambda x: layer(x[:, None])[0][:, 0]


def by_megatron_in_fp8(layer: nn.Module) -> Layer:
    from megatron.core.fp8_utils import get_fp8_context

    def forward(x: Tensor) -> Tensor:
        with get_fp8_context(layer.config):
            out: Tensor = layer(x[:, None])[0][:, 0]
        return out

    return forward


PEERS: dict[str, tuple[Callable[[Sizes, Weights], nn.Module], Callable[[nn.Module], Layer]]] = {
    TRANSFORMERS: (transformers_layer, by_transformers),
    MEGATRON: (megatron_layer, by_megatron),
    MEGATRON_FP8: (partial(megatron_layer, fp8="hybrid", fp8_recipe="tensorwise"), by_megatron_in_fp8),
}


def step_of(layer: nn.Module, forward: Layer, weights: Weights) -> Callable[[], None]:
    x = weights.x.clone().requires_grad_()

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        forward(x).backward(weights.d_out)

    return step


def by_torch(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step whose grouped GEMMs are torch's on every GPU."""

    def run() -> None:
        with mock.patch("parallel_layers.moe.experts.is_faster", return_value=False):
            step()

    return run


def experts_alone(layer: MoE, weights: Weights, top_k: int) -> Callable[[], None]:
    """Return a step of the experts on rows in their order."""
    with torch.no_grad():
        chosen = layer.gate(weights.x).experts.flatten()
    counts = torch.bincount(chosen, minlength=layer.config.num_experts)
    rows = weights.x.repeat_interleave(top_k, 0)[chosen.argsort()].requires_grad_()
    d_rows = weights.d_out.repeat_interleave(top_k, 0)
    row_weights = torch.full((len(rows),), 1 / top_k, device=DEVICE, requires_grad=True)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        rows.grad = row_weights.grad = None
        layer.experts.compute(rows, row_weights, counts, biased=False).backward(d_rows)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="these sizes alone")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--trace", help="write the kernels of each variant, by time, to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6, help="steps of a variant in a row")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
    variants = [OURS, TORCH, FP8, ALONE, TRANSFORMERS, PRODUCT]
    if CUDA and importlib.util.find_spec("megatron") and importlib.util.find_spec("transformer_engine"):
        variants[4:4] = [MEGATRON, MEGATRON_FP8]
    models, tokens = (TINY, 64) if options.tiny else (MODELS, options.tokens)
    report, traces = [], []
    for name, sizes in models.items():
        if options.models and name not in options.models:
            continue
        for skewed in (False, True):
            wanted = [variant for variant in variants if not options.only or variant in options.only]
            traced = bool(options.trace) and not skewed
            row, trace = measured(sizes, tokens, skewed, wanted, options.rounds, options.steps, trace=traced)
            report.append({"model": name, "routing": "skewed" if skewed else "even"} | row)
            traces += [f"## {name}: {variant}\n\n{text}" for variant, text in trace.items()]
            print(report[-1], flush=True)
    heads = [
        "model",
        "routing",
        *dict.fromkeys(key for row in report for key in row if key not in ("model", "routing")),
    ]
    print(machine(), ceilings(), f"{tokens} tokens")
    print(table(heads, [[row.get(head, float("nan")) for head in heads] for row in report]))
    if options.trace:
        Path(options.trace).write_text("\n\n".join(traces))
    write_json(options.json, report=report)


def measured(
    sizes: Sizes, tokens: int, skewed: bool, variants: list[str], rounds: int, in_a_row: int, *, trace: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the figures of one model and routing, and the kernels of each variant."""
    weights = Weights.random(sizes, tokens, skewed=skewed)
    layer = ours(sizes, weights)
    with torch.no_grad():
        expected = layer(weights.x)
    load = torch.bincount(layer.gate(weights.x).experts.flatten(), minlength=sizes.experts)
    row: dict[str, float] = {"largest / mean load": float(load.max() / load.float().mean())}
    layers: dict[str, nn.Module] = {OURS: layer}
    steps: dict[str, Callable[[], object]] = {}
    for name in variants:
        if name in PEERS:
            try:
                build, calling = PEERS[name]
                peer = build(sizes, weights)
                forward = calling(peer)
                with torch.no_grad():
                    difference = (forward(weights.x) - expected).abs().mean() / expected.abs().mean()
            except Exception as error:
                print(f"{name} left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            layers[name] = peer
            row[f"{name}: difference"] = float(difference)
            steps[name] = step_of(peer, forward, weights)
    rows = tokens * sizes.top_k
    in_fp8 = view_of(layer, experts_in_fp8)
    if FP8 in variants:
        found, truth = (forward_and_backward(model, weights.x, weights.d_out) for model in (in_fp8, layer))
        row |= {f"FP8 error: {what}": error for what, error in relative_errors(found, truth).items()}
        del found, truth
    layers[FP8] = in_fp8
    by_name: dict[str, Callable[[], Callable[[], object]]] = {
        OURS: lambda: step_of(layer, layer, weights),
        TORCH: lambda: by_torch(step_of(layer, layer, weights)),
        FP8: lambda: step_of(in_fp8, in_fp8, weights),
        ALONE: lambda: experts_alone(layer, weights, sizes.top_k),
        PRODUCT: lambda: dense(rows, sizes),
    }
    steps |= {name: by_name[name]() for name in variants if name in by_name}
    flops = 18 * rows * sizes.hidden * sizes.intermediate
    timings = side_by_side({name: repeated(step, in_a_row) for name, step in steps.items()}, rounds=rounds, warm_up=1)
    times = {name: timing.median / in_a_row for name, timing in timings.items()}
    for name, time in times.items():
        row[f"{name}: ms"] = time
        if name == PRODUCT:
            row["product: TFLOP/s"] = 4 * rows * sizes.hidden * sizes.intermediate / time * 1e-9
        elif name != ALONE:
            row[f"{name}: TFLOP/s"] = flops / time * 1e-9
    if {OURS, FP8} <= times.keys():
        row["FP8 / bf16"] = times[OURS] / times[FP8]
    peers = [times[name] for name in (TRANSFORMERS, MEGATRON) if name in times and not timings[name].failed]
    if OURS in times and peers:
        row["best peer / ours"] = min(peers) / times[OURS]
    if {OURS, PRODUCT} <= times.keys():
        row["rate / product"] = row["ours: TFLOP/s"] / row["product: TFLOP/s"]
    if {OURS, ALONE} <= times.keys():
        row["router, permutation, sum"] = 1 - times[ALONE] / times[OURS]
    traces = {name: kernel_times(steps[name]) for name in steps if trace and name != PRODUCT}
    for name in (OURS, FP8, *PEERS):
        if name in steps:
            layers[name].zero_grad(set_to_none=True)
            gc.collect()
            row[f"{name}: GiB"] = peak_gib(steps[name])
    return row, traces


def repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


def dense(rows: int, sizes: Sizes) -> Callable[[], object]:
    x = torch.randn(rows, sizes.hidden, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(2 * sizes.intermediate, sizes.hidden, device=DEVICE, dtype=torch.bfloat16)
    return lambda: x @ weight.t()


if __name__ == "__main__":
    main()
