"""A whole packed training step, forward and backward: a Llama-3-8B-shaped stack beside Megatron-Core.

    torchrun --nproc-per-node TP benchmarks/step.py [--only NAME ...] [--lengths N ...] [--json FILE] [--trace FILE]
        [--rounds N] [--tiny]

Eight layers of Llama 3 8B with its vocabulary, 16384 tokens as 4 x 4096 (or as --lengths says), bf16, no recompute,
tensor parallel over all ranks, sequence parallel when there are several. Both models are built from the same config
with random weights; the loss is the sum of the tokens' log-probabilities. Model FLOPs are 6 for each weight and token
(the embedding is no product) plus causal attention once. Every round runs each variant once, from no gradients; the
slowest rank counts. Peak memory is that of a step with the weights and gradients, of the worst rank.

Variants of ours, which share one model:

    serial, collectives, symmetric-memory   the ways to overlap the sequence-parallel forward (several ranks, and what
                                            they have)
    default                                 what an `Actor` does without options: the head keeps its probabilities in
                                            bf16 from the forward where the GPU has room for [T, V/tp] (three products
                                            instead of four)
    cublas                                  default, without quack's GEMMs (Hopper, where quack is installed)
    auto                                    the head computes its probabilities again in the backward
    kept                                    the head always keeps its probabilities
    graph                                   kept, as one CUDA graph, whose launches cost the host nothing; it overlaps
                                            in the first of the ways above, whatever the number of tokens (CUDA)
    norms-apart                             the default, in which the backward sums each norm weight's gradient over the
                                            ranks by itself, rather than all together after it (by --only)
    compiled                                kept, with every layer compiled by torch.compile (by --only: it takes long)
    fp8-current, fp8-block                  kept, with the layers' products in FP8 (by --only, with Transformer Engine)

megatron-current, megatron-block and megatron-delayed (by --only) are Megatron-Core's layers in FP8. "difference" is
FP8's error: the mean difference of a token's log-prob from that of the same model in bf16, with random weights.

megatron takes Transformer Engine's layers and the attention that it chooses, where it is installed; `megatron_model.py`
says which. It is left out where it fails, as a graph is, which is then said. A CPU runs ours alone.
Its overlap wants CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, ours wants nothing: compare with and without.

--trace profiles one step of each variant and writes which kernels took the time, on which stream.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from kernel_times import kernel_times
from measure import CUDA, DEVICE, ceilings, join_ranks, machine, side_by_side, synchronize, table, write_json
from megatron_model import check_that_tokens_see_each_other, has_megatron, megatron_losses, megatron_model
from torch import Tensor, nn

from parallel_layers import DecoderLayer, Execution, ModelConfig, PackedSequence, linear_log_probs, next_token_labels
from parallel_layers.kernels import quack
from parallel_layers.linear import RECIPES, available_overlaps, why_not_float8, with_float8
from parallel_layers.module import view_of
from parallel_layers.training import sum_norm_gradients_once
from rl_models import CausalLM
from rl_models.backends import FLOAT8

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
TINY = LLAMA_3_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 515,
}  # fmt: skip
Step = Callable[[], None]
LogProbs = Callable[[], Tensor]
MEGATRON, COMPILED, GRAPH, FP8, APART = "megatron", "compiled", "graph", "fp8", "norms-apart"
CUBLAS, MIN_WORK = "cublas", quack.MIN_WORK


@dataclass
class Task:
    """The config and the input of both models."""

    hf: dict[str, Any]
    packed: PackedSequence
    lengths: list[int]
    group: dist.ProcessGroup | None

    @classmethod
    def random(cls, hf: dict[str, Any], lengths: list[int], group: dist.ProcessGroup | None) -> "Task":
        generator = torch.Generator().manual_seed(0)  # all ranks take the same tokens
        rows = [torch.randint(hf["vocab_size"], (length,), generator=generator) for length in lengths]
        return cls(hf, PackedSequence.from_sequences([row.to(DEVICE) for row in rows]), lengths, group)

    def flops(self) -> float:
        """Return the FLOPs of a forward and backward of all ranks."""
        hf = self.hf
        hidden, heads = hf["hidden_size"], hf["num_attention_heads"] * hf["head_dim"]
        attention = hidden * (2 * heads + 2 * hf["num_key_value_heads"] * hf["head_dim"])
        layer = attention + 3 * hidden * hf["intermediate_size"]
        weights = hf["num_hidden_layers"] * layer + hidden * hf["vocab_size"]
        scores = 6 * hf["num_hidden_layers"] * heads * sum(length**2 for length in self.lengths)
        return 6 * weights * self.packed.num_tokens + scores


def randomise(module: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.view(torch.uint8).random_(0, 0x38)  # bits of the numbers from 0 to 1
            elif parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)


def ours(task: Task) -> CausalLM:
    config = ModelConfig.from_hf(task.hf)
    options = {
        "group": task.group,
        "sequence_parallel": task.group is not None,
        "dtype": torch.bfloat16,
        # Sums over the ranks as Megatron-Core's: in bf16.
        "execution": Execution(reduce_dtype=torch.bfloat16),
    }
    model = CausalLM(config, **options, device="meta").to_empty(device=DEVICE)  # type: ignore[arg-type]
    randomise(model)
    return model


def log_probs_of_ours(task: Task, model: CausalLM, variant: str) -> tuple[CausalLM, LogProbs]:
    """Return the model of a variant, and the function that computes the tokens' log-probs."""
    if variant == COMPILED:
        torch._dynamo.config.recompile_limit = 64  # each layer may get code of its own
        model = view_of(model, compile_layers)
    if variant.startswith(FP8):
        model = with_float8(model, variant.partition("-")[2])
    kept = variant in ("kept", COMPILED, GRAPH) or variant.startswith(FP8)
    keep: bool | Literal["auto"] = "auto" if variant in ("default", APART, CUBLAS) else kept
    overlaps = available_overlaps(task.group, DEVICE)
    overlap = overlaps[0] if variant == GRAPH and task.group else variant if variant in overlaps else "auto"
    labels = next_token_labels(task.packed)

    def log_probs() -> Tensor:
        quack.MIN_WORK = sys.maxsize if variant == CUBLAS else MIN_WORK
        for module in model.modules():
            if hasattr(module, "execution"):
                module.execution = replace(module.execution, overlap=overlap)
        return linear_log_probs(
            model(task.packed),
            model.head_weight,
            labels,
            group=task.group,
            entropy=False,
            sequence_parallel=model.sequence_parallel,
            vocab_size=task.hf["vocab_size"],
            keep_probabilities=keep,
        ).log_probs

    return model, log_probs


def log_probs_of_megatron(task: Task, variant: str) -> tuple[nn.Module, LogProbs]:
    recipes = FLOAT8 | {"delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "": {}}
    model = megatron_model(task.hf, task.group, **recipes[variant.partition("-")[2]])
    losses = megatron_losses(model, task.packed)
    randomise(model)
    check_that_tokens_see_each_other(losses, task.packed)
    return model, lambda: losses(task.packed.input_ids)


def step_of(model: nn.Module, log_probs: LogProbs, group: dist.ProcessGroup | None) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with sum_norm_gradients_once(model, group):
            log_probs().sum().backward()

    return step


class Graph:
    """A step as one CUDA graph, captured at the first call and replayed at the others."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None:
            self.capture()
        else:
            self.graph.replay()

    def release(self) -> None:
        """Before the process group: its communicators wait at their end for graphs that hold collectives."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = None

    def capture(self) -> None:
        """Also anew, to see what memory that takes."""
        self.release()
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            for _ in range(2):
                self.step()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        # The threads of a process group ask for their collectives meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        self.graph = graph


def compile_layers(module: nn.Module, view: nn.Module) -> None:
    if isinstance(view, DecoderLayer):
        view.__dict__["forward"] = torch.compile(partial(type(view).forward, view), fullgraph=True)


def peak(model: nn.Module, step: Step) -> float:
    """GiB held at most in a step, the weights and gradients included, of the worst rank; 0 on a CPU."""
    if not CUDA:
        return 0.0
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.capture() if isinstance(step, Graph) else step()
    synchronize()
    own = sum(p.nbytes for p in model.parameters())
    held = torch.tensor(float(torch.cuda.max_memory_allocated() - before + own), device=DEVICE)
    if dist.is_initialized():
        dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held) / 2**30


def difference(name: str, found: dict[str, Tensor]) -> float:
    """Return the mean difference of a token's log-prob in FP8 from the same model's in bf16; else NaN."""
    family = MEGATRON if name.startswith(MEGATRON) else FP8
    plain = [MEGATRON] if family == MEGATRON else ["kept", "default", "auto"]
    beside = next((found[other] for other in plain if other in found), None)
    if beside is None or not name.startswith(f"{family}-"):
        return float("nan")
    return float((found[name] - beside).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="of the sequences of the pack")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--trace", help="write each variant's kernels, by time and stream, to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rank, world = join_ranks()
    measured = ceilings()
    hf, lengths = (TINY, [32] * 2) if options.tiny else (LLAMA_3_8B, [4096] * 4)
    task = Task.random(hf, options.lengths or lengths, dist.group.WORLD if world > 1 else None)
    variants = [*available_overlaps(task.group, DEVICE)] if world > 1 else []
    variants += ["default", *([CUBLAS] if quack.has_quack() else []), "auto", "kept", *([GRAPH] if CUDA else [])]
    more = [APART, COMPILED, *(f"{FP8}-{recipe}" for recipe in RECIPES if why_not_float8(recipe) is None)]
    if has_megatron():
        variants.append(MEGATRON)
        more += [f"{MEGATRON}-{recipe}" for recipe in ("current", "block", "delayed")]
    if options.only:
        if unknown := sorted(set(options.only) - {*variants, *more}):
            parser.error(f"--only {' '.join(unknown)}: here there are {', '.join([*variants, *more])}")
        variants = options.only
    model = ours(task) if any(not name.startswith(MEGATRON) for name in variants) else None
    steps: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    found: dict[str, Tensor] = {}
    for name in variants:
        try:
            owner, log_probs = (
                log_probs_of_megatron(task, name)
                if model is None or name.startswith(MEGATRON)
                else log_probs_of_ours(task, model, name)
            )
            step = step_of(owner, log_probs, None if name == APART else task.group)
            step = Graph(step) if name == GRAPH else step
            step()
            with torch.no_grad():
                found[name] = log_probs().flatten()
        except Exception as error:
            if not name.startswith((MEGATRON, GRAPH, FP8)):
                raise
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        peaks[name] = peak(owner, step)
        owner.zero_grad(set_to_none=True)
        steps[name] = step
    differences = {name: difference(name, found) for name in found}
    timings = side_by_side(steps, rounds=options.rounds, warm_up=2)
    theirs = timings[MEGATRON].median if MEGATRON in timings else float("nan")
    rows: list[list[object]] = []
    for name, timing in timings.items():
        seconds = timing.median * 1e-3
        rate = task.flops() / seconds / world * 1e-12
        per_gpu = task.packed.num_tokens / seconds / world
        rows.append([name, world, timing.median, rate, per_gpu, peaks[name], theirs / timing.median, differences[name]])
    if rank == 0:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
        print(machine(), measured, f"CUDA_DEVICE_MAX_CONNECTIONS {connections}")
        heads = ["variant", "tp", "ms", "TFLOP/s per GPU", "tokens/s per GPU", "peak GiB per GPU", "x megatron"]
        heads.append("difference")
        print(table(heads, rows))
        report = {
            "tp": world,
            "lengths": task.lengths,
            "timings": list(timings.values()),
            "peaks": peaks,
            "differences": differences,
            "connections": connections,
        }
        write_json(options.json, ceilings=measured, **report)
    if options.trace:
        traces = "\n\n".join(f"## {name}, tp {world}\n\n{kernel_times(step)}" for name, step in steps.items())
        if rank == 0:
            Path(options.trace).write_text(traces + "\n")
    for step in steps.values():
        if isinstance(step, Graph):
            step.release()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
