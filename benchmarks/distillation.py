"""Distillation of one head from another over the whole vocabulary, forward and backward, beside its peers.

    python benchmarks/distillation.py [--shape TOKENS HIDDEN VOCABULARY] [--only NAME ...] [--json FILE] [--rounds N]

bf16 random data: a student, and a teacher near it, with logits of standard deviation 2. The row "two log-prob passes"
is `linear_log_probs` of both heads, each forward and backward: what the two heads cost without distillation. Times are
medians over rounds that run each variant once. Errors are against fp64 over the first tokens: the largest absolute
error of the divergence, and the relative norm of the error of the hidden states' gradient. Extra memory is the peak
above the inputs, also without the returned gradients, as a share of one side's bf16 logits. Peers that are not
installed are left out.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from measure import DEVICE, ceilings, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor

from parallel_layers import linear_log_probs
from parallel_layers.head import TeacherHead, TeacherTopK, linear_distillation

CHECKED_TOKENS, LISTED = 256, 20


class Problem(NamedTuple):
    """The student's and the teacher's hidden states and heads, the upstream gradient, and the teacher's log-probs."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    upstream: Tensor
    listed: TeacherTopK

    @classmethod
    def random(cls, tokens: int, hidden_size: int, vocabulary: int) -> "Problem":
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        hidden, weight = normal(tokens, hidden_size), normal(vocabulary, hidden_size) * (2 / math.sqrt(hidden_size))
        teacher_hidden, teacher_weight = hidden + 0.1 * normal(tokens, hidden_size), weight.clone()
        listed = torch.randint(vocabulary - LISTED, (tokens, 1), device=DEVICE) + torch.arange(LISTED, device=DEVICE)
        log_probs = torch.full((tokens, LISTED), math.log(0.9 / LISTED), device=DEVICE)
        return cls(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            teacher_hidden.requires_grad_(),
            teacher_weight.requires_grad_(),
            torch.rand(tokens, device=DEVICE),
            TeacherTopK(listed, log_probs),
        )


def dense(log_p: Tensor, log_q: Tensor, beta: float | None) -> Tensor:
    """The forward KL, or the Jensen-Shannon divergence of TRL's GKD trainer."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    if beta is None:
        return kl(log_p, log_q)
    mixture = torch.logsumexp(torch.stack((log_p + math.log(beta), log_q + math.log1p(-beta))), dim=0)
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def materialised(beta: float | None) -> Callable[[Problem], Tensor]:
    def run(problem: Problem) -> Tensor:
        with torch.no_grad():
            log_p = (problem.teacher_hidden @ problem.teacher_weight.T).float().log_softmax(-1)
        return dense(log_p, (problem.hidden @ problem.weight.T).float().log_softmax(-1), beta)

    return run


def ours(name: str, mixture: float | None = None) -> Callable[[Problem], Tensor]:
    def run(problem: Problem) -> Tensor:
        teacher = TeacherHead(problem.teacher_hidden, problem.teacher_weight)
        return linear_distillation(problem.hidden, problem.weight, teacher, divergence=name, mixture=mixture)

    return run


def listed(problem: Problem) -> Tensor:
    return linear_distillation(problem.hidden, problem.weight, problem.listed)


def two_passes(problem: Problem) -> Tensor:
    labels = problem.listed.ids[:, 0]
    student, teacher = (linear_log_probs(*head, labels).log_probs for head in (problem[:2], problem[2:4]))
    return student - teacher


def liger(beta: float) -> Callable[[Problem], Tensor]:
    """Liger's fused JSD of two heads; it returns the mean over the tokens, and computes gradients in the forward."""
    function = importlib.import_module("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction

    def run(problem: Problem) -> Tensor:
        loss: Tensor = function.apply(*problem[:4], None, beta, -100, 1.0)
        return loss

    return run


VARIANTS: dict[str, Callable[[], Callable[[Problem], Tensor]]] = {
    "two log-prob passes": lambda: two_passes,
    "ours: forward KL": lambda: ours("forward_kl"),
    "ours: reverse KL": lambda: ours("reverse_kl"),
    "ours: Jensen-Shannon": lambda: ours("jensen_shannon", 0.5),
    f"ours: forward KL, {LISTED} listed tokens": lambda: listed,
    "Liger fused_linear_jsd, beta 0 (scalar)": lambda: liger(0.0),
    "Liger fused_linear_jsd, beta 0.5 (scalar)": lambda: liger(0.5),
    "materialised torch: forward KL": lambda: materialised(None),
    "materialised torch: Jensen-Shannon": lambda: materialised(0.5),
}
# The truth of a variant: beta of `dense`.
CHECKED = {
    "ours: forward KL": None,
    "ours: Jensen-Shannon": 0.5,
    "materialised torch: forward KL": None,
    "materialised torch: Jensen-Shannon": 0.5,
}


@dataclass
class Row:
    """One variant."""

    name: str
    forward_ms: float = math.nan
    both_ms: float = math.nan
    extra_gib: float = math.nan
    extra_share: float = math.nan
    error: float = math.nan
    gradient_error: float = math.nan


def backward(run: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, list[Tensor]]:
    value = run(problem)
    upstream = problem.upstream if value.ndim else None
    gradients = torch.autograd.grad(value, problem[:4], upstream, allow_unused=True)
    return value.detach(), [gradient for gradient in gradients if gradient is not None]


def measure_memory_and_errors(row: Row, run: Callable[[Problem], Tensor], problem: Problem) -> None:
    row.extra_gib = peak_gib(lambda: backward(run, problem))
    value, gradients = backward(run, problem)
    returned = sum(gradient.nbytes for gradient in gradients) / 2**30
    row.extra_share = (row.extra_gib - returned) / (2 * len(problem.hidden) * len(problem.weight) / 2**30)
    if row.name not in CHECKED:
        return
    first = slice(CHECKED_TOKENS)
    hidden = problem.hidden.detach()[first].double().requires_grad_()
    log_p = (problem.teacher_hidden.detach()[first].double() @ problem.teacher_weight.detach().double().T).log_softmax(
        -1
    )
    truth = dense(log_p, (hidden @ problem.weight.detach().double().T).log_softmax(-1), CHECKED[row.name])
    (gradient,) = torch.autograd.grad(truth, hidden, problem.upstream[first].double())
    row.error = (value[first].double() - truth.detach()).abs().max().item()
    row.gradient_error = ((gradients[0][first].double() - gradient).norm() / gradient.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=(8192, 4096, 128256), metavar=("T", "H", "V"))
    parser.add_argument("--tiny", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write every figure to this file")
    options = parser.parse_args()
    shape = (64, 32, 500) if options.tiny else tuple(options.shape)
    problem, rows, runs = Problem.random(*shape), [], {}
    print(machine(), measured := ceilings(), flush=True)
    for name in options.only or VARIANTS:
        row = Row(name)
        try:
            run = VARIANTS[name]()
            measure_memory_and_errors(row, run, problem)
        except ImportError:
            continue
        except RuntimeError as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        runs[name] = run
    forward = side_by_side({name: lambda run=run: run(problem) for name, run in runs.items()}, rounds=options.rounds)
    both = side_by_side(
        {name: lambda run=run: backward(run, problem) for name, run in runs.items()}, rounds=options.rounds
    )
    for row in rows:
        row.forward_ms, row.both_ms = forward[row.name].median, both[row.name].median
    heads = [f"tokens, hidden, vocabulary: {', '.join(map(str, shape))}", "forward ms", "forward and backward ms"]
    heads += ["extra GiB", "beyond gradients, share of bf16 logits", "error", "dX error"]
    print("\n" + table(heads, [list(asdict(row).values()) for row in rows]), flush=True)
    write_json(options.json, ceilings=measured, shape=shape, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
