"""Packed causal attention: our backends beside direct calls of the same kernels, uniform and skewed packs.

    python benchmarks/attention.py [--latent] [--json FILE] [--rounds N] [--tiny]

bf16 random data, 32 query and 8 key-value heads of 128; --latent: 32 heads with keys of 192 and values of 128. A rate
counts half of a full square's products, forward 2 D + 2 D' and backward 6 D + 4 D' for each query head, query and key
(D of a key, D' of a value). Every round runs each variant once. Two ratios follow: what
`backend="auto"` costs beside a direct call of the kernel that it chooses, and what a skewed pack costs for each FLOP
beside a uniform one. Errors are the largest absolute ones against the fp32 reference on one pack of short segments.
"""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from measure import CUDA, DEVICE, Timing, ceilings, machine, side_by_side, table, write_json
from torch import Tensor

from parallel_layers import packed_attention
from parallel_layers.attention import available_backends

UNIFORM = {"16 x 1024": [1024] * 16, "4 x 4096": [4096] * 4, "1 x 16384": [16384]}
# As many FLOPs as 4 x 4096: one long segment, a few middling ones, many short ones.
SKEWED = {"skewed": [7168, 2816, 2048, 1536, 1024] + [512] * 6 + [128] * 16}
TINY = {"2 x 64": [64, 64], "skewed": [96, 32, 16, 1]}
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@dataclass
class Pack:
    """Inputs that require gradients, an upstream gradient, and the segments."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    cu_seqlens: Tensor
    lengths: list[int]

    @classmethod
    def random(cls, lengths: list[int], heads: int, kv_heads: int, head_dim: int, value_dim: int) -> "Pack":
        def normal(count: int, size: int) -> Tensor:
            return torch.randn(sum(lengths), count, size, device=DEVICE, dtype=torch.bfloat16)

        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
        q, k, v = (normal(*shape).requires_grad_() for shape in shapes)
        return cls(q, k, v, normal(heads, value_dim), bounds, lengths)

    def flops(self) -> tuple[float, float]:
        """Return the FLOPs over the causal half of each segment's square, forward (two GEMMs) and backward (five)."""
        of_keys, of_values = self.q.shape[2], self.v.shape[2]
        pairs = self.q.shape[1] * sum(length**2 for length in self.lengths)
        return pairs * (of_keys + of_values), pairs * (3 * of_keys + 2 * of_values)

    def forward(self, attention: Attention) -> Tensor:
        return attention(self.q, self.k, self.v, self.cu_seqlens, max(self.lengths))

    def both(self, attention: Attention) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(attention), (self.q, self.k, self.v), self.upstream)


def direct_flash_attn_4() -> Attention:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        out = function(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )
        return out[0] if isinstance(out, tuple) else out

    return attention


def direct_flash_attn() -> Attention:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func
    return lambda q, k, v, bounds, longest: function(q, k, v, bounds, bounds, longest, longest, causal=True)


def direct_varlen() -> Attention:
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        # It shares no key-value heads before torch 2.12.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return function(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))

    return attention


OF_TWO_SIZES = {"direct: flash-attn-4"}
DIRECT = {"flash-attn-4": direct_flash_attn_4, "flash-attn": direct_flash_attn, "varlen": direct_varlen}


def variants() -> dict[str, Attention]:
    found: dict[str, Attention] = {"ours: auto": partial(packed_attention, backend="auto")}
    usable = [name for name in available_backends() if CUDA or name in ("sdpa", "reference")]
    for name in usable:
        if name not in ("reference", "exact") or not CUDA:  # they are to be right, not fast
            found[f"ours: {name}"] = partial(packed_attention, backend=name)
        if name in DIRECT:
            found[f"direct: {name}"] = DIRECT[name]()
    return found


def errors(attentions: dict[str, Attention], head_dim: int, value_dim: int) -> list[list[object]]:
    """Largest absolute errors of the output and the three gradients, on segments that divide nothing."""
    pack = Pack.random([1, 2, 37, 129, 300], 8, 2 if head_dim == value_dim else 8, head_dim, value_dim)
    exact = Pack(*(x.detach().float().requires_grad_() for x in (pack.q, pack.k, pack.v)), pack.upstream.float(),
                 pack.cu_seqlens, pack.lengths)  # fmt: skip
    reference = partial(packed_attention, backend="reference")
    truth = (exact.forward(reference).detach(), *exact.both(reference))
    rows: list[list[object]] = []
    for name, attention in attentions.items():
        found = (pack.forward(attention).detach(), *pack.both(attention))
        rows.append([name, *(float((a.float() - b).abs().max()) for a, b in zip(found, truth, strict=True))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", action="store_true", help="keys of 192 and values of 128")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    measured = ceilings()
    print(machine(), measured, flush=True)
    attentions = variants()
    heads, kv_heads, *sizes = (4, 2, 16, 16) if options.tiny else (32, 8, 128, 128)
    if options.latent:
        kv_heads, sizes = heads, [24, 16] if options.tiny else [192, 128]
        # The others take equal sizes alone.
        attentions = {name: call for name, call in attentions.items() if name in OF_TWO_SIZES or "ours" in name}
    checked = errors(attentions, *sizes)
    print(table(["variant", "out error", "dq error", "dk error", "dv error"], checked), flush=True)
    shapes = TINY if options.tiny else UNIFORM | SKEWED
    per_flop: dict[tuple[str, str], float] = {}
    rows: list[list[object]] = []
    results: dict[str, dict[str, list[Timing]]] = {}
    for shape, lengths in shapes.items():
        pack = Pack.random(lengths, heads, kv_heads, *sizes)
        flops, backward_flops = pack.flops()
        with torch.no_grad():
            forward = side_by_side({n: partial(pack.forward, a) for n, a in attentions.items()}, rounds=options.rounds)
        both = side_by_side({n: partial(pack.both, a) for n, a in attentions.items()}, rounds=options.rounds)
        results[shape] = {"forward": list(forward.values()), "both": list(both.values())}
        for name in attentions:
            backward = both[name].median - forward[name].median
            per_flop[shape, name] = both[name].median / flops
            rates = flops / forward[name].median * 1e-9, backward_flops / backward * 1e-9
            rows.append([shape, name, forward[name].median, both[name].median, *rates])
    print(table(["pack", "variant", "fwd ms", "fwd+bwd ms", "fwd TFLOP/s", "bwd TFLOP/s"], rows))
    best = next((name for name in attentions if name.startswith("direct: ")), None)
    uniform = "2 x 64" if options.tiny else "4 x 4096"
    ratios: list[list[object]] = [
        [
            "skewed / uniform, each FLOP",
            "ours: auto",
            per_flop["skewed", "ours: auto"] / per_flop[uniform, "ours: auto"],
        ]
    ]
    if best is not None:
        for shape in shapes:
            ratios.append([f"auto / direct, {shape}", best, per_flop[shape, "ours: auto"] / per_flop[shape, best]])
    print(table(["ratio", "variant", "fwd+bwd"], ratios))
    write_json(options.json, ceilings=measured, errors=checked, results=results, ratios=ratios)


if __name__ == "__main__":
    main()
