"""Every option of a decoder layer against its formula in plain torch, with all gradients, at tp 1 and 2.

The families' layers against transformers are in `test_parity`; here an option stands alone.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_families import HIDDEN, LLAMA
from decoder_grids import run_ours, shard
from torch import Tensor
from torch.nn.functional import linear, silu

from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.moe import ClampedSwiGLU, MoEConfig
from parallel_layers.testing import RankPool

LENGTHS = [7, 1, 12]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
SCALE_OF_POSITIONS = 1 + 0.5 * (1 + POSITIONS // 4).double().log()
MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=20, normalize_top_k=False)
CLAMPED = ClampedSwiGLU(alpha=1.3, limit=0.5)
ALTERNATING = {"input_major_experts": True, "alternating_gate_up": True}
# By the option's name: the config, and the number of rotated dims of a head; 0: no rotation.
OPTIONS: dict[str, tuple[DecoderConfig, int]] = {
    "sinks": (replace(LLAMA, attention_sinks=True), 8),
    "window": (replace(LLAMA, window=3), 8),
    "softcap": (replace(LLAMA, attention_softcap=0.5), 8),
    "scale of scores": (replace(LLAMA, attention_scale=0.9), 8),
    "scale of positions": (LLAMA, 8),
    "norms of heads": (replace(LLAMA, qk_norm="head", norm_unit_offset=True), 8),
    "norm of all heads": (replace(LLAMA, qk_norm="full"), 8),
    "partial rotation": (LLAMA, 4),
    "partial rotation of neighbours": (replace(LLAMA, rotary_interleaved=True), 4),
    "no rotation": (LLAMA, 0),
    "residual multiplier": (replace(LLAMA, residual_multiplier=0.7), 8),
    "norms behind": (replace(LLAMA, norm_placement="post", residual_multiplier=0.7), 8),
    "norms around": (replace(LLAMA, norm_placement="sandwich", norm_unit_offset=True), 8),
    "layer norm before both": (replace(LLAMA, norm_placement="parallel", normalization="layer"), 8),
    "biases": (replace(LLAMA, attention_bias=True, output_bias=True, mlp_bias=True), 8),
    "best score of a group": (replace(LLAMA, moe=replace(MOE, num_groups=4, top_k_groups=2, group_score="max")), 8),
    "input-major experts": (replace(LLAMA, moe=replace(MOE, input_major_experts=True)), 8),
    "alternating clamped experts": (
        replace(LLAMA, moe=replace(MOE, router_bias=True, expert_bias=True, activation=CLAMPED, **ALTERNATING)),
        8,
    ),
}


def rotated(x: Tensor, dims: int, interleaved: bool) -> Tensor:
    """Turn pair i of the first `dims` of `[T, heads, D]` by position · 10000^(-2 i / dims)."""
    angle = POSITIONS[:, None, None] * 10000.0 ** (-torch.arange(0, dims, 2).double() / dims)
    turned, rest = x[..., :dims], x[..., dims:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    together = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((together, rest), -1)


def normed(x: Tensor, weight: Tensor, config: DecoderConfig, kind: str = "rms") -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * (weight + config.norm_unit_offset)


def attention(config: DecoderConfig, w: dict[str, Tensor], x: Tensor, dims: int, positions: bool) -> Tensor:
    q, k, v = (linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")) for name in "qkv")
    if config.qk_norm == "full":
        q, k = normed(q, w["q_norm.weight"], config), normed(k, w["k_norm.weight"], config)
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in (q, k, v))
    if config.qk_norm == "head":
        q, k = normed(q, w["q_norm.weight"], config), normed(k, w["k_norm.weight"], config)
    if dims:
        q, k = (rotated(part, dims, config.rotary_interleaved) for part in (q, k))
    q = q * SCALE_OF_POSITIONS[:, None, None] if positions else q
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    k, v = (part.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for part in (k, v))
    scores = torch.einsum("tqd,sqd->qts", q, k) * scale
    cap = config.attention_softcap
    scores = scores if cap is None else cap * (scores / cap).tanh()
    sequence, index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)), torch.arange(len(x))
    distance = index[:, None] - index
    seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (config.window or len(x)))
    weights = torch.where(seen, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    total = total + w["sinks"].exp()[:, None, None] if config.attention_sinks else total
    out = torch.einsum("qts,sqd->tqd", weights / total, v).flatten(1)
    return linear(out, w["o_proj.weight"], w.get("o_proj.bias"))


def mlp(config: DecoderConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    if config.moe is None:
        gate, up = linear(x, w["gate_up_proj.weight"], w.get("gate_up_proj.bias")).chunk(2, -1)
        return linear(silu(gate) * up, w["down_proj.weight"], w.get("down_proj.bias"))
    moe, out = config.moe, torch.zeros_like(x)
    probabilities = linear(x, w["gate.weight"], w.get("gate.bias")).softmax(-1)
    eligible = probabilities.unflatten(-1, (moe.num_groups, -1))
    best = eligible.amax(-1).topk(moe.top_k_groups).indices
    allowed = torch.zeros(eligible.shape[:2], dtype=torch.bool).scatter(1, best, value=True)
    chosen = eligible.masked_fill(~allowed[..., None], -1).flatten(1).topk(moe.top_k)
    for expert in range(moe.num_experts):
        first, second = w["experts.gate_up_proj"][expert], w["experts.down_proj"][expert]
        hidden = x @ first + w["experts.gate_up_proj_bias"][expert] if moe.expert_bias else x @ first
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if moe.alternating_gate_up else hidden.chunk(2, -1)
        if moe.activation is CLAMPED:
            gate, up = gate.clamp(max=CLAMPED.limit), up.clamp(-CLAMPED.limit, CLAMPED.limit)
            hidden = gate * (CLAMPED.alpha * gate).sigmoid() * (up + 1)
        else:
            hidden = silu(gate) * up
        hidden = hidden @ second + w["experts.down_proj_bias"][expert] if moe.expert_bias else hidden @ second
        out = out + hidden * torch.where(chosen.indices == expert, chosen.values, 0).sum(-1, keepdim=True)
    return out


def layer(config: DecoderConfig, w: dict[str, Tensor], x: Tensor, dims: int, positions: bool) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return normed(x, w[f"{name}.weight"], config, config.normalization) if f"{name}.weight" in w else x

    def of(part: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{part}."): tensor for name, tensor in w.items() if name.startswith(f"{part}.")}

    before = config.norm_placement in ("pre", "parallel", "sandwich")
    mlp_in = "pre_feedforward_layernorm" if config.norm_placement == "sandwich" else "post_attention_layernorm"
    y = attention(config, of("self_attn"), norm("input_layernorm", x) if before else x, dims, positions)
    y = y if config.norm_placement == "pre" else norm("post_attention_layernorm", y)
    h = x + config.residual_multiplier * y
    if config.norm_placement == "parallel":
        return h + config.residual_multiplier * mlp(config, of("mlp"), norm("input_layernorm", x))
    z = mlp(config, of("mlp"), norm(mlp_in, h) if before else h)
    return h + config.residual_multiplier * norm("post_feedforward_layernorm", z)


def random_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """Weights by Hugging Face's names, experts stacked `[E, inputs, outputs]`; no bias or norm is 0 or 1."""
    weights = {}
    for name, tensor in DecoderLayer(config).state_dict().items():
        weights[name] = 0.3 * torch.randn(tensor.shape, dtype=torch.float64) + (tensor.dim() == 1 and "norm" in name)
        if "qkv_proj" in name:
            heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
            parts = weights.pop(name).split([count * config.head_dim for count in heads])
            weights |= {name.replace("qkv", letter): part for letter, part in zip("qkv", parts, strict=True)}
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and not config.moe.input_major_experts:
            weights[name] = weights[name].transpose(1, 2)
    return weights


def turned(tensors: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Return tensors with the experts as the layer stores them."""
    if config.moe is None or config.moe.input_major_experts:
        return tensors
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return {name: tensor.transpose(1, 2) if name in names else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_computes_its_formula(ranks: RankPool, name: str) -> None:
    torch.manual_seed(0)
    config, dims = OPTIONS[name]
    x, seed = torch.randn(2, sum(LENGTHS), HIDDEN, dtype=torch.float64)
    weights = {key: value.requires_grad_() for key, value in random_weights(config).items()}
    leaf = x.clone().requires_grad_()
    positions = name == "scale of positions"
    out = layer(config, weights, leaf, dims, positions)
    out.backward(seed)
    gradients: dict[str, Any] = {key: value.grad for key, value in weights.items()}
    tables: Any = None
    if dims:
        angle = POSITIONS[:, None] * 10000.0 ** (-torch.arange(0, dims, 2).double() / dims)
        tables = (*(torch.cat((each, each), -1) for each in (angle.cos(), angle.sin())),)
        tables += (SCALE_OF_POSITIONS,) * positions
    whole = turned({key: value.detach() for key, value in weights.items()}, config)
    arguments = (config, tables, whole, x, seed, LENGTHS)
    for size in (1, 2):
        results = [run_ours(None, *arguments)] if size == 1 else ranks.run(run_ours, *arguments, world=2)
        for sequence_parallel in (False, True):
            outs, d_xs, d_weights = zip(*(result[sequence_parallel] for result in results), strict=True)
            for ours, wanted in ((outs, out.detach()), (d_xs, leaf.grad)):
                for tensor in [torch.cat(ours)] if sequence_parallel else ours:
                    torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-9)
            for rank, found in enumerate(d_weights):
                local = shard(turned(gradients, config), config, rank, size)
                assert found.keys() == local.keys()
                for key, gradient in found.items():
                    scale = local[key].abs().max()
                    torch.testing.assert_close(
                        gradient / scale,
                        local[key] / scale,
                        rtol=0,
                        atol=1e-5,
                        msg=lambda text, at=key: f"{at}: {text}",
                    )
