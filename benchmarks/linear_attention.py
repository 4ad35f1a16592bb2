"""Recurrences over packed sequences: our backends beside direct calls of other libraries, even and skewed packs.

    python benchmarks/linear_attention.py [--per-channel | --state-space] [--json FILE] [--rounds N] [--tiny]

The gated delta rule beside fla-core: bf16 random data in the sizes of Qwen3-Next's layer, 16 key and 32 value heads of
128; `--per-channel` has a gate for each channel of the key (Kimi's delta attention, 32 heads of both). `--state-space`:
Mamba-2 in the sizes of Nemotron-H's layer, 128 heads of 64 in 8 groups with states of 128, beside mamba_ssm, or without
it beside the plain torch of transformers, one sequence after another.

Times are medians in milliseconds of the forward, and of forward and backward, each variant once a round. A variant that
refuses a case has a dash and says why on standard error. Errors are the largest ones against fp64 over a pack of short
sequences, relative to the largest element of each tensor.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from measure import CUDA, DEVICE, kernel_packages, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor

from parallel_layers.linear_attention import available_backends, gated_delta_rule, state_space_dual

PACKS = {
    "16 x 1024": [1024] * 16,
    "4 x 4096": [4096] * 4,
    "1 x 16384": [16384],
    "skewed": [7168, 2816, 2048, 1536, 1024] + [128] * 12 + [16] * 16,
}
TINY = {"2 x 64": [64, 64], "skewed": [96, 32, 16, 1]}
NAMES = ("out", "d_q", "d_k", "d_v", "d_decay", "d_beta")
STATE_SPACE_NAMES = ("out", "d_C", "d_B", "d_x", "d_dt", "d_A", "d_D")
Rule = Callable[..., Tensor]
Draw = Callable[[Sequence[int]], tuple[list[Tensor], Tensor]]


def boundaries(lengths: Sequence[int]) -> Tensor:
    """Return `cu_seqlens`."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def arguments_of(
    lengths: Sequence[int], heads: tuple[int, int], dim: int, per_channel: bool
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, log_decay and beta, which require gradients, and the boundaries."""
    tokens, (key_heads, value_heads) = sum(lengths), heads
    sizes = [(key_heads, dim), (key_heads, dim), (value_heads, dim)]
    q, k, v = (torch.randn(tokens, *size, device=DEVICE, dtype=torch.bfloat16) for size in sizes)
    decay = torch.randn(tokens, value_heads, *[dim] * per_channel, device=DEVICE).sub(2).exp().neg()
    beta = torch.rand(tokens, value_heads, device=DEVICE, dtype=torch.bfloat16)
    return [x.requires_grad_() for x in (q, k, v, decay, beta)], boundaries(lengths)


def state_space_arguments_of(lengths: Sequence[int], sizes: tuple[int, int, int, int]) -> tuple[list[Tensor], Tensor]:
    """Return C, B, x, dt, A and D, which require gradients, and the boundaries."""
    tokens, (heads, head_dim, groups, state_size) = sum(lengths), sizes
    parts = [(groups, state_size), (groups, state_size), (heads, head_dim)]
    c, b, x = (torch.randn(tokens, *part, device=DEVICE, dtype=torch.bfloat16) for part in parts)
    steps, rates = torch.randn(tokens, heads, device=DEVICE).sub(2).exp(), -torch.rand(heads, device=DEVICE) * 8
    leaves = (c, b, x, steps, rates, torch.ones(heads, device=DEVICE))
    return [tensor.requires_grad_() for tensor in leaves], boundaries(lengths)


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


def our_state_space(backend: str, arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Return the outputs `[T, V, E]` of one of our backends."""
    c, b, x, steps, rates, skip = arguments
    return state_space_dual(x, steps, rates, b, c, bounds, D_V=skip, backend=backend)[0]


def mamba_ssm(arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Return the outputs of mamba_ssm, called as its layer does."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    c, b, x, steps, rates, skip = arguments
    tokens = torch.arange(len(x), dtype=torch.int32, device=DEVICE)
    sequences = torch.searchsorted(bounds[1:], tokens, right=True).int()
    tensors = x[None], steps[None], rates, b[None], c[None]
    return mamba_chunk_scan_combined(*tensors, chunk_size=256, D=skip, seq_idx=sequences[None])[0]


def transformers_scan(arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Return the outputs of the function of transformers, one sequence after another."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    c, b, x, steps, rates, skip = arguments
    outs = []
    for start, stop in pairwise(bounds.tolist()):
        tokens = (part[None, start:stop] for part in (x, steps))
        keys = (part[None, start:stop] for part in (b, c))
        outs.append(mamba2_chunk_scan(*tokens, rates, *keys, chunk_size=128, D=skip)[0].to(x.dtype))
    return torch.cat(outs)


def learn(rule: Rule, arguments: list[Tensor], bounds: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward, and return the outputs and the gradients."""
    out = rule(arguments, bounds)
    return out.detach(), *torch.autograd.grad(out, arguments, upstream)


def errors_of(rule: Rule, exact: Rule, draw: Draw) -> list[float]:
    """Return the relative errors of the outputs and the gradients; NaN where the rule refuses."""
    arguments, bounds = draw([130, 1, 64, 63, 65, 300, 400])
    upstream = torch.randn_like(arguments[2])
    wide = [x.detach().double().requires_grad_() for x in arguments]
    truth = learn(exact, wide, bounds, upstream.double())
    try:
        results = learn(rule, arguments, bounds, upstream)
    except ValueError:  # a backend that cannot do the case
        return [float("nan")] * len(truth)
    return [float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, truth, strict=True)]


@torch.no_grad()
def infer(rule: Rule, arguments: list[Tensor], bounds: Tensor) -> Tensor:
    """Run the forward alone."""
    return rule(arguments, bounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--per-channel", action="store_true", help="A gate for each channel.")
    kind.add_argument("--state-space", action="store_true", help="Mamba-2.")
    parser.add_argument("--rounds", type=int, default=10, help="Rounds that are counted.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    packages = kernel_packages() | {"transformers": ""}
    names, our_rule, peers = NAMES, ours, {"fla-core, called directly": ("fla", direct)}
    heads, dim = ((2, 4), 16) if args.tiny else ((32 if args.per_channel else 16, 32), 128)
    draw: Draw = partial(arguments_of, heads=heads, dim=dim, per_channel=args.per_channel)
    if args.state_space:
        draw = partial(state_space_arguments_of, sizes=(4, 16, 2, 16) if args.tiny else (128, 64, 8, 128))
        names, our_rule = STATE_SPACE_NAMES, our_state_space
        peers = {"mamba_ssm": ("mamba_ssm", mamba_ssm)}
        if "mamba_ssm" not in packages:
            peers = {"transformers": ("transformers", transformers_scan)}
    able = [name for name in available_backends() if name != ("fla" if args.state_space else "triton")]
    rules: dict[str, Rule] = {backend: partial(our_rule, backend) for backend in ("auto", *able)}
    rules |= {name: rule for name, (package, rule) in peers.items() if package in packages}
    rounds, rows, errors = (1, 1) if args.tiny else (args.rounds, 3), [], {}
    for pack, lengths in (TINY if args.tiny else PACKS).items():
        arguments, bounds = draw(lengths)
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
        errors[name] = errors_of(rule, partial(our_rule, "chunked"), draw)
    print(machine(), "on a GPU" if CUDA else "on a CPU: no figures", packages)
    print(table(("pack", "backend", "forward ms", "with backward ms", "extra GiB"), rows))
    print(
        table(("largest error", *names), [(name, *(f"{error:.1e}" for error in row)) for name, row in errors.items()])
    )
    write_json(args.json, rows=rows, errors=errors)


if __name__ == "__main__":
    main()
