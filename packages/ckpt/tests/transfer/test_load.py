from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt import Block, Checkpoint, Grid, Piece, Place, layout_for, load_hf, save_hf
from ckpt.files.boxio import Staging
from ckpt.transfer.load import load_blocks

Checkpoints = Callable[..., Path]


def heads(weight: Tensor, count: int, rank: int, tp: int) -> Tensor:
    """This rank's heads of a projection [count * D, ...]; with fewer heads than ranks, ranks share."""
    size = weight.shape[0] // count
    held = range(rank * count // tp, max((rank + 1) * count // tp, rank * count // tp + 1))
    return torch.cat([weight[head * size : (head + 1) * size] for head in held])


def expected(state: dict[str, Tensor], name: str, rank: int, tp: int) -> Tensor:
    """Return what the native layers hold, written out from the definition of each layer."""
    if "qkv_proj" in name:
        q, k, v = (state[name.replace("qkv_proj", f"{part}_proj")] for part in "qkv")
        return torch.cat([heads(q, 4, rank, tp), heads(k, 2, rank, tp), heads(v, 2, rank, tp)])
    if "gate_up_proj" in name:
        return torch.cat(
            [state[name.replace("gate_up_proj", part)].chunk(tp)[rank] for part in ("gate_proj", "up_proj")]
        )
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return state[name].chunk(tp, dim=1)[rank]
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = -(-state[name].shape[0] // tp)
        padded = torch.cat([state[name], torch.zeros(rows * tp - state[name].shape[0], state[name].shape[1])])
        return padded[rank * rows : (rank + 1) * rows]
    return state[name]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-bias", "llama-head-dim", "qwen2", "qwen2-tied"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_every_rank_gets_its_shard_and_reads_only_that(
    name: str, tp: int, max_shard_size: str, checkpoint: Checkpoints, read_all: Callable[[Path], dict[str, Tensor]]
) -> None:
    folder = checkpoint(name, max_shard_size)
    state = read_all(folder)
    layout = layout_for(folder)
    for rank in range(tp):
        with counted("preadv") as reads:
            tensors = load_hf(folder, layout, Place(tp=(rank, tp)))
        for local, tensor in tensors.items():
            assert torch.equal(tensor, expected(state, local, rank, tp)), local
        # Padding costs no read, so a rank reads at most what it holds.
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert 0 < sum(reads) <= held
        assert sum(reads) >= 0.9 * held


def test_whole_rows_are_one_read_and_columns_one_read_a_row(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    with counted("preadv") as reads:
        tensors = load_hf(folder, layout_for(folder), Place(tp=(1, 2)))
    per_layer = 2 + 3 + 2 + 32 + 32  # norms; q, k, v; gate, up; the rows of o_proj and down_proj
    assert len(reads) == 2 * per_layer + 3
    assert len(tensors) == 2 * 6 + 3


@pytest.mark.parametrize("target", ["parallel", "megatron"])
def test_bytes_go_straight_into_the_tensors(
    target: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU nothing passes through the staging buffer, whole rows, columns and experts alike, unless it is
    cast."""
    staged: list[Any] = []
    view = Staging.view

    def seen(self: Staging, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        staged.append(shape)
        return view(self, shape, dtype, device)

    monkeypatch.setattr(Staging, "view", seen)
    folder = checkpoint("qwen3-moe")
    layout = layout_for(folder, target)
    for place in (Place(), *Grid(tp=2, ep=2, etp=2).places()):
        tensors = load_hf(folder, layout, place)
        load_hf(folder, layout, place, into={name: torch.empty_like(tensor) for name, tensor in tensors.items()})
    assert not staged
    load_hf(folder, layout, dtype=torch.bfloat16)
    assert staged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_are_cast_on_the_fly(dtype: torch.dtype, checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    layout, place = layout_for(folder), Place(tp=(1, 2))
    plain = load_hf(folder, layout, place)
    for name, tensor in load_hf(folder, layout, place, dtype=dtype).items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, plain[name].to(dtype))


def test_into_fills_existing_tensors_of_any_type_and_stride(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    layout, place = layout_for(folder), Place(tp=(1, 2))
    plain = load_hf(folder, layout, place)
    into = {name: torch.nn.Parameter(torch.full_like(tensor, 7.0)) for name, tensor in plain.items()}
    down = "model.layers.1.mlp.down_proj.weight"
    into[down] = torch.nn.Parameter(torch.zeros(24, 32, dtype=torch.bfloat16).t())
    norm = "model.norm.weight"
    into[norm] = torch.nn.Parameter(torch.zeros(64)[::2])
    loaded = load_hf(folder, layout, place, into=into)
    for name, tensor in plain.items():
        assert torch.equal(into[name], tensor.to(into[name].dtype)), name
        assert loaded[name].data_ptr() == into[name].data_ptr()
    with pytest.raises(ValueError, match=r"into lacks model.norm.weight"):
        load_hf(folder, layout, place, into={name: t for name, t in into.items() if name != norm})
    with pytest.raises(ValueError, match=r"into\['model.norm.weight'\] has shape \(3,\), the layout has \(32,\)"):
        load_hf(folder, layout, place, into={**into, norm: torch.zeros(3)})


def test_a_tensor_larger_than_the_staging_buffer_is_cast_in_parts(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    plain = load_hf(folder, layout_for(folder), Place(tp=(1, 2)))
    monkeypatch.setattr("ckpt.files.boxio.STAGING_BYTES", 100)
    for name, tensor in load_hf(folder, layout_for(folder), Place(tp=(1, 2)), dtype=torch.float64).items():
        assert torch.equal(tensor, plain[name].double())


def test_a_single_file_can_be_loaded(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    assert (
        load_hf(folder / "model.safetensors", layout_for(folder)).keys() == load_hf(folder, layout_for(folder)).keys()
    )


def test_a_value_model_starts_from_a_causal_checkpoint(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    tensors = load_hf(folder, layout_for(folder, role="value"), Place(tp=(0, 2)))
    assert not {"lm_head.weight", "score.weight", "score.bias"} & tensors.keys()
    assert "model.norm.weight" in tensors


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def broken(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


@pytest.mark.parametrize(
    "alias", ["score.weight", "v_head.summary.weight", "v_head.weight", "reward_head.weight", "lm_head.weight"]
)
def test_value_heads_are_found_under_the_names_in_use(alias: str, broken: Path) -> None:
    head = torch.randn(1, 32)
    change(broken, lambda tensors: (tensors.pop("lm_head.weight"), tensors.update({alias: head})))
    tensors = load_hf(broken, layout_for(broken, role="value"), Place(tp=(1, 2)))
    assert torch.equal(tensors["score.weight"], head)


@pytest.mark.parametrize("module", ["score", "v_head.summary", "v_head", "reward_head"])
def test_a_value_heads_bias_is_found_and_saved_under_the_name_of_the_class(
    module: str, broken: Path, tmp_path: Path, read_all: Callable[[Path], dict[str, Tensor]]
) -> None:
    head = {"weight": torch.randn(1, 32), "bias": torch.randn(1)}
    named = {f"{module}.{kind}": tensor for kind, tensor in head.items()}
    change(broken, lambda tensors: (tensors.pop("lm_head.weight"), tensors.update(named)))
    layout = layout_for(broken, role="value")
    tensors = load_hf(broken, layout)
    save_hf(tmp_path / "saved", tensors, layout)
    written = read_all(tmp_path / "saved")
    for kind, tensor in head.items():
        assert torch.equal(tensors[f"score.{kind}"], tensor)
        assert torch.equal(written[f"score.{kind}"], tensor)
    assert not {name for name in written if "head" in name}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight; set tie_word_embeddings=true"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"unexpected: model.extra \(in model.safetensors\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"model.norm.weight has shape \(31,\) in model.safetensors, expected \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 32, dtype=torch.bfloat16)}),
            r"self_attn.qkv_proj.weight joins tensors of types .*bfloat16.*pass dtype=",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(edit: Any, message: str, broken: Path) -> None:
    change(broken, edit)
    with pytest.raises(ValueError, match=message):
        load_hf(broken, layout_for(broken), Place(tp=(0, 2)))


def test_places_and_types_that_hold_no_weights_are_refused(checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    integers = {name: tensor.to(torch.int32) for name, tensor in tensors.items()}
    for options, message in (
        ({"device": "meta"}, "device is on the meta device"),
        ({"into": meta}, r"into\['model.embed_tokens.weight'\] is on the meta device"),
        ({"dtype": torch.int8}, "dtype=torch.int8 cannot hold weights"),
        ({"into": integers}, r"into\['model.embed_tokens.weight'\] is of type torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            load_hf(source, layout, **options)  # type: ignore[arg-type]


def test_rotary_buffers_and_a_stored_tied_head_are_passed_over(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    change(broken, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    change(broken, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load_hf(broken, layout_for(broken))


def test_blocks_of_the_files_tensors_are_loaded_without_a_layout(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    save_file({"a": a, "b": b}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    blocks = {
        "stack": Block(
            (2, 2, 3), tuple(Piece(n, ((0, 2), (0, 3)), ((i, i + 1), (0, 2), (0, 3))) for i, n in enumerate("ba"))
        ),
        "one": Block.whole("a", (2, 3)),
    }
    into = {"stack": torch.empty(2, 2, 3, dtype=torch.bfloat16), "one": torch.empty(2, 3)}
    with counted("preadv") as reads:
        load_blocks(Checkpoint.open(tmp_path), blocks, into)
    assert torch.equal(into["stack"], torch.stack((b, a)).bfloat16())
    assert torch.equal(into["one"], a)
    assert sum(reads) == 72
    with pytest.raises(ValueError, match=r"one has shape \(3, 2\), the layout has \(2, 3\)"):
        load_blocks(Checkpoint.open(tmp_path), blocks, {**into, "one": torch.empty(3, 2)})
