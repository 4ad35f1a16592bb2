"""Recurrences over context-parallel ranks: heads by all-to-all, and states handed over.

    torchrun --nproc-per-node CP benchmarks/linear_attention_cp.py [--state-space] [--json FILE]

The operators, data and sizes of `linear_attention.py`, with 32768 tokens in a pack that is divided over the ranks. The
first row is the same recurrence over the whole pack on every device: the ideal for CP ranks is its time over CP.

Times are medians in milliseconds of the slowest rank, forward, and forward and backward. Errors are the largest ones
against fp64 over a pack of short sequences, of the worst rank, relative to the largest element of each tensor.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from linear_attention import (
    NAMES,
    STATE_SPACE_NAMES,
    Draw,
    arguments_of,
    learn,
    our_state_space,
    ours,
    state_space_arguments_of,
)
from measure import CUDA, join_ranks, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention import Layout, split_sequence
from parallel_layers.linear_attention import (
    context_parallel_delta_rule,
    context_parallel_state_space,
    ulysses_delta_rule,
    ulysses_state_space,
)

PACKS = {"1 x 32768": [32768], "skewed": [14336, 5632, 4096, 3072, 2048] + [256] * 12 + [32] * 16}
TINY = {"skewed": [95, 32, 16, 1]}
SHORT = [130, 1, 64, 63, 65, 300, 401]
ONE_DEVICE = "one device"
# Arguments of this rank and the boundaries of the whole pack -> the outputs.
Operator = Callable[[list[Tensor], Tensor], Tensor]
# The name of a form -> the layout of its tokens, and the operator.
Forms = dict[str, tuple[Layout, Operator]]


def delta_rule(operator: Callable[..., Any], arguments: list[Tensor], bounds: Tensor, **options: Any) -> Tensor:
    """Return the outputs of a form of the gated delta rule."""
    return operator(*arguments, bounds, normalize=True, **options)[0]


def state_space(operator: Callable[..., Any], arguments: list[Tensor], bounds: Tensor, **options: Any) -> Tensor:
    """Return the outputs of a form of Mamba-2."""
    c, b, x, steps, rates, skip = arguments
    return operator(x, steps, rates, b, c, bounds, D_V=skip, **options)[0]


def forms_of(group: ProcessGroup, mamba: bool) -> Forms:
    """Return the forms of a recurrence."""
    rule, exchanged, handed_over = (
        (state_space, ulysses_state_space, context_parallel_state_space)
        if mamba
        else (delta_rule, ulysses_delta_rule, context_parallel_delta_rule)
    )
    forms: Forms = {"heads by all-to-all": ("contiguous", partial(rule, exchanged, group=group))}
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag")
    for layout in layouts:
        forms[f"states, {layout}"] = (layout, partial(rule, handed_over, group=group, layout=layout))
    return forms


def local_parts(arguments: list[Tensor], group: ProcessGroup, layout: Layout) -> list[Tensor]:
    """Return this rank's tokens of the arguments, and A and D whole, as leaves."""
    tokens = len(arguments[0])
    parts = [split_sequence(x, group, layout=layout) if len(x) == tokens else x for x in arguments]
    return [part.detach().clone().requires_grad_() for part in parts]


def errors_of(operator: Operator, exact: Operator, draw: Draw, group: ProcessGroup, layout: Layout) -> list[float]:
    """Return the relative errors of the outputs and the gradients, of the worst rank."""
    arguments, bounds = draw(SHORT)
    upstream = torch.randn_like(arguments[2])
    truth = learn(exact, [x.detach().double().requires_grad_() for x in arguments], bounds, upstream.double())
    results = learn(
        operator, local_parts(arguments, group, layout), bounds, split_sequence(upstream, group, layout=layout)
    )
    errors = []
    for result, whole in zip(results, truth, strict=True):
        divided = len(whole) == sum(SHORT)
        expected = split_sequence(whole, group, layout=layout) if divided else whole
        if not divided:  # a gradient of A or D
            dist.all_reduce(result)
        errors.append((result - expected).abs().max().double() / whole.abs().max())
    worst = torch.stack(errors)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


@torch.no_grad()
def infer(operator: Operator, arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Run the forward alone."""
    return operator(arguments, bounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-space", action="store_true", help="Mamba-2.")
    parser.add_argument("--rounds", type=int, default=10, help="Rounds that are counted.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    rank, world = join_ranks()
    if world == 1:
        raise SystemExit("start it by torchrun with at least two ranks")
    group = dist.group.WORLD
    assert group is not None
    forms, one_device = forms_of(group, args.state_space), our_state_space if args.state_space else ours
    if args.state_space:
        draw: Draw = partial(state_space_arguments_of, sizes=(4, 16, 2, 16) if args.tiny else (128, 64, 8, 128))
    else:
        heads, dim = ((2, 4), 16) if args.tiny else ((16, 32), 128)
        draw = partial(arguments_of, heads=heads, dim=dim, per_channel=False)
    rounds, warm_up = (1, 1) if args.tiny else (args.rounds, 3)
    rows, errors = [], {}
    for pack, lengths in (TINY if args.tiny else PACKS).items():
        torch.manual_seed(0)
        arguments, bounds = draw(lengths)
        upstream = torch.randn_like(arguments[2])
        calls: dict[str, tuple[Operator, list[Tensor], Tensor]] = {
            ONE_DEVICE: (partial(one_device, "auto"), arguments, upstream)
        }
        for name, (layout, operator) in forms.items():
            parts = local_parts(arguments, group, layout), split_sequence(upstream, group, layout=layout)
            calls[name] = (operator, *parts)
        how: dict[str, Any] = {"rounds": rounds, "warm_up": warm_up}
        forward = side_by_side(
            {n: partial(infer, call, leaves, bounds) for n, (call, leaves, _) in calls.items()}, **how
        )
        whole = {n: partial(learn, call, leaves, bounds, seed) for n, (call, leaves, seed) in calls.items()}
        both = side_by_side(whole, **how)
        for name, call in whole.items():
            rows.append((pack, name, forward[name].median, both[name].median, peak_gib(call)))
            if rank == 0:
                print(*rows[-1], flush=True)
    for name, (layout, operator) in forms.items():
        torch.manual_seed(0)
        errors[name] = errors_of(operator, partial(one_device, "chunked"), draw, group, layout)
    if rank == 0:
        names = STATE_SPACE_NAMES if args.state_space else NAMES
        print(machine(), f"on {world} GPUs" if CUDA else "on a CPU: no figures")
        print(table(("pack", "form", "forward ms", "with backward ms", "extra GiB"), rows))
        print(table(("largest error", *names), [(n, *(f"{e:.1e}" for e in row)) for n, row in errors.items()]))
        write_json(args.json, rows=rows, errors=errors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
