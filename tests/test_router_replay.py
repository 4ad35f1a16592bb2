"""Routing recorded on one backend replays on another: transformers' own mixtures and Megatron-Core, on any grid."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import Place, layout_for, load_hf
from megatron_utils import collect_routing, make_replay, megatron_grid, moe_layers
from megatron_utils.gpt import build_gpt
from megatron_utils.optimizer import wrap_data_parallel
from megatron_utils.pipeline_parallel import run_schedule
from megatron_utils.testing import cpu_stand_in, tiny_config
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.moe import RouterReplay
from parallel_layers.testing import RankPool

LENGTHS = (11, 1, 17, 6)
# The last two layers are mixtures; those of gpt-oss are all.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-moe": tiny_config(
        "qwen3_moe", num_hidden_layers=3, num_experts=8, num_experts_per_tok=4, mlp_only_layers=[0]
    ),
    "deepseek-v3": tiny_config("deepseek_v3", num_hidden_layers=3, n_shared_experts=1),
    "deepseek-v2": tiny_config(
        "deepseek_v2", num_hidden_layers=3, n_shared_experts=1, num_experts_per_tok=4, topk_method="greedy"
    ),
    "qwen2-moe": tiny_config("qwen2_moe", num_hidden_layers=3, num_experts=8, num_experts_per_tok=4),
    "gpt-oss": tiny_config("gpt_oss", num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=4),
}
MOE_LAYERS = {name: [0, 1, 2] if name == "gpt-oss" else [1, 2] for name in MODELS}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 37, (n,), generator=generator) for n in LENGTHS]


def moved_routing(layers: int) -> list[Tensor]:
    """Experts that no router would choose, `[L_i, layers, k]` for each sequence."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.stack([torch.randperm(8, generator=generator)[:4] for _ in range(n * layers)]).view(n, layers, 4)
        for n in LENGTHS
    ]


def on_transformers(path: Path, layers: list[int], routing: list[Tensor] | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(log-probs of all tokens, the routers' gradients, what was recorded for each sequence)."""
    import transformers

    from hf_patches import patch

    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    patch(model, router_replay=True)
    packed = PackedSequence.from_sequences(sequences())
    replay = RouterReplay()
    if routing is not None:
        replay = RouterReplay.from_tensor(torch.cat(routing), layers, num_experts=8)
    log_probs = model(packed=packed, router_replay=replay).log_probs
    log_probs.sum().backward()
    mixtures = [model.model.layers[layer].mlp for layer in layers]
    routers = [(mixture.gate if hasattr(mixture, "gate") else mixture.router).weight.grad for mixture in mixtures]
    return log_probs.detach(), torch.stack(routers), packed.split(replay.as_tensor())


class Expected(NamedTuple):
    """Return for transformers what its own routing gives and is, and what `moved_routing` gives, with the gradients."""

    path: Path
    free: Tensor
    own: list[Tensor]
    replayed: Tensor
    gradients: Tensor


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """`expected("qwen3-moe")`: of each model once."""
    import transformers

    @cache
    def compute(name: str) -> Expected:
        path = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODELS[name]))
        generator = torch.Generator().manual_seed(0)
        for tensor in model.state_dict().values():
            tensor.normal_(0, 0.2, generator=generator)
        model.save_pretrained(path)
        layers = MOE_LAYERS[name]
        free, _, own = on_transformers(path, layers, None)
        replayed, gradients, _ = on_transformers(path, layers, moved_routing(len(layers)))
        assert not torch.allclose(free, replayed)
        return Expected(path, free, own, replayed, gradients)

    return compute


def on_megatron(
    group: ProcessGroup, path: Path, layers: list[int], dims: ParallelDims, routing: list[Tensor] | None
) -> tuple[Tensor, dict[int, Tensor], list[Tensor]]:
    """The same; the gradients of the layers that this rank holds."""
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size)) as grid:
        (chunk,) = build_gpt(path, grid, layers_per_stage=None if dims.pp == 1 else [2, 1])
        axes = {"tp": grid.groups.tp, "pp": grid.groups.pp, "ep": grid.groups.ep, "etp": grid.groups.expt_tp}
        place = Place(**{axis: (part.rank(), part.size()) for axis, part in axes.items()})
        layout = layout_for(path, target="megatron", layers=None if dims.pp == 1 else [2, 1])
        into = {key: value for key, value in chunk.state_dict().items() if isinstance(value, Tensor)}
        load_hf(path, layout, place, into={key: into[key] for key in layout.at(place)}, group=group)
        wrapped = wrap_data_parallel([chunk], grid)
        packed = PackedSequence.from_sequences(sequences(), multiple_of=dims.tp * 2 * dims.cp)
        assert moe_layers(chunk.config) == layers
        replay = RouterReplay() if routing is None else make_replay(routing, packed, layers, num_experts=8)
        labels = next_token_labels(packed)
        (output,) = run_schedule(
            wrapped, [packed], grid, labels=[labels], loss=lambda output, _: output.log_probs.sum(), routing=[replay]
        )
        gradients = {
            layer.layer_number - 1: layer.mlp.router.weight.main_grad
            for layer in chunk.decoder.layers
            if layer.layer_number - 1 in layers
        }
        (recorded,) = collect_routing([replay], [packed], chunk.config, grid)
        return torch.cat(packed.split(output.log_probs)), gradients, recorded


GRIDS = [ParallelDims(), ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(dp=2, ep=2)]
PLAIN = {("qwen3-moe", ParallelDims(tp=2))}


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param(name, dims, marks=() if (name, dims) in PLAIN else pytest.mark.slow)
        for name in MODELS
        for dims in GRIDS
    ],
    ids=str,
)
def test_routing_travels_between_backends(
    ranks: RankPool, expected: Callable[[str], Expected], name: str, dims: ParallelDims
) -> None:
    path, free, own, replayed, gradients = expected(name)
    layers = MOE_LAYERS[name]
    moved = moved_routing(len(layers))
    # Recorded on transformers, replayed on Megatron-Core.
    for log_probs, held, recorded in ranks.run(on_megatron, path, layers, dims, moved, world=dims.world_size):
        torch.testing.assert_close(log_probs, replayed, rtol=1e-5, atol=1e-5)
        for layer, gradient in held.items():
            torch.testing.assert_close(gradient, gradients[layers.index(layer)], rtol=1e-4, atol=1e-5)
        assert all(torch.equal(one.long(), other) for one, other in zip(recorded, moved, strict=True))
    # Recorded on Megatron-Core, replayed on transformers: what each would choose itself.
    _, _, recorded = ranks.run(on_megatron, path, layers, dims, None, world=dims.world_size)[0]
    assert all(torch.equal(a.long().sort(-1)[0], b.sort(-1)[0]) for a, b in zip(recorded, own, strict=True))
    again, _, _ = on_transformers(path, layers, [table.long() for table in recorded])
    torch.testing.assert_close(again, free, rtol=1e-5, atol=1e-5)
