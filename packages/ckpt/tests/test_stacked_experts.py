"""Files in the form that transformers 5 has in memory, as `save_pretrained(..., save_original_format=False)` writes
them: the experts of a layer stacked, Mixtral's under other names.

What is expected comes from the same model in the form that the hub has, of which nothing is stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from safetensors.torch import save_file
from torch import Tensor

from ckpt import Grid, layout_for, load_hf, merge, reshard, save_hf, verify

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]

# What a layer of experts has in these files and not in the hub's form.
IN_MEMORY = {
    "qwen3-moe": {"mlp.experts.gate_up_proj": (4, 48, 32), "mlp.experts.down_proj": (4, 32, 24)},
    "mixtral": {
        "mlp.experts.gate_up_proj": (4, 96, 32),
        "mlp.experts.down_proj": (4, 32, 48),
        "mlp.gate.weight": (4, 32),
    },
    "deepseek": {"mlp.experts.gate_up_proj": (4, 48, 32), "mlp.experts.down_proj": (4, 32, 24)},
}
MOE = list(IN_MEMORY)
GRIDS = [Grid(), Grid(tp=2, ep=2), Grid(tp=4, ep=4, etp=1), Grid(tp=2, ep=4, etp=2, pp=3)]
# Numbers of a family, a grid and a target.
QUICK = {(0, 1, 0), (0, 3, 1), (1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 0)}


def in_memory(name: str, checkpoint: Checkpoints, **options: Any) -> Path:
    return checkpoint(name, save_original_format=False, **options)


@pytest.mark.parametrize("name", MOE)
def test_transformers_writes_what_is_read_here(name: str, checkpoint: Checkpoints, read_all: ReadAll) -> None:
    """Gate in front of up, each expert `[rows, columns]` as a linear layer has them: no transposition."""
    stacked, separate = read_all(in_memory(name, checkpoint)), read_all(checkpoint(name))
    prefix = "model.layers.2."
    only = {key.removeprefix(prefix) for key in stacked.keys() - separate.keys() if key.startswith(prefix)}
    assert only == IN_MEMORY[name].keys()
    for key, shape in IN_MEMORY[name].items():
        assert stacked[prefix + key].shape == shape
    module, gate, up = ("block_sparse_moe", "w1", "w3") if name == "mixtral" else ("mlp", "gate_proj", "up_proj")
    down = "w2" if name == "mixtral" else "down_proj"
    for expert in range(4):
        own = {part: separate[f"{prefix}{module}.experts.{expert}.{part}.weight"] for part in (gate, up, down)}
        gate_up = stacked[prefix + "mlp.experts.gate_up_proj"][expert]
        assert torch.equal(gate_up, torch.cat([own[gate], own[up]]))
        assert torch.equal(stacked[prefix + "mlp.experts.down_proj"][expert], own[down])


@pytest.mark.parametrize(
    ("name", "target", "grid"),
    [
        # The quick run has each family on two grids, each grid and each target of a family at most once.
        pytest.param(name, target, grid, marks=() if (number, index, turn) in QUICK else pytest.mark.slow)
        for number, name in enumerate(MOE)
        for index, grid in enumerate(GRIDS)
        for turn, target in enumerate(("parallel", "megatron", "megatron_te"))
    ],
    ids=str,
)
def test_every_place_loads_the_same_as_from_separate_experts(
    name: str, target: Any, grid: Grid, checkpoint: Checkpoints, assert_same: AssertSame
) -> None:
    stacked, separate = in_memory(name, checkpoint), checkpoint(name)
    layout, of_separate = layout_for(stacked, target), layout_for(separate, target)
    for place in grid.places():
        with counted("preadv") as reads:
            tensors = load_hf(stacked, layout, place)
        assert_same(tensors, load_hf(separate, of_separate, place))
        # No byte of an expert that lies on another rank; only the vocabulary's padding is not read.
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert 0.9 * held <= sum(reads) <= held


@pytest.mark.parametrize("name", MOE)
def test_it_goes_through_files_and_is_saved_as_the_hub_has_it(
    name: str, checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    source, separate = in_memory(name, checkpoint, max_shard_size="60KB"), checkpoint(name)
    assert len(list(source.glob("*.safetensors"))) > 1
    assert verify(source, separate).equal
    layout = layout_for(source)
    save_hf(tmp_path / "saved", load_hf(source, layout), layout)
    reshard(source, tmp_path / "shards", Grid(tp=2, ep=2), target="megatron")
    merge(tmp_path / "shards", tmp_path / "merged")
    for folder in ("saved", "merged"):
        assert_same(read_all(tmp_path / folder), read_all(separate))


@pytest.mark.parametrize("name", MOE)
def test_a_difference_in_one_expert_is_found(
    name: str, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    tensors = read_all(in_memory(name, checkpoint))
    tensors["model.layers.2.mlp.experts.gate_up_proj"][3, 1, 2] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint(name) / "config.json").read_text())
    (difference,) = verify(checkpoint(name), tmp_path).differences
    gate = "block_sparse_moe.experts.3.w1" if name == "mixtral" else "mlp.experts.3.gate_proj"
    assert (difference.name, difference.first) == (f"model.layers.2.{gate}.weight", (1, 2))


def test_square_experts_keep_the_order_of_the_source(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    """transformers reads a square matrix as it is, so experts that it saved with outputs first must stay so."""
    source = checkpoint("qwen3-vl-moe", moe_intermediate_size=16)
    stored, layout = read_all(source), layout_for(source)
    assert stored["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    save_hf(tmp_path / "saved", load_hf(source, layout), layout)
    places = list(Grid(tp=2, ep=2).places())
    save_hf(tmp_path / "from-a-grid", [load_hf(source, layout, place) for place in places], layout, places)
    reshard(source, tmp_path / "shards", Grid(tp=2, ep=2), target="megatron")
    merge(tmp_path / "shards", tmp_path / "merged")
    merge(source, tmp_path / "converted")
    for folder in ("saved", "from-a-grid", "merged", "converted"):
        assert_same(read_all(tmp_path / folder), stored)
        assert verify(source, tmp_path / folder).equal
    # Files with inputs first keep their order, too, and are another model to transformers.
    published = tmp_path / "published"
    published.mkdir()
    turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in stored.items()}
    save_file(turned, published / "model.safetensors", metadata={"format": "pt"})
    (published / "config.json").write_text((source / "config.json").read_text())
    merge(published, tmp_path / "as-published")
    assert_same(read_all(tmp_path / "as-published"), turned)
    names = {difference.name for difference in verify(source, published).differences}
    assert names == {name for name in layout.canonical if ".mlp.experts." in name}
