"""Apertus and the text parts of the vision-language families, without their layouts' help.

Names and shapes are written down here. The order of the elements follows from what is computed: the local tensors of a
grid's ranks, multiplied as the target's modules multiply them, give what transformers' modules give on the same input.
The other families run on both targets' real modules in the workspace's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import silu, softplus

from ckpt import Grid, Place, layout_for, load_hf

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]

# 32 hidden, 48 in the MLP, 4 heads for 2 key-value heads of 8, a vocabulary of 50: what one of two ranks holds.
ENDS: dict[str, Shapes] = {
    "parallel": {"model.embed_tokens.weight": (25, 32), "model.norm.weight": (32,), "lm_head.weight": (25, 32)},
    "megatron": {
        "embedding.word_embeddings.weight": (25, 32),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (25, 32),
    },
}
LAYER: dict[str, Shapes] = {
    "parallel": {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.qkv_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 16),
    },
    "megatron": {
        "input_layernorm.weight": (32,),
        "pre_mlp_layernorm.weight": (32,),
        "self_attention.linear_qkv.weight": (32, 32),
        "self_attention.linear_proj.weight": (32, 16),
    },
}
GATED: dict[str, Shapes] = {
    "parallel": {"mlp.gate_up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 24)},
    "megatron": {"mlp.linear_fc1.weight": (48, 32), "mlp.linear_fc2.weight": (32, 24)},
}
XIELU: dict[str, Shapes] = {
    "parallel": {
        "mlp.up_proj.weight": (24, 32),
        "mlp.down_proj.weight": (32, 24),
        "mlp.act_fn.alpha_p": (1,),
        "mlp.act_fn.alpha_n": (1,),
        "mlp.act_fn.beta": (),
        "mlp.act_fn.eps": (),
    },
    "megatron": {
        "mlp.linear_fc1.weight": (24, 32),
        "mlp.linear_fc2.weight": (32, 24),
        "mlp.activation_func.alpha_p": (1,),
        "mlp.activation_func.alpha_n": (1,),
        "mlp.activation_func.beta": (),
        "mlp.activation_func.eps": (),
    },
}
QKV_BIAS: dict[str, Shapes] = {
    "parallel": {"self_attn.qkv_proj.bias": (32,)},
    "megatron": {"self_attention.linear_qkv.bias": (32,)},
}
O_BIAS: dict[str, Shapes] = {
    "parallel": {"self_attn.o_proj.bias": (32,)},
    "megatron": {"self_attention.linear_proj.bias": (32,)},
}
QK_NORM: dict[str, Shapes] = {
    "parallel": {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)},
    "megatron": {"self_attention.q_layernorm.weight": (8,), "self_attention.k_layernorm.weight": (8,)},
}
# On Megatron-Core norms behind attention and the MLP belong to the residual additions.
POST_NORMS: Shapes = {"self_attn_bda.post_layernorm.weight": (32,), "mlp_bda.post_layernorm.weight": (32,)}
# The native layers have one name for each place of a norm.
NATIVE_POST_NORMS: Shapes = {"pre_feedforward_layernorm.weight": (32,), "post_feedforward_layernorm.weight": (32,)}
NATIVE_NAMES = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


@dataclass
class Model:
    """A checkpoint: its name in conftest.py, what a layer has beside the common parts, and the fields it is made
    with."""

    name: str
    parts: tuple[dict[str, Shapes], ...]
    fields: dict[str, Any] = field(default_factory=dict)

    def layer(self, target: str) -> Shapes:
        return {name: shape for part in (LAYER, *self.parts) for name, shape in part[target].items()}

    def __str__(self) -> str:
        return "-".join((self.name, *self.fields))


MODELS = [
    Model("apertus", (XIELU, QK_NORM)),
    Model("apertus", (XIELU, QK_NORM, QKV_BIAS, O_BIAS), {"attention_bias": True}),
    Model("qwen2-vl", (GATED, QKV_BIAS)),
    Model("qwen2.5-vl", (GATED, QKV_BIAS)),
    Model("qwen3-vl", (GATED, QK_NORM), {"head_dim": 8}),
    Model("glm4v", (GATED, QKV_BIAS, {"parallel": NATIVE_POST_NORMS, "megatron": POST_NORMS})),
]
# transformers' norms, and what the targets call them.
NORMS: dict[str, dict[str, str]] = {
    "parallel": {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "attention_layernorm": "input_layernorm",
        "feedforward_layernorm": "post_attention_layernorm",
        "self_attn.q_norm": "self_attn.q_norm",
        "self_attn.k_norm": "self_attn.k_norm",
    },
    "megatron": {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "attention_layernorm": "input_layernorm",
        "feedforward_layernorm": "pre_mlp_layernorm",
        "post_self_attn_layernorm": "self_attn_bda.post_layernorm",
        "post_mlp_layernorm": "mlp_bda.post_layernorm",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
    },
}
# A layer's matrices: queries with keys and values, their output, into the MLP, out of it.
MATRICES = {
    "parallel": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "megatron": ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
}
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 8, 50


@pytest.mark.parametrize("target", ["parallel", "megatron"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_names_and_shapes(model: Model, target: Any, checkpoint: Checkpoints) -> None:
    layout = layout_for(checkpoint(model.name, **model.fields), target)
    prefix = {"parallel": "model.layers.{}.", "megatron": "decoder.layers.{}."}[target]
    expected = dict(ENDS[target])
    for layer in range(2):
        expected |= {prefix.format(layer) + name: shape for name, shape in model.layer(target).items()}
    for rank in range(2):
        blocks = layout.at(Place(tp=(rank, 2)))
        assert {name: block.shape for name, block in blocks.items() if "visual." not in name} == expected


@cache
def seen(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """transformers' text model in fp64, on some tokens: what goes into each module and what comes out, by its name; and
    the epsilon of the norms."""
    config = transformers.AutoConfig.from_pretrained(folder)
    vision = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()
    text = model.model.language_model if vision else model.model
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: object, given: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = given[0], output

        return hook

    for name, module in (*text.named_modules(), ("lm_head", model.lm_head)):
        if not list(module.children()):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        hidden = text(input_ids=torch.arange(VOCABULARY)[None], use_cache=False).last_hidden_state
        model.lm_head(hidden)
    return found, config.get_text_config().rms_norm_eps


class Stage:
    """What the ranks of a pipeline stage hold, in fp64; it notes which of it has been looked at."""

    def __init__(self, ranks: list[dict[str, Tensor]]) -> None:
        self._ranks = [{name: tensor.double() for name, tensor in held.items()} for held in ranks]
        self.unused = {name for held in ranks for name in held}

    def __contains__(self, name: str) -> bool:
        return name in self._ranks[0]

    def each(self, name: str) -> list[Tensor]:
        """Every rank's."""
        self.unused.discard(name)
        return [held[name] for held in self._ranks]

    def one(self, name: str) -> Tensor:
        """Return what all ranks hold alike."""
        first, *others = self.each(name)
        assert all(torch.equal(first, other) for other in others), name
        return first

    def linear(self, x: Tensor, name: str) -> list[Tensor]:
        """A column-parallel projection on every rank."""
        weights = self.each(f"{name}.weight")
        biases = self.each(f"{name}.bias") if f"{name}.bias" in self else [torch.zeros(1).double()] * len(weights)
        return [x @ weight.mT + bias for weight, bias in zip(weights, biases, strict=True)]

    def joined(self, x: Tensor, name: str) -> Tensor:
        """A row-parallel projection: the sum over the ranks, each with its columns of the input."""
        weights = self.each(f"{name}.weight")
        parts = zip(x.chunk(len(weights), -1), weights, strict=True)
        total = sum(part @ weight.mT for part, weight in parts)
        assert isinstance(total, Tensor)
        return total + (self.one(f"{name}.bias") if f"{name}.bias" in self else 0)


def heads_of_native_layers(projected: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, then keys, then values; each rank has its own."""
    queries, keys = HEADS // len(projected), max(1, KV_HEADS // len(projected))
    for rows in projected:
        yield rows.split([queries * HEAD_DIM, keys * HEAD_DIM, keys * HEAD_DIM], -1)


def heads_of_megatron(projected: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Group by group: its queries, its key, its value (`Attention.get_query_key_value_tensors` of Megatron-Core 0.16).

    With more ranks than groups a rank gathers the projections of all, takes the group that it belongs to, and of that
    its own queries.
    """
    tp, of_group = len(projected), HEADS // KV_HEADS
    sides = [of_group * HEAD_DIM, HEAD_DIM, HEAD_DIM]
    for rank in range(tp):
        rows = projected[rank]
        if tp > KV_HEADS:
            rows = torch.cat(projected, -1).chunk(KV_HEADS, -1)[rank // (tp // KV_HEADS)]
        groups = rows.unflatten(-1, (-1, sum(sides))).split(sides, -1)
        query, key, value = (part.flatten(-2) for part in groups)
        if tp > KV_HEADS:
            query = query.chunk(tp // KV_HEADS, -1)[rank % (tp // KV_HEADS)]
        yield query, key, value


HEADS_OF = {"parallel": heads_of_native_layers, "megatron": heads_of_megatron}


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def check_norm(of: tuple[Tensor, Tensor], weight: Tensor, epsilon: float, name: str) -> None:
    """transformers normalises in fp32, whatever the type is."""
    x, expected = of
    ours = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


def check_attention(stage: Stage, local: str, target: str, modules: dict[str, tuple[Tensor, Tensor]]) -> None:
    fused, output = (local + name for name in MATRICES[target][:2])
    x = modules["self_attn.q_proj"][0]
    ours = list(HEADS_OF[target](stage.linear(x, fused)))
    q, k, v = (modules[f"self_attn.{name}_proj"][1].unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
    # Each rank has its share of the query heads, and the key and value heads that those attend to.
    queries, keys = HEADS // len(ours), max(1, KV_HEADS // len(ours))
    for rank, (query, key, value) in enumerate(ours):
        first = rank * queries // (HEADS // KV_HEADS)
        close(query, q[..., rank * queries : (rank + 1) * queries, :].flatten(-2), f"queries of rank {rank}")
        close(key, k[..., first : first + keys, :].flatten(-2), f"keys of rank {rank}")
        close(value, v[..., first : first + keys, :].flatten(-2), f"values of rank {rank}")
    context, expected = modules["self_attn.o_proj"]
    close(stage.joined(context, output), expected, output)


def check_gated_mlp(stage: Stage, local: str, target: str, modules: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Gate and up are the halves of one matrix, on each rank of its own."""
    fused, down = (local + name for name in MATRICES[target][2:])
    x = modules["mlp.gate_up_proj" if "mlp.gate_up_proj" in modules else "mlp.gate_proj"][0]
    hidden, expected = modules["mlp.down_proj"]
    halves = [rows.chunk(2, -1) for rows in stage.linear(x, fused)]
    close(torch.cat([silu(gate) * up for gate, up in halves], -1), hidden, fused)
    close(stage.joined(hidden, down), expected, down)


def check_xielu_mlp(stage: Stage, local: str, target: str, modules: dict[str, tuple[Tensor, Tensor]]) -> None:
    up, down = local + {"parallel": "mlp.up_proj", "megatron": "mlp.linear_fc1"}[target], local + MATRICES[target][3]
    activation = local + {"parallel": "mlp.act_fn.", "megatron": "mlp.activation_func."}[target]
    alpha_p, alpha_n, beta, eps = (stage.one(activation + name) for name in ("alpha_p", "alpha_n", "beta", "eps"))
    rows = torch.cat(stage.linear(modules["mlp.up_proj"][0], up), -1)
    negative = (torch.expm1(torch.minimum(rows, eps)) - rows) * (beta + softplus(alpha_n)) + beta * rows
    hidden, expected = modules["mlp.down_proj"]
    close(torch.where(rows > 0, softplus(alpha_p) * rows.square() + beta * rows, negative), hidden, up)
    close(stage.joined(hidden, down), expected, down)


GRIDS = [Grid(), Grid(tp=4), Grid(tp=2, pp=2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("target", ["parallel", "megatron"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_local_tensors_compute_what_transformers_computes(
    model: Model, target: Any, grid: Grid, checkpoint: Checkpoints, read_all: ReadAll
) -> None:
    folder = checkpoint(model.name, **model.fields)
    layout, (found, epsilon) = layout_for(folder, target), seen(folder)
    embedding, final, head = (name.removesuffix(".weight") for name in ENDS[target])
    for stage_rank in range(grid.pp):
        places = [Place(tp=(rank, grid.tp), pp=(stage_rank, grid.pp)) for rank in range(grid.tp)]
        stage = Stage([load_hf(folder, layout, place) for place in places])
        if stage_rank == 0:
            ids, expected = found["embed_tokens"]
            close(torch.cat(stage.each(f"{embedding}.weight"))[ids], expected, embedding)
            for name, tensor in read_all(folder).items():
                if "visual." in name:
                    assert torch.equal(stage.one(name), tensor.double()), name
        for index in range(2 // grid.pp):
            layer = stage_rank * 2 // grid.pp + index
            local = {"parallel": f"model.layers.{layer}.", "megatron": f"decoder.layers.{index}."}[target]
            start = f"layers.{layer}."
            modules = {name.removeprefix(start): values for name, values in found.items() if name.startswith(start)}
            norms = NORMS[target] | (NATIVE_NAMES if target == "parallel" and model.name == "glm4v" else {})
            for name in norms.keys() & modules.keys():
                check_norm(modules[name], stage.one(f"{local}{norms[name]}.weight"), epsilon, name)
            check_attention(stage, local, target, modules)
            (check_xielu_mlp if XIELU in model.parts else check_gated_mlp)(stage, local, target, modules)
        if stage_rank == grid.pp - 1:
            check_norm(found["norm"], stage.one(f"{final}.weight"), epsilon, final)
            hidden, expected = found["lm_head"]
            close(torch.cat(stage.linear(hidden, head), -1)[..., :VOCABULARY], expected, head)
        assert not stage.unused


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-text"])
def test_a_rank_of_a_hybrid_has_whole_heads(name: str, tp: int, checkpoint: Checkpoints, read_all: ReadAll) -> None:
    """Modules of Qwen3.5, whose projections are apart, with a rank's heads and tensors: their outputs add up.

    The tensors are in the order of `GatedDeltaNetConfig`: the rows of a projection or of the convolution part by part,
    b and a of all heads on every rank.
    """
    folder = checkpoint(name, attention_bias=False)
    config = transformers.AutoConfig.from_pretrained(folder)
    heads, keys, kv_heads = 8 // tp, 4 // tp, max(1, 2 // tp)
    local = transformers.Qwen3_5TextConfig(
        **{**config.to_dict(), "model_type": "qwen3_5_text"}
        | {"linear_num_key_heads": keys, "linear_num_value_heads": heads}
        | {"num_attention_heads": 4 // tp, "num_key_value_heads": kv_heads}
    )
    with torch.device("meta"):
        whole, part = (transformers.AutoModelForCausalLM.from_config(each).model.layers for each in (config, local))
    x, angles = torch.randn(1, 6, 32), torch.randn(6, 4)
    rotary = {"position_embeddings": (angles.cos()[None], angles.sin()[None]), "attention_mask": None}

    def output(module: Any, tensors: dict[str, Tensor], **inputs: Any) -> Tensor:
        result = torch.func.functional_call(module, tensors, kwargs={"hidden_states": x, **inputs}, strict=True)
        return result[0] if isinstance(result, tuple) else result

    def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

    def recurrent(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        queries_keys_values = 2 * keys * 4 + heads * 8
        qkvz, ba = (tensors.pop(f"in_proj_{kind}.weight") for kind in ("qkvz", "ba"))
        b, a = (rows.unflatten(0, (tp, heads))[rank] for rows in ba.chunk(2))
        projections = {"qkv": qkvz[:queries_keys_values], "z": qkvz[queries_keys_values:], "b": b, "a": a}
        tensors |= {f"in_proj_{kind}.weight": rows for kind, rows in projections.items()}
        return {key.removeprefix("decay."): tensor for key, tensor in tensors.items()}

    def attending(rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = tensors.pop("qkv_proj.weight").split([2 * 16 * 4 // tp, 16 * kv_heads, 16 * kv_heads])
        return tensors | {f"{kind}_proj.weight": weight for kind, weight in zip("qkv", rows, strict=True)}

    layout, complete = layout_for(folder), read_all(folder)
    shards = [load_hf(folder, layout, Place(tp=(rank, tp))) for rank in range(tp)]
    for index, module, convert, inputs in ((0, "linear_attn", recurrent, {}), (2, "self_attn", attending, rotary)):
        prefix = f"model.layers.{index}.{module}."
        parts = [convert(rank, below(tensors, prefix)) for rank, tensors in enumerate(shards)]
        summed = sum(output(getattr(part[index], module), tensors, **inputs) for tensors in parts)
        expected = output(getattr(whole[index], module), below(complete, prefix), **inputs)
        torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-3)
