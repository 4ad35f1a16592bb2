"""DecoderLayer against transformers' own decoder layers, run one sequence at a time.

The reference's weights and gradients are cut into each rank's part, and every rank's output and every one of its
gradients is compared with its part. All proofs share one table of families and one reference, so they stand in one long
file.
"""

import copy
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from parallel_layers.attention import LatentConfig
from parallel_layers.attention.reference import ReferenceKernel
from parallel_layers.collectives import gather_from_sequence_parallel
from parallel_layers.context_parallel import gather_sequence, split_sequence
from parallel_layers.decoder import DecoderConfig, DecoderLayer
from parallel_layers.dims import ParallelDims
from parallel_layers.moe import ClampedSwiGLU, MoEConfig, RouterReplay, RoutingContext, grouped
from parallel_layers.rotary import RotaryEmbedding, yarn_softmax_scale
from parallel_layers.testing import RankPool

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS, WINDOW = 32, 4, 2, 8, 48, 1e-5, 5
LENGTHS, PADDING = [11, 1, 0, 17, 6], 5  # 35 real tokens, 40 in all: a multiple of 4

SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "rms_norm_eps": EPS,
    "attn_implementation": "eager",
}
LLAMA = DecoderConfig(
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INTERMEDIATE,
    norm_eps=EPS,
)


LATENT = LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, q_lora_rank=14)
DEEPSEEK = replace(
    LLAMA,
    num_kv_heads=HEADS,
    head_dim=None,
    latent=LATENT,
    rotary_interleaved=True,
    moe=MoEConfig(
        num_experts=16,
        top_k=4,
        intermediate_size=12,
        scoring="sigmoid",
        correction_bias=True,
        num_groups=4,
        top_k_groups=2,
        routed_scaling_factor=2.5,
        shared_intermediate_size=24,
    ),
)
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEK_SIZES = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT.kv_lora_rank,
    "q_lora_rank": LATENT.q_lora_rank,
    "qk_nope_head_dim": LATENT.qk_nope_head_dim,
    "qk_rope_head_dim": LATENT.qk_rope_head_dim,
    "v_head_dim": LATENT.v_head_dim,
    "moe_intermediate_size": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}


@dataclass(frozen=True)
class Family:
    """A layer of transformers and the config that is to equal it.

    transformers is imported where the reference is run: the ranks, which load this file too, do without it.
    """

    name: str
    ours: DecoderConfig
    options: dict[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None  # of a head's dims; None: all

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        parameters = self.options.get("rope_parameters") if self.ours.latent else None
        return RotaryEmbedding(self.rotary_dim or self.ours.head_dim, parameters=parameters)(positions)

    def build(self) -> nn.Module:
        module = re.sub("(?<=.)(?=Moe|V3|Oss)", "_", self.name).lower()
        config = resolve_name(f"transformers.models.{module}.configuration_{module}:{self.name}Config")
        layer = resolve_name(f"transformers.models.{module}.modeling_{module}:{self.name}DecoderLayer")
        return layer(config(**(SIZES | self.options)), 0)

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """transformers' parameters (or their gradients), still whole, as this library lays them out."""
        return tensors


class GptOss(Family):
    """Its experts' weights are `[E, in, out]`, gate and up take turns in the last dim, and the router is `router`."""

    def build(self) -> nn.Module:
        layer = super().build()
        experts = layer.mlp.experts
        # transformers 5.17 does not read these from the config.
        experts.alpha, experts.limit = self.options["swiglu_alpha"], self.options["swiglu_limit"]
        return layer

    def by_our_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ours = {}
        for name, tensor in tensors.items():
            if "gate_up" in name:
                tensor = torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)
            ours[name.replace("mlp.router", "mlp.gate")] = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        return ours


class LlamaWithSinks(Family):
    """A Llama layer with gpt-oss's attention, for the tests that leave mixtures of experts out."""

    def build(self) -> nn.Module:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig

        layer = super().build()
        layer.self_attn = GptOssAttention(GptOssConfig(**SIZES, **SINKS), 0)
        return layer


SINKS = {
    "layer_types": ["sliding_attention"],
    "num_hidden_layers": 1,
    "sliding_window": WINDOW,
    "attention_bias": True,
}
GPT_OSS_ATTENTION = replace(LLAMA, attention_bias=True, output_bias=True, attention_sinks=True, window=WINDOW)
FAMILIES = {
    "llama": Family("Llama", LLAMA),
    "glm": Family(
        "Glm",
        replace(LLAMA, attention_bias=True, rotary_interleaved=True),
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        rotary_dim=HEAD_DIM // 2,
    ),
    "llama with biases": Family(
        "Llama",
        replace(LLAMA, attention_bias=True, output_bias=True, mlp_bias=True),
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama with other heads": Family(
        "Llama", replace(LLAMA, num_kv_heads=1, head_dim=16), {"num_key_value_heads": 1, "head_dim": 16}
    ),
    "qwen2": Family("Qwen2", replace(LLAMA, attention_bias=True)),
    "qwen3": Family("Qwen3", replace(LLAMA, qk_norm="head", head_dim=12), {"head_dim": 12}),
    "gemma2": Family(
        "Gemma2",
        replace(
            LLAMA,
            activation="gelu_pytorch_tanh",
            norm_placement="sandwich",
            norm_unit_offset=True,
            window=WINDOW,
            attention_scale=10**-0.5,
            attention_softcap=0.5,
        ),
        {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 0.5, "sliding_window": WINDOW},
    ),
    "qwen3 moe": Family(
        "Qwen3Moe",
        replace(LLAMA, qk_norm="head", moe=MoEConfig(num_experts=8, top_k=3, intermediate_size=20)),
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        "Mixtral",
        replace(LLAMA, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=INTERMEDIATE)),
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek": Family(
        "DeepseekV3",
        replace(DEEPSEEK, attention_scale=yarn_softmax_scale(LATENT.qk_head_dim, DEEPSEEK_YARN)),
        DEEPSEEK_SIZES | {"rope_parameters": DEEPSEEK_YARN},
        rotary_dim=LATENT.qk_rope_head_dim,
    ),
    "deepseek, dense, queries in one step, biases": Family(
        "DeepseekV3",
        replace(
            DEEPSEEK,
            moe=None,
            latent=replace(LATENT, q_lora_rank=None),
            attention_bias=True,
            output_bias=True,
            rotary_interleaved=False,
        ),
        DEEPSEEK_SIZES
        | {"first_k_dense_replace": 1, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
        rotary_dim=LATENT.qk_rope_head_dim,
    ),
    "olmo2": Family("Olmo2", replace(LLAMA, qk_norm="full", norm_placement="post")),
    "gpt-oss attention": LlamaWithSinks("Llama", GPT_OSS_ATTENTION),
    "gpt-oss": GptOss(
        "GptOss",
        replace(
            GPT_OSS_ATTENTION,
            moe=MoEConfig(
                num_experts=8,
                top_k=3,
                intermediate_size=20,
                router_bias=True,
                expert_bias=True,
                activation=ClampedSwiGLU(alpha=1.3, limit=2.0),
            ),
        ),
        SINKS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 2.0,  # many numbers reach this bound
        },
    ),
}


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_reference(family: Family, x: Tensor, seed: Tensor, lengths: list[int]) -> dict[str, dict[str, Tensor] | Tensor]:
    """Weights, output and gradients of transformers' layer, one sequence at a time."""
    layer = family.build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    biases = {
        name: nn.init.normal_(b, std=0.3) for name, b in layer.named_buffers() if name.endswith("correction_bias")
    }
    x = x.clone().requires_grad_()
    outs = []
    for part in x.split(lengths):
        if len(part):
            cos, sin = family.rotary(torch.arange(len(part)))
            if family.ours.attention_sinks:  # its tables are one half: both are the same
                cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
            distance = torch.arange(len(part))[:, None] - torch.arange(len(part))
            hidden = (distance < 0) | (distance >= (family.ours.window or len(part)))
            mask = torch.zeros(distance.shape).masked_fill(hidden, float("-inf"))[None, None]
            out = layer(part[None], attention_mask=mask, position_embeddings=(cos[None], sin[None]))
            outs.append(out[0])
    out = torch.cat(outs)
    out.backward(seed)
    return {
        "out": out.detach(),
        "d_x": x.grad,
        "weights": family.by_our_names({name: p.detach() for name, p in layer.named_parameters()}) | biases,
        "d_weights": family.by_our_names({name: p.grad for name, p in layer.named_parameters()}),
    }


def shard(full: dict[str, Tensor], config: DecoderConfig, rank: int, size: int) -> dict[str, Tensor]:
    """This rank's part of transformers' tensors (weights or gradients), under our names."""
    full = dict(full)
    local: dict[str, Tensor] = {}
    head_dim, kv_heads = config.head_dim, config.num_kv_heads
    for kind in ("weight", "bias"):
        names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if names[1] in full:
            q, k, v = (full.pop(name).unflatten(0, (-1, head_dim)) for name in names)
            first, count = rank * kv_heads // size, max(1, kv_heads // size)
            parts = [q.chunk(size)[rank], k[first : first + count], v[first : first + count]]
            local[f"self_attn.qkv_proj.{kind}"] = torch.cat(parts).flatten(0, 1)
        for mlp in ("mlp", "mlp.shared_experts"):
            names = [f"{mlp}.{name}_proj.{kind}" for name in ("gate", "up")]
            if names[0] in full:
                full[f"{mlp}.gate_up_proj.{kind}"] = torch.cat([full.pop(name) for name in names])
            if (name := f"{mlp}.gate_up_proj.{kind}") in full:
                local[name] = torch.cat([half.chunk(size)[rank] for half in full.pop(name).chunk(2)])
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"):
        if name in full:
            local[name] = full.pop(name).chunk(size, dim=1)[rank]
    if "mlp.experts.down_proj" in full:
        local["mlp.experts.down_proj"] = full.pop("mlp.experts.down_proj").chunk(size, dim=2)[rank]
    for name in {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"} & full.keys():
        halves = full.pop(name).chunk(2, dim=1)
        local[name] = torch.cat([half.chunk(size, dim=1)[rank] for half in halves], dim=1)
    if "self_attn.sinks" in full:
        local["self_attn.sinks"] = full.pop("self_attn.sinks").chunk(size)[rank]
    for name in ("q_proj", "q_b_proj", "kv_b_proj"):
        if (name := f"self_attn.{name}.weight") in full:
            local[name] = full.pop(name).chunk(size)[rank]
    return local | full  # the rest is replicated


def run_ours(
    group: ProcessGroup | None,
    config: DecoderConfig,
    rotary: tuple[Tensor, Tensor],
    weights: dict[str, Tensor],
    x: Tensor,
    seed: Tensor,
    lengths: list[int],
    experts: Tensor | None = None,
) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """This rank's output and gradients without and with sequence parallelism; `experts` are replayed."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    cu_seqlens = cu_seqlens_of(lengths)
    results = []
    for sequence_parallel in (False, True):
        layer = DecoderLayer(config, group=group, sequence_parallel=sequence_parallel, dtype=x.dtype)
        layer.load_state_dict(shard(weights, config, rank, size))
        leaf, mine = (t.chunk(size)[rank] if sequence_parallel else t for t in (x, seed))
        leaf = leaf.clone().requires_grad_()
        out = layer(leaf, rotary, cu_seqlens, max(lengths), routing=replaying(experts, config))
        out.backward(mine)
        results.append((out.detach(), leaf.grad, {name: p.grad for name, p in layer.named_parameters()}))
    return results


def replaying(experts: Tensor | None, config: DecoderConfig) -> RoutingContext | None:
    if experts is None:
        return None
    assert config.moe is not None
    return RoutingContext(replay=RouterReplay({0: experts}, num_experts=config.moe.num_experts))


def check_gradients(
    gradients: dict[str, Tensor], expected: dict[str, Any], config: DecoderConfig, rank: int, size: int
) -> None:
    """Every parameter's gradient equals this rank's part of transformers', relative to its largest number."""
    local = shard(expected["d_weights"], config, rank, size)
    assert gradients.keys() == local.keys()
    for key, gradient in gradients.items():
        scale = local[key].abs().max()
        torch.testing.assert_close(gradient / scale, local[key] / scale, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(ranks: RankPool, name: str, tp: int) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    x, seed = torch.randn(sum(LENGTHS), HIDDEN), torch.randn(sum(LENGTHS), HIDDEN)
    expected = run_reference(family, x, seed, LENGTHS)
    lengths = [*LENGTHS, PADDING]
    padded_x = torch.cat((x, torch.randn(PADDING, HIDDEN)))
    padded_seed = torch.cat((seed, torch.zeros(PADDING, HIDDEN)))
    rotary = family.rotary(positions_of(lengths))
    arguments = (family.ours, rotary, expected["weights"], padded_x, padded_seed, lengths)
    results = [run_ours(None, *arguments)] if tp == 1 else ranks.run(run_ours, *arguments, world=tp)
    for sequence_parallel in (False, True):
        outs, d_xs, d_weights = zip(*(result[sequence_parallel] for result in results), strict=True)
        for ours, whole in ((outs, expected["out"]), (d_xs, expected["d_x"])):
            together = [torch.cat(ours)] if sequence_parallel else ours
            for rank_tensor in together:
                torch.testing.assert_close(rank_tensor[: sum(LENGTHS)], whole, rtol=1e-5, atol=1e-5)
            assert not (ours is d_xs and together[0][sum(LENGTHS) :].any())  # padding: no gradient
        for rank, gradients in enumerate(d_weights):
            check_gradients(gradients, expected, family.ours, rank, tp)


def run_with_context_parallel(
    group: ProcessGroup,
    config: DecoderConfig,
    rotary: tuple[Tensor, Tensor],
    weights: dict[str, Tensor],
    x: Tensor,
    seed: Tensor,
    lengths: list[int],
    experts: Tensor | None = None,
) -> tuple[int, Tensor, Tensor, dict[str, Tensor]]:
    """On a grid of cp 2 and tp 2 with sequence parallelism: the tp rank, the gathered tensors, its gradients."""
    mesh = ParallelDims(cp=2, tp=2).build_mesh("cpu", ranks=torch.distributed.get_process_group_ranks(group))
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    layout = "zigzag" if config.context_parallel == "ring" else "contiguous"
    rotary = tuple(split_sequence(table, cp, layout=layout) for table in rotary)
    layer = DecoderLayer(config, group=tp, sequence_parallel=True, context_group=cp, dtype=x.dtype)
    layer.load_state_dict(shard(weights, config, tp.rank(), 2))
    if experts is not None:
        experts = split_sequence(experts, cp, layout=layout)
    leaf, mine = (split_sequence(t, cp, layout=layout).chunk(2)[tp.rank()].clone() for t in (x, seed))
    routing = replaying(experts, config)
    out = layer(leaf.requires_grad_(), rotary, cu_seqlens_of(lengths), max(lengths), routing=routing)
    out.backward(mine)
    gathered = (
        gather_sequence(gather_from_sequence_parallel(t, tp), cp, layout=layout) for t in (out.detach(), leaf.grad)
    )
    return tp.rank(), *gathered, {name: p.grad for name, p in layer.named_parameters()}


def summed_over_context(results: list[tuple[int, Tensor, Tensor, dict[str, Tensor]]], rank: int) -> dict[str, Tensor]:
    """Gradients of a rank of the tensor-parallel group: the context-parallel ranks' shares, as a trainer adds them."""
    shares = [gradients for tp_rank, *_, gradients in results if tp_rank == rank]
    return {key: sum(share[key].float() for share in shares) for key in shares[0]}


# A few in every run; the rest of the grid with --slow.
CONTEXT_CASES = {
    ("qwen3", "ulysses"),
    ("qwen3", "ring"),
    ("gemma2", "ring"),
    ("gpt-oss attention", "ulysses"),
    ("deepseek", "ring"),
}


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=[] if (name, attention) in CONTEXT_CASES else pytest.mark.slow)
        for name in FAMILIES
        for attention in ("ulysses", "ring")
    ],
)
def test_context_parallel_equals_transformers(ranks: RankPool, name: str, attention: str) -> None:
    torch.manual_seed(0)
    family, lengths = FAMILIES[name], [13, 1, 0, 21, 5]
    x, seed = torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    expected = run_reference(family, x, seed, lengths)
    config = replace(family.ours, context_parallel=attention)
    rotary = family.rotary(positions_of(lengths))
    results = ranks.run(run_with_context_parallel, config, rotary, expected["weights"], x, seed, lengths, world=4)
    for _, out, d_x, _ in results:
        torch.testing.assert_close(out, expected["out"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(d_x, expected["d_x"], rtol=1e-5, atol=1e-5)
    for rank in range(2):
        gradients = summed_over_context(results, rank)
        check_gradients(gradients, expected, config, rank, 2)


def run_with_expert_parallel(
    group: ProcessGroup,
    config: DecoderConfig,
    rotary: list[tuple[Tensor, Tensor]],
    weights: dict[str, Tensor],
    x: list[Tensor],
    seed: list[Tensor],
    lengths: list[list[int]],
    experts: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each rank has half of the experts, and sequences of its own."""
    rank = group.rank()
    layer = DecoderLayer(config, expert_group=group, dtype=x[rank].dtype)
    mine = shard(weights, config, 0, 1)
    layer.load_state_dict(
        {key: tensor.chunk(2)[rank] if key.startswith("mlp.experts.") else tensor for key, tensor in mine.items()}
    )
    routing = replaying(None if experts is None else experts[rank], config)
    leaf = x[rank].clone().requires_grad_()
    out = layer(leaf, rotary[rank], cu_seqlens_of(lengths[rank]), max(lengths[rank]), routing=routing)
    out.backward(seed[rank])
    return out.detach(), leaf.grad, {key: p.grad for key, p in layer.named_parameters()}


def joined_over_experts(
    results: list[tuple[Tensor, Tensor, dict[str, Tensor]]],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Experts' gradients are complete, each on its rank; the others are shares, as over data-parallel ranks."""
    outs, d_xs, gradients = zip(*results, strict=True)
    together = {
        key: torch.cat([share[key] for share in gradients])
        if key.startswith("mlp.experts.")
        else sum(share[key].float() for share in gradients)
        for key in gradients[0]
    }
    return torch.cat(outs), torch.cat(d_xs), together


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ours.moe])
def test_expert_parallel_equals_transformers(ranks: RankPool, name: str) -> None:
    torch.manual_seed(0)
    family, lengths = FAMILIES[name], [[13, 1, 0], [21, 5]]
    whole = [*lengths[0], *lengths[1]]
    x, seed = torch.randn(40, HIDDEN), torch.randn(40, HIDDEN)
    expected = run_reference(family, x, seed, whole)
    parts = [t.split([sum(part) for part in lengths]) for t in (x, seed)]
    rotary = [family.rotary(positions_of(part)) for part in lengths]
    results = ranks.run(
        run_with_expert_parallel, family.ours, rotary, expected["weights"], *parts, lengths, world=2
    )  # fmt: skip
    out, d_x, gradients = joined_over_experts(results)
    torch.testing.assert_close(out, expected["out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_x, expected["d_x"], rtol=1e-5, atol=1e-5)
    check_gradients(gradients, expected, family.ours, 0, 1)


# Two sequences; every grid below divides their 64 tokens.
BF16_LENGTHS = [32, 32]
Tensors = dict[str, Tensor]


def bf16_on_tensor_parallel_ranks(
    ranks: RankPool, tp: int, sequence_parallel: bool, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    arguments = (family.ours, family.rotary(positions_of(BF16_LENGTHS)), weights, *inputs[:2], BF16_LENGTHS, inputs[2])
    results = [run_ours(None, *arguments)] if tp == 1 else ranks.run(run_ours, *arguments, world=tp)
    outs, d_xs, gradients = zip(*(result[sequence_parallel] for result in results), strict=True)
    out, d_x = (torch.cat(parts) if sequence_parallel else parts[0] for parts in (outs, d_xs))
    return [{"out": out, "d_x": d_x} | mine for mine in gradients]


def bf16_on_context_parallel_ranks(
    ranks: RankPool, attention: str, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    config = replace(family.ours, context_parallel=attention)
    arguments = (config, family.rotary(positions_of(BF16_LENGTHS)), weights, *inputs[:2], BF16_LENGTHS, inputs[2])
    results = ranks.run(run_with_context_parallel, *arguments, world=4)
    return [{"out": results[0][1], "d_x": results[0][2]} | summed_over_context(results, rank) for rank in range(2)]


def bf16_on_expert_parallel_ranks(
    ranks: RankPool, family: Family, weights: Tensors, inputs: tuple[Any, ...]
) -> list[Tensors]:
    rotary = [family.rotary(torch.arange(length)) for length in BF16_LENGTHS]
    x, seed, experts = (t.split(BF16_LENGTHS) for t in inputs)
    lengths = [[length] for length in BF16_LENGTHS]
    results = ranks.run(
        run_with_expert_parallel, family.ours, rotary, weights, x, seed, lengths, experts, world=2
    )  # fmt: skip
    out, d_x, gradients = joined_over_experts(results)
    return [{"out": out, "d_x": d_x} | gradients]


# What each rank of the tensor-parallel group has in the end; the output and the input's gradient are whole.
BF16_GRIDS: dict[str, Callable[..., list[Tensors]]] = {
    "one rank": partial(bf16_on_tensor_parallel_ranks, tp=1, sequence_parallel=False),
    "tp 2": partial(bf16_on_tensor_parallel_ranks, tp=2, sequence_parallel=False),
    "tp 4 sp": partial(bf16_on_tensor_parallel_ranks, tp=4, sequence_parallel=True),
    "cp 2 tp 2 ulysses": partial(bf16_on_context_parallel_ranks, attention="ulysses"),
    "cp 2 tp 2 ring": partial(bf16_on_context_parallel_ranks, attention="ring"),
    "ep 2": bf16_on_expert_parallel_ranks,
}
# On one rank all families in every run, on grids these; the rest with --slow.
BF16_IN_EVERY_RUN = {
    ("llama", "tp 4 sp"),
    ("qwen3 moe", "tp 2"),
    ("gemma2", "cp 2 tp 2 ulysses"),
    ("deepseek", "cp 2 tp 2 ring"),
    ("gpt-oss", "ep 2"),
}


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(
            name, grid, marks=[] if grid == "one rank" or (name, grid) in BF16_IN_EVERY_RUN else pytest.mark.slow
        )
        for grid in BF16_GRIDS
        for name, family in FAMILIES.items()
        if family.ours.moe is not None or grid != "ep 2"
    ],
)
def test_bf16_error_is_that_of_plain_bf16(ranks: RankPool, name: str, grid: str) -> None:
    """Both against fp64: ours may not be more than 1.5 times as far off as transformers' layer on the same data.

    In output and every gradient, over six batches: a norm has few weights, and the errors of few numbers scatter.
    """
    torch.manual_seed(0)
    family = FAMILIES[name]
    reference = family.build().bfloat16()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    weights = family.by_our_names(reference.state_dict())
    squares: dict[str, list[Tensor]] = {}
    for x, seed in torch.randn(6, 2, sum(BF16_LENGTHS), HIDDEN).bfloat16():
        theirs, exact, seed, experts = bf16_and_exact(family, reference, x, seed)
        parts = BF16_GRIDS[grid](ranks, family=family, weights=weights, inputs=(x, seed, experts))
        for rank, ours in enumerate(parts):
            ours["out"] = ours["out"] * (seed != 0)
            plain, truth = (shard(full, family.ours, rank, len(parts)) for full in (theirs, exact))
            assert ours.keys() == plain.keys() == truth.keys()
            for key, value in truth.items():
                errors = torch.stack([(ours[key] - value).square().sum(), (plain[key] - value).square().sum()])
                squares.setdefault(key, []).append(errors)
    for key, errors in squares.items():
        mine, plain_error = sum(errors).sqrt()
        assert mine <= 1.5 * plain_error, key


def bf16_and_exact(
    family: Family, reference: nn.Module, x: Tensor, seed: Tensor
) -> tuple[Tensors, Tensors, Tensor, Tensor | None]:
    """transformers' output and gradients in bf16 and in fp64; the gradient to give ours, and the experts to replay.

    A router near a tie chooses other experts in bf16 than in fp64, which is no rounding: ours replays the choice of
    fp64, and tokens for which transformers' choice in bf16 is another one get no gradient and do not count.
    """
    length = BF16_LENGTHS[0]
    tables = family.rotary(torch.arange(length))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (family.ours.window or length))

    def run_theirs(dtype: torch.dtype, seed: Tensor) -> tuple[Tensors, Tensor | None]:
        layer, leaf = copy.deepcopy(reference).to(dtype), x.to(dtype, copy=True).requires_grad_()
        halves = 2 if family.ours.attention_sinks else 1
        cos_sin = tuple(t[None, :, : t.shape[-1] // halves].to(dtype) for t in tables)
        mask = torch.zeros(distance.shape, dtype=dtype).masked_fill(hidden, float("-inf"))[None, None]
        chosen = []
        if family.ours.moe:
            router = layer.mlp.router if isinstance(family, GptOss) else layer.mlp.gate
            router.register_forward_hook(lambda *arguments: chosen.append(arguments[-1][2]))
        out = layer(leaf.view(-1, length, HIDDEN), attention_mask=mask, position_embeddings=cos_sin).flatten(0, 1)
        out.backward(seed.to(dtype))
        gradients = family.by_our_names({key: p.grad for key, p in layer.named_parameters()})
        return {"out": out.detach() * (seed != 0), "d_x": leaf.grad} | gradients, chosen[0] if chosen else None

    exact_choice = None
    if family.ours.moe:
        (_, exact_choice), (_, choice) = (run_theirs(dtype, seed) for dtype in (torch.float64, torch.bfloat16))
        same = (exact_choice.sort(1).values == choice.sort(1).values).all(1)
        assert same.sum() > len(x) // 2
        seed = seed * same[:, None]
    (theirs, _), (exact, _) = (run_theirs(dtype, seed) for dtype in (torch.bfloat16, torch.float64))
    return theirs, exact, seed, exact_choice


# Without experts: how many rows one gets depends on all tokens, and with it how a product is cut into blocks.
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ours.moe is None])
def test_a_sequence_never_feels_another_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    lengths = [11, 1, 17, 6]
    rotary, cu_seqlens = FAMILIES[name].rotary(positions_of(lengths)), cu_seqlens_of(lengths)
    layer = DecoderLayer(FAMILIES[name].ours)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, seed = torch.randn(2, sum(lengths), HIDDEN)

    def run(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = layer(leaf, rotary, cu_seqlens, max(lengths))
        return out.detach(), torch.autograd.grad(out, leaf, seed)[0]

    before = run(x, seed)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        others = torch.ones(sum(lengths), 1, dtype=torch.bool)
        others[start:end] = False
        after = run(torch.where(others, x * 3 + 1, x), torch.where(others, seed - 2, seed))
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[start:end], b[start:end])


def compiled_and_eager(
    group: ProcessGroup | None, family: Family, sequence_parallel: bool
) -> tuple[int, list[list[Tensor]], list[list[Tensor]]]:
    """How many graphs were made; output and gradients for packs of three lengths, compiled and eager."""
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds, which every rank would pay

    size = group.size() if group is not None and sequence_parallel else 1
    layer = DecoderLayer(family.ours, group=group, sequence_parallel=sequence_parallel)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    results: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    for lengths in ([5, 2, 9], [3, 8, 0, 1, 12], [17, 13]):
        arguments = (family.rotary(positions_of(lengths)), cu_seqlens_of(lengths), max(lengths))
        x, seed = torch.randn(2, sum(lengths) // size, HIDDEN)
        leaves = [x.requires_grad_(), *layer.parameters()]
        for run, found in zip((compiled, layer), results, strict=True):
            out = run(x, *arguments)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, seed)])
    return counter.frame_count, *results


COMPILED_IN_EVERY_RUN = {("llama", 1), ("deepseek", 1), ("llama", 2)}
# Each has collectives of its own at tp 2: linears, sums of norms over all heads, sinks, experts, latents.
COMPILED_WITH_COLLECTIVES = ("llama", "olmo2", "gpt-oss", "mixtral", "deepseek")


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if (name, tp) in COMPILED_IN_EVERY_RUN else pytest.mark.slow)
        for tp, names in ((1, FAMILIES), (2, COMPILED_WITH_COLLECTIVES))
        for name in names
    ],
)
def test_compiles_without_a_graph_break(ranks: RankPool, name: str, tp: int) -> None:
    """Experts, latents and, at tp 2, collectives included; and the second graph serves all further lengths."""
    family = FAMILIES[name]
    results = (
        [compiled_and_eager(None, family, False)]
        if tp == 1
        else ranks.run(compiled_and_eager, family, True, world=tp, timeout=120)
    )
    for graphs, compiled, eager in results:
        assert graphs == 2
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_value_is_read_on_the_host(name: str) -> None:
    """Fake tensors have no values: reading one (`item`, a boolean index, `nonzero`) raises, forward or backward.

    What is behind an operator of its own is not looked at: on a CPU attention and grouped products read their bounds.
    """
    family = FAMILIES[name]
    config = family.ours
    context = None
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, balance_loss=0.1, sequence_balance_loss=0.1, z_loss=0.1))
        context = RoutingContext(segments=torch.zeros(20, dtype=torch.int64), replay=RouterReplay())
    layer = DecoderLayer(config, device="meta")
    named = [*layer.named_parameters(), *layer.named_buffers()]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {key: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad) for key, t in named}
        x = torch.randn(20, HIDDEN, requires_grad=True)
        tables = tuple(mode.from_tensor(table) for table in family.rotary(torch.arange(20)))
        cu_seqlens = torch.zeros(4, dtype=torch.int32)
        out = functional_call(layer, state, (x, tables, cu_seqlens, 9), {"routing": context})
        out.sum().backward()
        assert x.grad.shape == x.shape
        with pytest.raises(DataDependentOutputException):
            out.sum().item()


READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__")


class _ValuesStayOnTheDevice(TorchFunctionMode):
    """Refuses what reads a tensor's value on the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = args[1] if function is Tensor.__getitem__ else None
        indices = index if isinstance(index, tuple) else (index,)
        by_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        if by_mask or function in [getattr(Tensor, name) for name in READS]:
            raise AssertionError(f"{function.__name__} reads a value on the host")
        return function(*args, **(kwargs or {}))


def run_without_reading(group: ProcessGroup, config: DecoderConfig, rotary: tuple[Tensor, Tensor]) -> bool:
    mesh = ParallelDims(cp=2, tp=2).build_mesh("cpu", ranks=torch.distributed.get_process_group_ranks(group))
    tp, cp = mesh.get_group("tp"), mesh.get_group("cp")
    layer = DecoderLayer(config, group=tp, sequence_parallel=True, context_group=cp)
    x, cu_seqlens = torch.randn(10, HIDDEN, requires_grad=True), cu_seqlens_of([13, 1, 0, 21, 5])
    # On a CPU attention and grouped products read their bounds; their kernels do not.
    reference = [(ReferenceKernel, "forward"), (ReferenceKernel, "backward"), (grouped, "_runs")]
    with ExitStack() as stack:
        for owner, name in reference:
            stack.enter_context(patch.object(owner, name, _unseen(getattr(owner, name))))
        stack.enter_context(_ValuesStayOnTheDevice())
        layer(x, rotary, cu_seqlens, 21).sum().backward()
    return x.grad is not None


def _unseen(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return call


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "ulysses"), ("llama", "ring"), ("gpt-oss attention", "ring"), ("deepseek", "ring")],
)
def test_no_value_is_read_on_the_host_on_a_grid(ranks: RankPool, name: str, attention: str) -> None:
    with pytest.raises(AssertionError, match="tolist reads"), _ValuesStayOnTheDevice():
        torch.zeros(2).tolist()
    family = FAMILIES[name]
    config = replace(family.ours, context_parallel=attention)
    assert all(ranks.run(run_without_reading, config, family.rotary(torch.arange(20)), world=4))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_size=32 is not divisible by num_heads=5; pass head_dim"):
        replace(LLAMA, head_dim=None, num_heads=5)
    with pytest.raises(ValueError, match=r"num_heads=4 is not divisible by num_kv_heads=3"):
        replace(LLAMA, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"norm_placement='middle' is unknown; use one of pre, post, sandwich"):
        replace(LLAMA, norm_placement="middle")
    with pytest.raises(
        ValueError, match=r"qk_norm='layer' is unknown; use 'head' \(Qwen3\), 'full' \(OLMo-2\) or None"
    ):
        DecoderLayer(replace(LLAMA, qk_norm="layer"))
    with pytest.raises(
        ValueError, match=r"num_kv_heads=2, but latent attention makes keys and values for each of num_h"
    ):
        replace(DEEPSEEK, num_kv_heads=2)
    with pytest.raises(
        ValueError, match=r"head_dim=4, but the heads of latent attention have qk_nope_head_dim=6 \+ qk_"
    ):
        replace(DEEPSEEK, head_dim=4)
    with pytest.raises(ValueError, match=r"qk_norm='head' and attention_sinks=False are of ordinary attention"):
        replace(DEEPSEEK, qk_norm="head")
    with pytest.raises(ValueError, match=r"activation='mish' is unknown; known: gelu, "):
        DecoderLayer(replace(LLAMA, activation="mish"))
