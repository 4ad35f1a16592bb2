"""The gated delta rule over packed sequences: our backends beside direct calls of fla-core, even and skewed packs.

    python benchmarks/linear_attention.py [--per-channel] [--json FILE] [--rounds N] [--tiny]

bf16 random data in the sizes of Qwen3-Next's layer: 16 key and 32 value heads of 128; `--per-channel` has a gate for
each channel of the key (Kimi's delta attention, 32 heads of both). Times are medians in milliseconds of the forward,
and of forward and backward, each variant once a round. A variant that refuses a case has a dash and says why on
standard error. Errors are the largest ones against fp64 over a pack of short sequences, relative to the largest element
of each tensor.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from measure import CUDA, DEVICE, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor

from parallel_layers.linear_attention import available_backends, gated_delta_rule

PACKS = {
    "16 x 1024": [1024] * 16,
    "4 x 4096": [4096] * 4,
    "1 x 16384": [16384],
    "skewed": [7168, 2816, 2048, 1536, 1024] + [128] * 12 + [16] * 16,
}
TINY = {"2 x 64": [64, 64], "skewed": [96, 32, 16, 1]}
NAMES = ("out", "d_q", "d_k", "d_v", "d_decay", "d_beta")
Rule = Callable[..., Tensor]


def arguments_of(
    lengths: Sequence[int], heads: tuple[int, int], dim: int, per_channel: bool
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, log_decay and beta, which require gradients, and the boundaries."""
    tokens, (key_heads, value_heads) = sum(lengths), heads
    sizes = [(key_heads, dim), (key_heads, dim), (value_heads, dim)]
    q, k, v = (torch.randn(tokens, *size, device=DEVICE, dtype=torch.bfloat16) for size in sizes)
    decay = torch.randn(tokens, value_heads, *[dim] * per_channel, device=DEVICE).sub(2).exp().neg()
    beta = torch.rand(tokens, value_heads, device=DEVICE, dtype=torch.bfloat16)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    return [x.requires_grad_() for x in (q, k, v, decay, beta)], bounds


def ours(backend: str, arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Return the outputs `[T, V, E]` of one of our backends."""
    return gated_delta_rule(*arguments, bounds, normalize=True, backend=backend)[0]


def direct(arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Return the outputs of fla-core, called as its documentation says."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    rule = chunk_kda if arguments[3].dim() == 3 else chunk_gated_delta_rule
    out, _ = rule(*(x[None] for x in arguments), cu_seqlens=bounds.long(), use_qk_l2norm_in_kernel=True)
    return out[0]


def learn(rule: Rule, arguments: list[Tensor], bounds: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward, and return the outputs and the gradients."""
    out = rule(arguments, bounds)
    return out.detach(), *torch.autograd.grad(out, arguments, upstream)


def errors_of(rule: Rule, heads: tuple[int, int], dim: int, per_channel: bool) -> list[float]:
    """Return the relative errors of the outputs and the gradients; NaN where the rule refuses."""
    arguments, bounds = arguments_of([130, 1, 64, 63, 65, 300, 400], heads, dim, per_channel)
    upstream = torch.randn_like(arguments[2])
    wide = [x.detach().double().requires_grad_() for x in arguments]
    truth = learn(partial(ours, "chunked"), wide, bounds, upstream.double())
    try:
        results = learn(rule, arguments, bounds, upstream)
    except ValueError:  # a backend that cannot do the case
        return [float("nan")] * len(NAMES)
    return [float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, truth, strict=True)]


@torch.no_grad()
def infer(rule: Rule, arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Run the forward alone."""
    return rule(arguments, bounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-channel", action="store_true", help="A gate for each channel.")
    parser.add_argument("--rounds", type=int, default=10, help="Rounds that are counted.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    heads, dim = ((2, 4), 16) if args.tiny else ((32 if args.per_channel else 16, 32), 128)
    rules: dict[str, Rule] = {backend: partial(ours, backend) for backend in ("auto", *available_backends())}
    if "fla" in rules:
        rules["fla-core, called directly"] = direct
    rounds, rows, errors = (1, 1) if args.tiny else (args.rounds, 3), [], {}
    for pack, lengths in (TINY if args.tiny else PACKS).items():
        arguments, bounds = arguments_of(lengths, heads, dim, args.per_channel)
        upstream = torch.randn_like(arguments[2])
        how: dict[str, Any] = {"rounds": rounds[0], "warm_up": rounds[1]}
        forward = side_by_side({name: partial(infer, rule, arguments, bounds) for name, rule in rules.items()}, **how)
        whole = {name: partial(learn, rule, arguments, bounds, upstream) for name, rule in rules.items()}
        both = side_by_side(whole, **how)
        for name in rules:
            gib = float("nan") if both[name].failed else peak_gib(whole[name])
            rows.append((pack, name, forward[name].median, both[name].median, gib))
            print(*rows[-1], flush=True)  # fla-core tunes its kernels for minutes at their first calls
    for name, rule in rules.items():
        errors[name] = errors_of(rule, heads, dim, args.per_channel)
    print(machine(), "on a GPU" if CUDA else "on a CPU: no figures")
    print(table(("pack", "backend", "forward ms", "with backward ms", "extra GiB"), rows))
    print(
        table(("largest error", *NAMES), [(name, *(f"{error:.1e}" for error in row)) for name, row in errors.items()])
    )
    write_json(args.json, rows=rows, errors=errors)


if __name__ == "__main__":
    main()
