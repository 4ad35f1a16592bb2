"""The layers of linear attention against transformers', one sequence at a time, on 1, 2 and 4 ranks."""

import math
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from token_recurrence import boundaries
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers.linear.execution import Placement
from parallel_layers.linear_attention import GatedDeltaNetConfig
from parallel_layers.linear_attention.config import KimiDeltaConfig, Mamba2Config
from parallel_layers.linear_attention.gated_delta_net import GatedDeltaNet
from parallel_layers.linear_attention.kimi_delta_attention import KimiDeltaAttention
from parallel_layers.linear_attention.mamba2 import Mamba2
from parallel_layers.module.initialization import initialize_
from parallel_layers.module.sharding import blocks_of, load_full_
from parallel_layers.testing import RankPool

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, EPS = 24, 4, 8, 6, 5, 1e-5
# A chunk has 64 tokens; 5 tokens of padding behind the real ones make 160, a multiple of 4.
LENGTHS, PADDING = [70, 1, 0, 64, 3, 17], 5

CONFIG = GatedDeltaNetConfig(
    num_key_heads=KEY_HEADS, num_value_heads=VALUE_HEADS, key_head_dim=KEY_DIM, value_head_dim=VALUE_DIM, norm_eps=EPS
)
SIZES = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY_DIM,
    "linear_value_head_dim": VALUE_DIM,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": EPS,
}
STATE_SPACE = Mamba2Config(
    num_heads=VALUE_HEADS, head_dim=KEY_DIM, num_groups=2, state_size=VALUE_DIM, norm_eps=EPS,
    step_limit=(0.3, math.inf),
)  # fmt: skip
Config = GatedDeltaNetConfig | KimiDeltaConfig | Mamba2Config
LAYERS: dict[type, type] = {
    GatedDeltaNetConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDeltaAttention,
    Mamba2Config: Mamba2,
}
# Their module and their names of our parameters.
FAMILIES: dict[str, tuple[str, str, Config]] = {
    "qwen3_next": ("qwen3_next.modeling_qwen3_next:Qwen3NextGatedDeltaNet", "Qwen3NextConfig", CONFIG),
    "qwen3_5": ("qwen3_5.modeling_qwen3_5:Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", CONFIG),
    "olmo_hybrid": (
        "olmo_hybrid.modeling_olmo_hybrid:OlmoHybridGatedDeltaNet",
        "OlmoHybridConfig",
        GatedDeltaNetConfig(**{**vars(CONFIG), "negative_eigenvalues": True}),
    ),
    "kimi_linear": (
        "kimi_linear.modeling_kimi_linear:KimiLinearDeltaAttention",
        "KimiLinearConfig",
        KimiDeltaConfig(num_heads=VALUE_HEADS, head_dim=KEY_DIM, norm_eps=EPS),
    ),
    "nemotron_h": ("nemotron_h.modeling_nemotron_h:NemotronHMamba2Mixer", "NemotronHConfig", STATE_SPACE),
    "granitemoehybrid": (
        "granitemoehybrid.modeling_granitemoehybrid:GraniteMoeHybridMambaLayer",
        "GraniteMoeHybridConfig",
        Mamba2Config(**{**vars(STATE_SPACE), "num_groups": 1, "projection_bias": True, "step_limit": (0.2, 0.9)}),
    ),
}
MORE = {
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "kimi_linear": {"linear_num_heads": VALUE_HEADS, "linear_head_dim": KEY_DIM},
    "nemotron_h": {
        "mamba_num_heads": VALUE_HEADS,
        "mamba_head_dim": KEY_DIM,
        "n_groups": 2,
        "ssm_state_size": VALUE_DIM,
        "layer_norm_epsilon": EPS,
        "time_step_min": 0.3,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoehybrid": {
        "mamba_n_heads": VALUE_HEADS,
        "mamba_n_groups": 1,
        "mamba_d_state": VALUE_DIM,
        "mamba_d_head": KEY_DIM,
        "mamba_proj_bias": True,
        "time_step_limit": (0.2, 0.9),
        "layer_types": ["mamba", "attention"],
    },
}


# Beside all families at tp 2; at tp 4 two ranks share each group of Nemotron-H's heads.
QUICK = {("qwen3_next", 4), ("nemotron_h", 4)}


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' tensors in the one layout of `GatedDeltaNetConfig`."""
    if "D" in tensors:
        return {f"state_space.{name}": tensors.pop(name) for name in ("A_log", "D", "dt_bias")} | tensors
    tensors = {name.removeprefix("forget_gate."): x for name, x in tensors.items()}
    group = VALUE_HEADS // KEY_HEADS
    A_log = tensors.pop("A_log")
    ours = {"decay.A_log": A_log.flatten(0, 2) if A_log.dim() == 4 else A_log, "decay.dt_bias": tensors.pop("dt_bias")}
    ours["conv1d.weight"] = tensors.pop("conv1d.weight")
    if "in_proj_qkvz.weight" in tensors:  # interleaved by key heads
        heads = tensors.pop("in_proj_qkvz.weight").unflatten(0, (KEY_HEADS, -1))
        parts = heads.split([KEY_DIM, KEY_DIM, group * VALUE_DIM, group * VALUE_DIM], dim=1)
        ours["in_proj_qkvz.weight"] = torch.cat([part.flatten(0, 1) for part in parts])
        ba = tensors.pop("in_proj_ba.weight").unflatten(0, (KEY_HEADS, 2, group))
        ours["in_proj_ba.weight"] = ba.transpose(0, 1).flatten(0, 2)
    elif "in_proj_qkv.weight" in tensors:
        ours["in_proj_qkvz.weight"] = torch.cat([tensors.pop(f"in_proj_{name}.weight") for name in ("qkv", "z")])
        ours["in_proj_ba.weight"] = torch.cat([tensors.pop(f"in_proj_{name}.weight") for name in "ba"])
    elif "f_a_proj.weight" in tensors:
        ours["in_proj_qkv.weight"] = torch.cat([tensors.pop(f"{name}_proj.weight") for name in "qkv"])
        ours["in_proj_fgb.weight"] = torch.cat([tensors.pop(f"{name}_proj.weight") for name in ("f_a", "g_a", "b")])
        ours |= {name: tensors.pop(name) for name in ("f_b_proj.weight", "g_b_proj.weight")}
    else:
        ours["in_proj_qkvz.weight"] = torch.cat([tensors.pop(f"{name}_proj.weight") for name in "qkvg"])
        ours["in_proj_ba.weight"] = torch.cat([tensors.pop(f"{name}_proj.weight") for name in "ba"])
    for name in ("norm.weight", "out_proj.weight"):
        ours[name] = tensors.pop(name if name in tensors else name.replace("out_", "o_").replace("norm", "o_norm"))
    assert not tensors
    return ours


def run_theirs(family: str, x: Tensor, seed: Tensor) -> dict[str, Any]:
    path, config_name, _ = FAMILIES[family]
    config = resolve_name(f"transformers:{config_name}")(**{**SIZES, **MORE.get(family, {})})
    layer = resolve_name(f"transformers.models.{path}")(config, layer_idx=0)
    torch.manual_seed(2)
    for name, parameter in layer.named_parameters():
        # Slow decays: for fast ones transformers' sums in fp32 are no better than 1e-5.
        nn.init.normal_(parameter, mean=float("norm" in name) - 2.0 * ("A_log" in name), std=0.3)
    if family == "olmo_hybrid":
        layer.o_norm.variance_epsilon = EPS
    x = x.clone().requires_grad_()
    out = torch.cat([layer(part[None])[0] for part in x.split(LENGTHS) if len(part)])
    out.backward(seed)
    return {
        "out": out.detach(),
        "d_x": x.grad,
        "weights": by_our_names({name: p.detach() for name, p in layer.named_parameters()}),
        "d_weights": by_our_names({name: p.grad for name, p in layer.named_parameters()}),
    }


def run_ours(
    group: ProcessGroup | None,
    config: Config,
    weights: dict[str, Tensor],
    x: Tensor,
    seed: Tensor,
) -> list[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]]:
    """Outputs, gradients and the places of the gradients in the whole, without and with sequence parallelism."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    results = []
    for sequence_parallel in (False, True):
        layer = build(config, placement=Placement(group, sequence_parallel))
        load_full_(layer, weights)
        assert len(layer.conv1d.weight) == config.state_shape(size).channels  # also where ranks share a group
        leaf, d_out = (t.chunk(size)[rank] if sequence_parallel else t for t in (x, seed))
        leaf = leaf.clone().requires_grad_()
        out = layer(leaf, boundaries([*LENGTHS, PADDING]))
        out.backward(d_out)
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        blocks = {name: list(blocks_of(*owner_of(layer, name))) for name in gradients}
        results.append((out.detach(), leaf.grad, gradients, blocks))
    return results


def build(config: Config, **options: Any) -> Any:
    return LAYERS[type(config)](HIDDEN, config, **options)


def owner_of(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return layer.get_submodule(path), last


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param(family, tp, marks=[] if tp == 2 or (family, tp) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for tp in (1, 2, 4)
    ],
)
def test_equals_transformers(ranks: RankPool, family: str, tp: int) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    x, seed = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    expected = run_theirs(family, x, seed)
    padded = torch.cat([x, torch.randn(PADDING, HIDDEN)]), torch.cat([seed, torch.zeros(PADDING, HIDDEN)])
    arguments = (FAMILIES[family][2], expected["weights"], *padded)
    results = [run_ours(None, *arguments)] if tp == 1 else ranks.run(run_ours, *arguments, world=tp)
    for sequence_parallel in (False, True):
        outs, d_xs, gradients, places = zip(*(result[sequence_parallel] for result in results), strict=True)
        for ours, whole in ((outs, expected["out"]), (d_xs, expected["d_x"])):
            for tensor in [torch.cat(ours)] if sequence_parallel else ours:
                scale = whole.abs().max()
                torch.testing.assert_close(tensor[:tokens] / scale, whole / scale, rtol=0, atol=1e-5)
                assert ours is outs or not tensor[tokens:].any()  # padding: no gradient
        for local, blocks in zip(gradients, places, strict=True):
            assert local.keys() == expected["d_weights"].keys()
            for name, gradient in local.items():
                whole = expected["d_weights"][name]
                for here, there in blocks[name]:
                    scale = whole.abs().max()
                    torch.testing.assert_close(
                        gradient[here] / scale,
                        whole[there] / scale,
                        rtol=0,
                        atol=1e-5,
                        msg=lambda m, n=name: f"{n}: {m}",
                    )


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_a_sequence_does_not_reach_another(family: str) -> None:
    """Other tokens in one sequence change no bit of the others' outputs and of the gradients of their tokens."""
    torch.manual_seed(0)
    layer = build(FAMILIES[family][2])
    x = torch.randn(sum(LENGTHS), HIDDEN)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    seed = torch.randn(x.shape)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, boundaries(LENGTHS))
        return out.detach(), *torch.autograd.grad(out, x, seed)

    plain = run(x)
    for changed in (0, 1, 3):
        others = sequence != changed
        for ours, expected in zip(run(torch.where(others[:, None], x, -x)), plain, strict=True):
            assert torch.equal(ours[others], expected[others])
            assert not torch.equal(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_compiles_into_one_graph(family: str) -> None:
    layer = build(FAMILIES[family][2])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 2, 9], [3, 70, 0, 1, 12]):
        x, seed = torch.randn(2, sum(lengths), HIDDEN)
        leaves = [x.requires_grad_(), *layer.parameters()]
        outs = [run(x, boundaries(lengths)) for run in (compiled, layer)]
        for ours, expected in zip(*(torch.autograd.grad(out, leaves, seed) for out in outs), strict=True):
            torch.testing.assert_close(ours, expected)


def state_of(group: ProcessGroup | None, config: Config = CONFIG) -> dict[str, Tensor]:
    layer = build(config, placement=Placement(group), dtype=torch.bfloat16)
    initialize_(layer, 5)
    return dict(layer.state_dict())


def test_initial_weights_are_the_same_at_every_group_size(ranks: RankPool) -> None:
    whole = state_of(None)
    assert {name for name, x in whole.items() if x.dtype == torch.float32} == {
        "conv1d.weight", "decay.A_log", "decay.dt_bias",
    }  # fmt: skip
    rates = whole["decay.A_log"].exp()
    torch.testing.assert_close(rates, torch.linspace(0.01, 16, VALUE_HEADS))
    assert (whole["decay.dt_bias"] == 1).all()
    for rank, local in enumerate(ranks.run(state_of, world=2)):
        layer = GatedDeltaNet(HIDDEN, CONFIG, dtype=torch.bfloat16)
        half = KEY_HEADS * KEY_DIM // 2
        first = local["in_proj_qkvz.weight"][:half]
        assert torch.equal(first, whole["in_proj_qkvz.weight"][rank * half : (rank + 1) * half])
        assert torch.equal(local["in_proj_ba.weight"], whole["in_proj_ba.weight"])
        assert torch.equal(local["decay.A_log"], whole["decay.A_log"].chunk(2)[rank])
        assert layer.conv1d.weight.shape[0] == 2 * len(local["conv1d.weight"])


def test_initial_weights_of_a_state_space(ranks: RankPool) -> None:
    whole = state_of(None, STATE_SPACE)
    assert {name for name, x in whole.items() if x.dtype == torch.float32} == {
        "conv1d.weight", "conv1d.bias", "state_space.A_log", "state_space.D", "state_space.dt_bias",
    }  # fmt: skip
    torch.testing.assert_close(whole["state_space.A_log"].exp(), torch.arange(1.0, VALUE_HEADS + 1))
    for rank, local in enumerate(ranks.run(state_of, STATE_SPACE, world=2)):
        for name in ("state_space.A_log", "state_space.D", "norm.weight"):
            assert torch.equal(local[name], whole[name].chunk(2)[rank])
        half = VALUE_HEADS * KEY_DIM // 2
        expected = whole["in_proj.weight"][rank * half : (rank + 1) * half]
        assert torch.equal(local["in_proj.weight"][:half], expected)


def test_sizes_that_do_not_divide(ranks: RankPool) -> None:
    config = GatedDeltaNetConfig(**{**vars(CONFIG), "num_key_heads": 3, "num_value_heads": 6})
    with pytest.raises(ValueError, match=r"num_key_heads=3 is not divisible by tp=2; use tp in \{1, 3\}"):
        ranks.run(state_of, config, world=2)
    message = r"num_groups=3 neither divides tp=2 nor is divisible by it; use tp in \{1, 3, 6\}"
    with pytest.raises(ValueError, match=message):
        ranks.run(state_of, Mamba2Config(**{**vars(STATE_SPACE), "num_heads": 6, "num_groups": 3}), world=2)
    with pytest.raises(ValueError, match="num_heads=8 is not a multiple of num_groups=3"):
        Mamba2Config(**{**vars(STATE_SPACE), "num_groups": 3})
    sizes = vars(CONFIG)
    with pytest.raises(ValueError, match="num_value_heads=8 is not a multiple of num_key_heads=3"):
        GatedDeltaNetConfig(**{**sizes, "num_key_heads": 3})
    with pytest.raises(ValueError, match="key_head_dim=0 must be at least 1"):
        GatedDeltaNetConfig(**{**sizes, "key_head_dim": 0})
    with pytest.raises(ValueError, match="activation='gelu' is unknown; use 'silu'"):
        GatedDeltaNetConfig(**{**sizes, "activation": "gelu"})
