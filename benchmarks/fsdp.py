"""The cost of FSDP2's collectives in a step, in bf16 and in FP8: a bound on what FP8 all-gathers may win.

    torchrun --nproc-per-node N benchmarks/fsdp.py [--only NAME ...] [--tokens T ...] [--json FILE] [--rounds N]
        [--tiny]

Eight layers of Llama 3 8B with its vocabulary, bf16 weights, forward and backward as an `Actor` of `backend="parallel"`
computes them, on T tokens a GPU in sequences of at most 4096. `--only` names precisions: bf16, current, block (FP8 by
Transformer Engine, left out where this machine cannot). All ranks take the same tokens, so that a step without FSDP2
has the gradients of the step with it, up to the number of ranks; this is checked before anything is timed.

Each row has one precision and number of tokens, all variants in turn in every round, the slowest rank counts:

    alone       ms of a step that shares nothing: every GPU has all weights
    fsdp        ms of a step under `shard_over_dp` over the N ranks: bf16 all-gathers, fp32 reduce-scatters
    gathered    the same without all-gathers: the weights stay whole after the first step
    kept        "fsdp" in FP8 with rounded weights kept for the backward, which an actor rounds again
    exposed     "fsdp" without "alone": ms that all collectives add; and without "gathered": ms that all-gathers add
    all-gather  ms of gathering all weights once with nothing beside it, and the bus bandwidth; a step with FSDP2
                gathers the layers twice
    rounding    ms to round the layers' weights to FP8, rows and columns, as a step does for each micro-batch
    bound       the most that FP8 all-gathers may win, as a share of "fsdp": half of the exposed all-gathers, and all
                but 1/N of the rounding
    peak GiB    of "fsdp" and of "kept", beside what is held before them
"""

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from measure import CUDA, DEVICE, ceilings, join_ranks, machine, peak_gib, side_by_side, table, write_json
from step import LLAMA_3_8B, TINY, randomise
from torch import Tensor, nn

from parallel_layers import ModelConfig, PackedSequence, ParallelDims
from parallel_layers.linear import LinearLayer, why_not_float8
from parallel_layers.module import is_dtensor
from parallel_models import MicroBatch
from parallel_models.training import Stage, compute, shard_over_dp
from rl_models import CausalLM, Grid

PRECISIONS = ("bf16", "current", "block")
SIZES = (16384, 4096, 1024)
LONGEST = 4096


@dataclass
class Row:
    """Milliseconds, GB/s and GiB of one precision and number of tokens on a GPU."""

    precision: str
    ranks: int
    tokens: int
    alone: float
    fsdp: float
    gathered: float
    all_gather: float
    gb_per_s: float
    kept: float
    rounding: float
    peak_gib: float
    peak_gib_kept: float

    @property
    def exposed(self) -> float:
        return self.fsdp - self.alone

    @property
    def exposed_all_gathers(self) -> float:
        return self.fsdp - self.gathered

    @property
    def bound(self) -> float:
        """The share of a step that FP8 all-gathers may win; NaN in bf16."""
        return (self.exposed_all_gathers / 2 + self.rounding * (1 - 1 / self.ranks)) / self.fsdp


class Model:
    """One copy of the model, and its step."""

    def __init__(self, hf: dict[str, Any], precision: str, grid: Grid) -> None:
        float8 = None if precision == "bf16" else precision
        options: dict[str, Any] = {"dtype": torch.bfloat16, "float8": float8, "keep_probabilities": True}
        self.grid = grid
        self.model = CausalLM(ModelConfig.from_hf(hf), **options, device="meta").to_empty(device=DEVICE)
        randomise(self.model)
        self.stage = Stage(self.model, self.model.chunks[0])
        shard_over_dp(self.stage, self.stage.blocks, grid, head=self.model.lm_head)
        self.parameters = dict(self.stage.named_parameters())  # as they are sharded
        if grid.data_mesh is None:
            for parameter in self.parameters.values():
                parameter.grad_dtype = torch.float32  # as the optimizer's masters have it, and as FSDP2 sums

    def keep_gathered(self) -> None:
        """Gather all weights at the next step, and never release them."""
        for part in self.parts():
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)

    def parts(self) -> list[Any]:
        return [module for module in self.stage.modules() if hasattr(module, "unshard")]

    def backward(self, packed: PackedSequence, *, kept: bool = False) -> Tensor:
        """Return the log-probs; the gradients of their sum are in `parameters`."""
        for module in self.model.modules():
            linear = getattr(getattr(getattr(module, "execution", None), "product", None), "linear", None)
            if linear is not None:
                linear._is_fsdp2 = self.grid.data_mesh is not None and not kept  # Transformer Engine's switch
        log_probs: Tensor = self.stage.run(compute(self.model, None, self.stage, MicroBatch(packed)))[0]
        log_probs.sum().backward()
        return log_probs.detach()

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, packed: PackedSequence, *, kept: bool = False) -> None:
        self.backward(packed, kept=kept)
        self.drop_gradients()

    def all_gather(self) -> None:
        for part in self.parts():
            part.unshard()
        for part in self.parts():
            part.reshard()


def check(alone: Model, fsdp: Model, gathered: Model, packed: PackedSequence, ranks: int) -> None:
    """Raise RuntimeError where a step with FSDP2 has other numbers than `ranks` times those of the step without.

    The backwards are deterministic here: else attention sums in any order, and FP8 rounds the last bits to other
    numbers. A gradient may differ by 1 % of its norm, and by three times what two steps without FSDP2 differ by.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    wanted = alone.backward(packed)
    first = {name: _gradient(parameter) for name, parameter in alone.parameters.items()}
    alone.drop_gradients()
    alone.backward(packed)
    allowed = {name: 1e-2 + 3 * _difference(_gradient(p), first[name]) for name, p in alone.parameters.items()}
    alone.drop_gradients()
    for other, kept in (fsdp, False), (fsdp, True), (gathered, False):
        found = other.backward(packed, kept=kept)
        if (difference := float((found - wanted).abs().max())) > 1e-2:
            raise RuntimeError(f"log-probs under FSDP2 differ by {difference}")
        for name, parameter in other.parameters.items():
            gradient = _gradient(parameter)
            assert is_dtensor(gradient)
            difference = _difference(gradient.full_tensor() / ranks, first[name])
            if not difference < allowed[name]:
                raise RuntimeError(f"the gradient of {name} under FSDP2 differs by {difference} of its norm")
        other.drop_gradients()
    torch.use_deterministic_algorithms(False)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _difference(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def _in_float8(module: nn.Module) -> TypeGuard[LinearLayer]:
    return isinstance(module, LinearLayer) and getattr(module, "float8", False)


def rounding_of(model: nn.Module, precision: str) -> Callable[[], None] | None:
    """Return a function that rounds the layers' weights as Transformer Engine's linears do; None in bf16."""
    if precision == "bf16" or not CUDA:
        return None
    import transformer_engine.pytorch as te

    kind = te.DType.kFloat8E4M3
    quantizer: Any = (
        te.Float8CurrentScalingQuantizer(kind, DEVICE, rowwise=True, columnwise=True)
        if precision == "current"
        else te.Float8BlockQuantizer(kind, rowwise=True, columnwise=True)
    )
    weights = [module.weight.detach() for module in model.modules() if _in_float8(module)]

    def rounding() -> None:
        for weight in weights:
            quantizer(weight)

    return rounding


def measure(hf: dict[str, Any], precision: str, sizes: list[int], rounds: int, grid: Grid) -> list[Row]:
    """Return a row for each number of tokens."""
    ranks = dist.get_world_size()
    alone = Model(hf, precision, Grid(ParallelDims(), DEVICE))
    fsdp, gathered = Model(hf, precision, grid), Model(hf, precision, grid)
    gathered.keep_gathered()
    rounding = rounding_of(alone.model, precision)
    moved = sum(parameter.numel() * parameter.element_size() for parameter in alone.parameters.values())
    rows = []
    for tokens in sizes:
        packed = pack(hf, tokens)
        check(alone, fsdp, gathered, packed, ranks)
        models = {"alone": alone, "fsdp": fsdp, "gathered": gathered}
        calls: dict[str, Callable[[], Any]] = {name: partial(model.step, packed) for name, model in models.items()}
        calls["all_gather"] = fsdp.all_gather
        if rounding is not None:
            calls |= {"rounding": rounding, "kept": partial(fsdp.step, packed, kept=True)}
        times = {name: timing.median for name, timing in side_by_side(calls, rounds=rounds, warm_up=2).items()}
        rows.append(
            Row(
                precision,
                ranks,
                tokens,
                **dict.fromkeys(("rounding", "kept"), float("nan")) | times,
                gb_per_s=moved * (1 - 1 / ranks) / times["all_gather"] * 1e-6,
                peak_gib=peak_gib(partial(fsdp.step, packed)),
                peak_gib_kept=peak_gib(calls["kept"]) if "kept" in calls else float("nan"),
            )
        )
    return rows


def pack(hf: dict[str, Any], tokens: int) -> PackedSequence:
    generator = torch.Generator().manual_seed(0)  # all ranks take the same tokens
    ids = torch.randint(hf["vocab_size"], (tokens,), generator=generator)
    return PackedSequence.from_sequences([row.to(DEVICE) for row in ids.split(LONGEST)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="these precisions alone")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="on a GPU")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rank, world = join_ranks()
    if world < 2:
        parser.error("FSDP2 has nothing to gather on one rank; start two or more with torchrun")
    measured = ceilings()
    hf, sizes = (TINY, [64]) if options.tiny else (LLAMA_3_8B, list(SIZES))
    grid = Grid.build(ParallelDims(dp=world), device=DEVICE)
    rows: list[Row] = []
    for precision in options.only:
        if precision != "bf16" and (reason := why_not_float8(precision)) is not None:
            print(f"{precision} is left out: {reason}", file=sys.stderr)
            continue
        try:
            found = measure(hf, precision, options.tokens or sizes, options.rounds, grid)
        except Exception as error:
            if precision == "bf16":
                raise
            print(f"{precision} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows += found
        gc.collect()
        if rank == 0:
            print(f"{precision}: {found}", file=sys.stderr)
    if rank == 0:
        print(machine(), measured)
        heads = ["precision", "ranks", "tokens", "alone ms", "fsdp ms", "gathered ms", "kept ms"]
        heads += ["exposed ms", "of all-gathers", "all-gather ms", "GB/s", "rounding ms", "bound %"]
        heads += ["peak GiB", "kept"]
        cells = [
            [
                row.precision, row.ranks, row.tokens, row.alone, row.fsdp, row.gathered, row.kept,
                row.exposed, row.exposed_all_gathers, row.all_gather, row.gb_per_s, row.rounding, 100 * row.bound,
                row.peak_gib, row.peak_gib_kept,
            ]
            for row in rows
        ]  # fmt: skip
        print(table(heads, cells))
        write_json(options.json, ceilings=measured, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
