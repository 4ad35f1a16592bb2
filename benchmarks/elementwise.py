"""Memory-bound kernels: RMSNorm (plain, with the residual added), rotary embedding, SwiGLU, the embedding table.

    python benchmarks/elementwise.py [--json FILE] [--only NAME ...] [--sweep]

Each row names the fewest bytes that the operation must move; its rate is those bytes over the measured time, and the
ratio is that rate over a device-to-device copy's, measured in the same run (bytes read plus bytes written). Times are
medians of CUDA-event times over replays of a CUDA graph that holds several calls on rotating buffers, so neither
Python nor launch gaps are in them; the device is kept busy before, since its clock falls while kernels are compiled.
torch.compile makes code for each row's sizes. Peers that are not installed are left out; one that fails is a row
without times, and its reason is printed. The embedding's row "zeros alone" writes its gradient as zeros, the floor of
every dense gradient. `--sweep` times launch parameters of SwiGLU and the rotation instead.

Everything runs on one stream, which is not the default one. Autograd runs a backward on the stream of its forward, and
a graph can take in no work of the default stream: the backward of an operation that ran there cannot be captured
(https://github.com/pytorch/pytorch/issues/164302).
"""

import argparse
import functools
import importlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from measure import Call, ceilings, machine, write_json
from torch import Tensor
from torch.nn import functional as F

from parallel_layers import RotaryEmbedding
from parallel_layers.head import look_up
from parallel_layers.kernels import fused_rms_norm, rotary, swiglu, zeros
from parallel_layers.rotary import apply_rotary

TOKENS, HIDDEN, INTERMEDIATE = 16384, 4096, 14336
Q_HEADS, K_HEADS, HEAD_DIM = 32, 8, 128
VOCABULARY = 128256
CALLS, REPLAYS, BUSY_SECONDS = 9, 15, 0.1


def median_us(calls: list[Call]) -> float:
    """Microseconds of one call: the calls run one after another in a CUDA graph, whose replays are timed.

    The current stream is captured, on which what the calls differentiate was computed.
    """
    for call in calls * 2:
        call()
    graph = torch.cuda.CUDAGraph()
    # A peer's background threads may touch the device meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for i in range(CALLS):
            calls[i % len(calls)]()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    stop = time.monotonic() + BUSY_SECONDS
    while time.monotonic() < stop:
        graph.replay()
        torch.cuda.synchronize()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3 / CALLS


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@dataclass
class Operation:
    """One row group of the table.

    Attributes:
        name: Of the operation.
        forward_bytes: Fewest bytes of its forward.
        backward_bytes: Fewest bytes of its backward.
        inputs: Makes one set of inputs; those that require gradients take part in the backward.
        variants: Name -> function of the inputs; it returns a tensor or several.
    """

    name: str
    forward_bytes: int
    backward_bytes: int
    inputs: Callable[[], list[Tensor]]
    variants: dict[str, Callable[..., object]]


def optional(module: str, name: str) -> Callable[..., object] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def present(variants: dict[str, Callable[..., object] | None]) -> dict[str, Callable[..., object]]:
    return {name: function for name, function in variants.items() if function is not None}


# Else dynamo takes the second size that a function meets for a reason to make code for any size, which is slower.
compiled = functools.partial(torch.compile, dynamic=False)


def our_norm(x: Tensor, weight: Tensor) -> Tensor:
    return fused_rms_norm(x, weight)[0]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def norm_operation() -> Operation:
    liger = optional("liger_kernel.transformers.functional", "liger_rms_norm")
    quack = optional("quack", "rmsnorm")
    return Operation(
        f"RMSNorm [{TOKENS}, {HIDDEN}]",
        2 * 2 * TOKENS * HIDDEN,
        3 * 2 * TOKENS * HIDDEN,
        lambda: [normal(TOKENS, HIDDEN).requires_grad_(), normal(HIDDEN).requires_grad_()],
        present(
            {
                "ours": our_norm,
                "torch": torch_norm,
                "torch.compile": compiled(torch_norm),
                "liger": liger and (lambda x, weight: liger(x, weight, 1e-6, in_place=False)),
                "quack": quack and (lambda x, weight: quack(x, weight, eps=1e-6)),
            }
        ),
    )


def add_norm_operation(hidden: int = HIDDEN) -> Operation:
    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return torch_norm(total, weight), total

    liger = optional("liger_kernel.transformers.functional", "liger_fused_add_rms_norm")
    quack = optional("quack", "rmsnorm")
    return Operation(
        f"RMSNorm + residual [{TOKENS}, {hidden}]",
        4 * 2 * TOKENS * hidden,
        4 * 2 * TOKENS * hidden,
        lambda: [
            normal(TOKENS, hidden).requires_grad_(),
            normal(TOKENS, hidden).requires_grad_(),
            normal(hidden).requires_grad_(),
        ],
        present(
            {
                "ours": lambda x, residual, weight: fused_rms_norm(x, weight, residual),
                "torch": plain,
                "torch.compile": compiled(plain),
                "liger": liger and (lambda x, residual, weight: liger(x, residual, weight, 1e-6, in_place=False)),
                "quack": quack
                and (lambda x, residual, weight: quack(x, weight, residual=residual, eps=1e-6, prenorm=True)),
            }
        ),
    )


def head_norm_operation() -> Operation:
    size = TOKENS * Q_HEADS * HEAD_DIM
    return Operation(
        f"QK-norm [{TOKENS}, {Q_HEADS}, {HEAD_DIM}]",
        2 * 2 * size,
        3 * 2 * size,
        lambda: [normal(TOKENS, Q_HEADS, HEAD_DIM).requires_grad_(), normal(HEAD_DIM).requires_grad_()],
        {"ours": our_norm, "torch": torch_norm, "torch.compile": compiled(torch_norm)},
    )


def rotary_operation() -> Operation:
    cos, sin = RotaryEmbedding(HEAD_DIM, device="cuda")(torch.arange(TOKENS, device="cuda") % 4096)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    batched = optional("liger_kernel.transformers.functional", "liger_rope")

    def liger(q: Tensor, k: Tensor) -> object:
        assert batched is not None
        return batched(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])

    size = 2 * 2 * TOKENS * (Q_HEADS + K_HEADS) * HEAD_DIM + 2 * cos.nbytes // 2
    return Operation(
        f"rotary, {Q_HEADS} + {K_HEADS} heads of {HEAD_DIM}, {TOKENS} tokens",
        size,
        size,
        lambda: [normal(TOKENS, heads, HEAD_DIM).requires_grad_() for heads in (Q_HEADS, K_HEADS)],
        present(
            {
                "ours": lambda q, k: rotary.fused_rotary(q, k, cos, sin),
                "torch": plain,
                "torch.compile": compiled(plain),
                "liger": batched and liger,
            }
        ),
    )


def swiglu_operation() -> Operation:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    halves = optional("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    size = TOKENS * INTERMEDIATE
    return Operation(
        f"SwiGLU [{TOKENS}, 2 x {INTERMEDIATE}]",
        3 * 2 * size,
        5 * 2 * size,
        lambda: [normal(TOKENS, 2 * INTERMEDIATE).requires_grad_()],
        present(
            {
                "ours": swiglu.fused_swiglu,
                "torch": plain,
                "torch.compile": compiled(plain),
                "liger": halves and (lambda gate_up: halves.apply(*gate_up.chunk(2, dim=-1))),
            }
        ),
    )


class _ZeroGradient(torch.autograd.Function):
    """A look-up whose backward only writes zeros: the least time in which a dense gradient can be written."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return zeros(len(table), table.shape[1], table.dtype, table.device), None


def embedding_operation() -> Operation:
    """Look up the tokens of a table, which are as frequent as words are (Zipf's law)."""
    ids = (torch.rand(TOKENS, device="cuda", dtype=torch.float64) * math.log(VOCABULARY)).exp().long() - 1
    ids = torch.randperm(VOCABULARY, device="cuda")[ids.clamp(0, VOCABULARY - 1)]
    size = 2 * TOKENS * HIDDEN
    return Operation(
        f"embedding [{VOCABULARY}, {HIDDEN}], {TOKENS} tokens",
        2 * size,
        size + 2 * VOCABULARY * HIDDEN,
        lambda: [normal(VOCABULARY, HIDDEN).requires_grad_()],
        {
            "ours": lambda table: look_up(table, ids, ids),
            "torch": lambda table: F.embedding(ids, table),
            "torch.compile": compiled(lambda table: F.embedding(ids, table)),
            "zeros alone": lambda table: _ZeroGradient.apply(table, ids),
        },
    )


OPERATIONS = {
    "norm": norm_operation,
    "add_norm": add_norm_operation,
    "add_norm_2048": functools.partial(add_norm_operation, 2048),
    "add_norm_5120": functools.partial(add_norm_operation, 5120),
    "add_norm_8192": functools.partial(add_norm_operation, 8192),
    "head_norm": head_norm_operation,
    "rotary": rotary_operation,
    "swiglu": swiglu_operation,
    "embedding": embedding_operation,
}


@dataclass
class Row:
    operation: str
    variant: str
    forward_us: float
    forward_ratio: float
    backward_us: float
    backward_ratio: float
    note: str = ""


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def backward_call(function: Callable[..., object], inputs: list[Tensor]) -> Call:
    """One backward: gradients of all inputs, from fresh random gradients of all outputs; the graph is kept."""
    outputs = as_tuple(function(*inputs))
    gradients = [torch.randn_like(output) for output in outputs]
    return functools.partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True)


def reason(error: BaseException) -> str:
    """First lines of an error and of those that led to it: what ends a broken capture says only that it is broken."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        lines.append(f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}")
        cause = cause.__cause__ or cause.__context__
    return ", after ".join(lines)


def measure(operation: Operation, ceiling: float) -> Iterator[Row]:
    sets = [operation.inputs() for _ in range(3)]
    for name, function in operation.variants.items():
        try:
            with torch.no_grad():
                forward = median_us([functools.partial(function, *inputs) for inputs in sets])
            backward = median_us([backward_call(function, inputs) for inputs in sets])
        except Exception as error:
            yield Row(operation.name, name, float("nan"), float("nan"), float("nan"), float("nan"), reason(error))
            continue
        yield Row(
            operation.name,
            name,
            forward,
            operation.forward_bytes / (forward * 1e-6) / ceiling,
            backward,
            operation.backward_bytes / (backward * 1e-6) / ceiling,
        )


@dataclass
class Trial:
    """One launch of the sweep."""

    kernel: str
    ratio: float
    microseconds: float
    launch: str


def sweep_swiglu(ceiling: float) -> Iterator[Trial]:
    tensors = [normal(TOKENS, 2 * INTERMEDIATE) for _ in range(2)]
    size = 2 * TOKENS * INTERMEDIATE
    for swiglu.MAX_BLOCK, swiglu.NUM_WARPS in itertools.product((512, 1024, 2048, 4096, 8192), (4, 8, 16)):
        time = median_us([functools.partial(swiglu.fused_swiglu, x) for x in tensors])
        launch = f"MAX_BLOCK={swiglu.MAX_BLOCK}, NUM_WARPS={swiglu.NUM_WARPS}"
        yield Trial("swiglu forward", 3 * size / (time * 1e-6) / ceiling, time, launch)


def sweep_rotary(ceiling: float) -> Iterator[Trial]:
    operation = rotary_operation()
    cos, sin = RotaryEmbedding(HEAD_DIM, device="cuda")(torch.arange(TOKENS, device="cuda") % 4096)
    tensors = [[x.detach() for x in operation.inputs()] for _ in range(2)]
    for rotary.HEADS, rotary.NUM_WARPS in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8, 16)):
        time = median_us([functools.partial(rotary.fused_rotary, q, k, cos, sin) for q, k in tensors])
        launch = f"HEADS={rotary.HEADS}, NUM_WARPS={rotary.NUM_WARPS}"
        yield Trial("rotary", operation.forward_bytes / (time * 1e-6) / ceiling, time, launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--only", nargs="*", choices=sorted(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--sweep", action="store_true", help="time launch parameters of our kernels")
    options = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.manual_seed(0)
    torch._functorch.config.donated_buffer = False  # backwards are replayed
    measured = ceilings()
    ceiling = measured["copy_tb_per_s"] * 1e12
    print(machine(), measured, flush=True)
    if options.sweep:
        sweeps = sweep_swiglu(ceiling), sweep_rotary(ceiling)
        trials = sorted(itertools.chain(*sweeps), key=lambda trial: (trial.kernel, -trial.ratio))
        for _, group in itertools.groupby(trials, key=lambda trial: trial.kernel):
            for trial in list(group)[:8]:
                print(f"{trial.kernel}: {trial.ratio:.3f} of copy, {trial.microseconds:.1f} us, {trial.launch}")
        write_json(options.json, ceilings=measured, trials=trials)
        return
    rows: list[Row] = []
    print("| operation | variant | forward us | of copy | backward us | of copy |\n|---|---|---|---|---|---|")
    for name in options.only:
        for row in measure(OPERATIONS[name](), ceiling):
            rows.append(row)
            print(
                f"| {row.operation} | {row.variant} | {row.forward_us:.1f} | {row.forward_ratio:.2f} "
                f"| {row.backward_us:.1f} | {row.backward_ratio:.2f} |",
                flush=True,
            )
            if row.note:
                print(f"{row.variant}: {row.note}", file=sys.stderr)
    write_json(options.json, ceilings=measured, rows=rows)


if __name__ == "__main__":
    main()
