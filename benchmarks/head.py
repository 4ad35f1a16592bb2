"""The language-model head: hidden states to log-probs and entropies, forward and backward, beside its peers.

    python benchmarks/head.py [--shape TOKENS HIDDEN VOCABULARY ...] [--json FILE] [--only NAME ...] [--rounds N]

bf16 random data, logits of standard deviation 2. Every round runs each variant once, so that a clock that drifts drifts
for all; a time is the median over the rounds of CUDA-event times. The ceilings are measured first. Errors are against
fp64 over the first tokens: the largest absolute one of log-prob and entropy, the relative norm of the hidden states'
gradient. Extra memory is the peak above the inputs over a forward and backward, the returned gradients included, and
also without them, as a share of the bf16 logits. Sampling masks have random ids: 50 for each token as of top-k, a
random number with a mean of 400 as of top-p, or half of the vocabulary. Peers that are not installed are left out.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import math
import statistics
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from measure import ceilings, machine, milliseconds, table, write_json
from torch import Tensor

from parallel_layers import linear_log_probs
from parallel_layers.head import SamplingMask, linear_token_statistics

SHAPES = [(8192, 4096, 128256), (16384, 4096, 151936), (8192, 2560, 151936), (8192, 2048, 262144), (8192, 8192, 262144)]
CHECKED_TOKENS = 512
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass
class Problem:
    """Inputs, upstream gradients, and the truth for the first tokens."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor

    @classmethod
    def random(cls, tokens: int, hidden: int, vocabulary: int) -> "Problem":
        weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) * (2 / math.sqrt(hidden))
        return cls(
            torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_(),
            weight.requires_grad_(),
            torch.randint(vocabulary, (tokens,), device="cuda"),
            torch.randn(tokens, device="cuda"),
            torch.randn(tokens, device="cuda"),
        )

    def truth(self, mask: SamplingMask | None, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and gradient of the hidden states of the first tokens, in fp64."""
        first = slice(CHECKED_TOKENS)
        hidden = self.hidden.detach()[first].double().requires_grad_()
        logits = hidden @ self.weight.detach().double().T
        if mask is not None:
            logits = logits.masked_fill(~mask.tile(first, slice(0, len(self.weight))), -1e9)
        log_softmax = torch.log_softmax(logits, -1)
        log_probs = log_softmax.gather(-1, self.labels[first, None])[:, 0]
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        outputs, upstream = [log_probs], [self.grad_log_probs[first].double()]
        if entropy:
            outputs, upstream = [*outputs, entropies], [*upstream, self.grad_entropy[first].double()]
        (gradient,) = torch.autograd.grad(outputs, hidden, upstream)
        return log_probs.detach(), entropies.detach(), gradient


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    return linear_log_probs(hidden, weight, labels)


def ours_keeping(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    return linear_log_probs(hidden, weight, labels, keep_probabilities=True)


@dataclass
class Masked:
    """Log-probs over sampling masks with `mean` ids a token: all rows have as many, or a random number."""

    mean: int
    ragged: bool = False
    masks: dict[int, SamplingMask] = field(default_factory=dict)

    def mask(self, labels: Tensor, vocabulary: int) -> SamplingMask:
        """The mask of these labels, each the first id of its row."""
        if labels.data_ptr() not in self.masks:
            counts = torch.full_like(labels, self.mean)
            if self.ragged:
                counts = torch.empty_like(labels, dtype=torch.float32).exponential_(1 / self.mean).long() + 1
            offsets = torch.cat([counts.new_zeros(1), counts.clamp(max=vocabulary).cumsum(0)])
            ids = torch.randint(vocabulary, (int(offsets[-1]),), device=labels.device, dtype=torch.int32)
            ids[offsets[:-1]] = labels.int()
            self.masks = {labels.data_ptr(): SamplingMask(ids, offsets)}
        return self.masks[labels.data_ptr()]

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_log_probs(hidden, weight, labels, sampling_mask=self.mask(labels, len(weight)))


def listing(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    statistics = linear_token_statistics(hidden, weight, labels, top_n=20)
    return statistics.log_probs, statistics.entropy


def without_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    return linear_log_probs(hidden, weight, labels, entropy=False)


def materialised(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    log_softmax = torch.log_softmax((hidden @ weight.T).float(), -1)
    return log_softmax.gather(-1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def verl() -> Forward:
    """verl's kernel package alone: the rest of verl would import half a training system."""
    root = importlib.util.find_spec("verl")
    if root is None or not root.submodule_search_locations:
        raise ImportError("verl")
    folder = root.submodule_search_locations[0]
    for name, path in (
        ("verl", folder),
        ("verl.utils", f"{folder}/utils"),
        ("verl.utils.kernel", f"{folder}/utils/kernel"),
    ):
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    device = types.ModuleType("verl.utils.device")
    device.__dict__.update(
        is_cuda_available=True,
        get_device_capability=torch.cuda.get_device_capability,
        get_device_name=lambda: "cuda",
        get_torch_device=lambda: torch.cuda,
    )
    sys.modules["verl.utils.device"] = device
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: function(hidden, weight, labels, 1.0, "none")


def liger_scaled() -> Forward:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    importlib.import_module("cutlass.cute")  # without it this is another, slower implementation

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs = module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, labels, 1.0, -100, 1, True)
        return -outputs[0], outputs[1]

    return forward


def liger_loss() -> Forward:
    function = importlib.import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = function.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum")
        return -(loss[0] if isinstance(loss, tuple) else loss), None

    return forward


def cut_cross_entropy() -> Forward:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: (-function(hidden, weight, labels, reduction="none"), None)


VARIANTS: dict[str, Callable[[], Forward]] = {
    "ours: linear_log_probs": lambda: ours,
    "ours: keep_probabilities=True": lambda: ours_keeping,
    "ours: entropy=False": lambda: without_entropy,
    "ours: ranks and 20 most likely tokens": lambda: listing,
    "ours: sampling mask of 50": lambda: Masked(50),
    "ours: sampling mask of 400 on average": lambda: Masked(400, ragged=True),
    "ours: sampling mask of 64000": lambda: Masked(64000),
    "Liger fused_linear_scaled_cross_entropy": liger_scaled,
    "verl linear_cross_entropy": verl,
    "cut-cross-entropy (no entropy)": cut_cross_entropy,
    "Liger fused_linear_cross_entropy (scalar loss)": liger_loss,
    "materialised torch": lambda: materialised,
}


@dataclass
class Row:
    """One variant at one shape."""

    name: str
    forward_ms: list[float] = field(default_factory=list)
    both_ms: list[float] = field(default_factory=list)
    extra_gib: float = 0.0
    extra_share: float = 0.0
    log_prob_error: float | None = None
    entropy_error: float | None = None
    grad_hidden_error: float | None = None

    def medians(self) -> tuple[float, float]:
        return statistics.median(self.forward_ms), statistics.median(self.both_ms or [math.nan])


def backward(outputs: tuple[Tensor, Tensor | None], problem: Problem) -> list[Tensor]:
    pairs = [(outputs[0], problem.grad_log_probs), (outputs[1], problem.grad_entropy)]
    used = [(output, gradient if output.ndim else None) for output, gradient in pairs if output is not None]
    return list(
        torch.autograd.grad(
            [output for output, _ in used],
            (problem.hidden, problem.weight),
            [None if gradient is None else gradient.to(output.dtype) for output, gradient in used],
        )
    )


def one_round(row: Row, forward: Forward, problem: Problem) -> None:
    """Time a forward alone, then a forward and backward."""
    inputs = (problem.hidden, problem.weight, problem.labels)
    row.forward_ms.append(milliseconds(lambda: forward(*inputs)))
    if forward is not listing:  # which has no gradient
        row.both_ms.append(milliseconds(lambda: backward(forward(*inputs), problem)))


def measure_memory_and_errors(row: Row, forward: Forward, problem: Problem) -> None:
    if isinstance(forward, Masked):
        forward.mask(problem.labels, len(problem.weight))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = forward(problem.hidden, problem.weight, problem.labels)
    gradients = [] if forward is listing else backward(outputs, problem)
    extra = torch.cuda.max_memory_allocated() - before
    row.extra_gib = extra / 2**30
    returned = sum(gradient.nbytes for gradient in gradients)
    row.extra_share = (extra - returned) / (2 * len(problem.hidden) * len(problem.weight))
    log_probs, entropy = outputs
    if not log_probs.ndim:
        return
    mask = forward.mask(problem.labels, len(problem.weight)) if isinstance(forward, Masked) else None
    truth = problem.truth(mask, entropy=entropy is not None and forward is not listing)
    first = slice(CHECKED_TOKENS)
    row.log_prob_error = (log_probs[first].double() - truth[0]).abs().max().item()
    if entropy is not None:
        row.entropy_error = (entropy[first].double() - truth[1]).abs().max().item()
    if gradients:
        row.grad_hidden_error = ((gradients[0][first].double() - truth[2]).norm() / truth[2].norm()).item()


def measure(shape: tuple[int, int, int], forwards: dict[str, Forward], rounds: int) -> list[Row]:
    problem = Problem.random(*shape)
    rows = []
    for name, forward in forwards.items():
        row = Row(name)
        try:
            for _ in range(2):  # compiles and tunes
                one_round(row, forward, problem)
            measure_memory_and_errors(row, forward, problem)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
            continue
        row.forward_ms, row.both_ms = [], []
        rows.append(row)
    for _ in range(rounds):
        for row in rows:
            one_round(row, forwards[row.name], problem)
    return rows


def markdown(shape: tuple[int, int, int], rows: list[Row], tflops: float) -> str:
    """The table of performance figures, the four products at the measured ceiling first."""
    product = 2 * math.prod(shape) / tflops * 1e-9
    heads = [f"tokens, hidden, vocabulary: {', '.join(map(str, shape))}", "fwd ms", "fwd+bwd ms", "extra GiB"]
    heads += ["beyond gradients, share of bf16 logits", "log-prob error", "entropy error", "dX error"]
    ceiling = [f"products at the measured ceiling ({tflops:.0f} TFLOP/s)", product, 4 * product, "", "", "", "", ""]
    body: list[list[object]] = [ceiling]
    for row in rows:
        errors = (row.log_prob_error, row.entropy_error, row.grad_hidden_error)
        numbers = ("" if error is None else f"{error:.5f}" for error in errors)
        body.append([row.name, *row.medians(), row.extra_gib, f"{row.extra_share:.1%}", *numbers])
    return table(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("TOKENS", "HIDDEN", "VOCABULARY"))
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="also write every figure to this file")
    options = parser.parse_args()
    forwards: dict[str, Forward] = {}
    for name in options.only or VARIANTS:
        with contextlib.suppress(ImportError):
            forwards[name] = VARIANTS[name]()
    measured = ceilings()
    print(machine(), measured, flush=True)
    results = []
    for shape in options.shape or SHAPES:
        rows = measure(tuple(shape), forwards, options.rounds)
        print("\n" + markdown(tuple(shape), rows, measured["product_tflops"]), flush=True)
        results.append({"shape": shape, "rows": [asdict(row) for row in rows]})
        torch.cuda.empty_cache()
    write_json(options.json, ceilings=measured, results=results)


if __name__ == "__main__":
    main()
