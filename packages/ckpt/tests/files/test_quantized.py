"""FP8 and MXFP4 checkpoints: each slice has the bits of the reference dequantization, through every reader."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import counted
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from ckpt import Checkpoint, Grid, Place, layout_for, load_hf, merge, reshard, save_hf, verify
from ckpt.cli import app
from ckpt.files.boxio import Staging, read_box
from ckpt.layout.pieces import Box, extents

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
Fp8 = tuple[Tensor, Tensor]

E4M3 = torch.float8_e4m3fn
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def expanded(scale: Tensor, shape: Iterable[int], block: tuple[int, int]) -> Tensor:
    """The scale of each element."""
    rows, columns = shape
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]


def to_blocks(weight: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Fp8:
    """A weight in FP8 and the scales of its blocks, the last of which may be smaller."""
    rows, columns = weight.shape
    scale = torch.ones(-(-rows // block[0]), -(-columns // block[1]), dtype=dtype)
    for i, j in ((i, j) for i in range(scale.shape[0]) for j in range(scale.shape[1])):
        part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scale[i, j] = part.abs().max() / 448
    return (weight / expanded(scale.float(), weight.shape, block)).to(E4M3), scale


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint whose scales lie in another file than its weights."""
    folder.mkdir()
    files: dict[str, dict[str, Tensor]] = {"model-1-of-2.safetensors": {}, "model-2-of-2.safetensors": {}}
    for name, tensor in tensors.items():
        files[f"model-{1 + ('scale' in name)}-of-2.safetensors"][name] = tensor
    for file, held in files.items():
        save_file(held, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def converted(
    source: Path,
    out: Path,
    quantization: dict[str, Any],
    quantize: Callable[[Tensor], Fp8],
    scale_name: str,
    state: Any,
) -> tuple[Path, Path]:
    """A checkpoint with its projections in FP8, and the plain one that the reference formula makes of it, in bf16."""
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    stored: dict[str, Tensor] = {}
    plain = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    for name, tensor in state.items():
        stored[name] = plain[name]
        if name.endswith("_proj.weight") or "mqa" in name:
            stored[name], scale = quantize(tensor.float())
            stored[name.removesuffix("weight") + scale_name] = scale
            stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
            rows, columns = tensor.shape
            matrix = scale.reshape(scale.shape + (1,) * (2 - scale.dim())) if scale.numel() > 1 else scale.view(1, 1)
            block = tuple(-(-size // count) for size, count in zip((rows, columns), matrix.shape, strict=True))
            if quantization.get("weight_block_size"):
                block = tuple(quantization["weight_block_size"])
            wide = expanded(matrix, tensor.shape, block)  # type: ignore[arg-type]
            exact = quantization["quant_method"] == "fp8"
            product = stored[name].float() * wide.float() if exact else stored[name].to(wide.dtype) * wide
            plain[name] = product.to(torch.bfloat16)
    (out / "plain").mkdir(parents=True)
    save_file(plain, out / "plain" / "model.safetensors")
    (out / "plain" / "config.json").write_text(json.dumps(config))
    return write(out / "low", stored, {**config, "quantization_config": quantization}), out / "plain"


def per_row(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Fp8:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(dtype)
    return (weight / scale.float()).clamp(-448, 448).to(E4M3), scale


def per_tensor(weight: Tensor) -> Fp8:
    scale = weight.abs().max() / 448
    return (weight / scale).to(E4M3), scale


BLOCKS = {"quant_method": "fp8", "weight_block_size": [8, 16]}
SCHEMES: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Fp8], str]] = {
    "deepseek": ("deepseek", BLOCKS, lambda weight: to_blocks(weight, (8, 16)), "weight_scale_inv"),
    "fp8 of whole tensors": (
        "llama",
        {"quant_method": "fp8", "weight_block_size": None},
        per_tensor,
        "weight_scale_inv",
    ),
    "rows": ("qwen3-moe", COMPRESSED, per_row, "weight_scale"),
    "tensors": ("llama", {**COMPRESSED, "format": "naive-quantized"}, per_tensor, "weight_scale"),
}


# The quick run has blocks.
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(name, marks=() if name == "deepseek" else pytest.mark.slow) for name in SCHEMES],
)
def test_every_reader_sees_the_values(
    scheme: str, checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    """Slices over 4 ranks end inside blocks of 8 x 16."""
    model, quantization, quantize, name = SCHEMES[scheme]
    source = checkpoint(model)
    low, plain = converted(source, tmp_path, quantization, quantize, name, read_all(source))
    layout = layout_for(low)
    for grid in (Grid(), Grid(tp=4), Grid(tp=2, pp=layout.num_layers, ep=2 if layout.num_experts else 1)):
        for place in grid.places():
            narrow = load_hf(low, layout, place)
            assert_same(narrow, load_hf(plain, layout_for(plain), place))
            wide = load_hf(low, layout, place, dtype=torch.float32)
            assert all(torch.equal(wide[key].bfloat16(), value) for key, value in narrow.items())
    assert verify(low, plain).equal
    reshard(low, tmp_path / "shards", Grid(tp=4))
    merge(low, tmp_path / "merged")
    for folder in (tmp_path / "shards", tmp_path / "merged"):
        assert verify(folder, plain).equal
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    save_hf(tmp_path / "saved", load_hf(low, layout), layout, config=low)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(low), "--json"]).stdout)
    assert facts["quantization"] == quantization["quant_method"]
    assert set(facts["dtypes"]) == {"BF16"}
    assert facts["bytes"] < 2 * facts["parameters"]


def boxes(shape: tuple[int, ...], count: int) -> list[Box]:
    random.seed(0)
    edges = [[sorted(random.sample(range(size + 1), 2)) for size in shape] for _ in range(count)]
    return [tuple((start, stop) for start, stop in box) for box in edges]


def assert_boxes(folder: Path, name: str, whole: Tensor, count: int = 20) -> None:
    """Each box of a tensor is that of the reference, in the reference's dtype."""
    file, info = Checkpoint.open(folder).tensors[name]
    assert info.shape == whole.shape
    for box in boxes(info.shape, count):
        values = torch.empty(extents(box), dtype=whole.dtype)
        with open(folder / file, "rb") as opened:
            read_box(opened.fileno(), info, box, values, Staging(), "a tensor")
        assert torch.equal(values, whole[tuple(slice(start, stop) for start, stop in box)]), box


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_have_the_bits_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weights = {"X.weight": to_blocks(torch.randn(256, 384), (128, 128))}
    # A stack of experts: transformers names its parameter, not a weight of a module.
    stack = [to_blocks(torch.randn(128, 256), (128, 128)) for _ in range(3)]
    weights["experts.gate_up_proj"] = torch.stack([part[0] for part in stack]), torch.stack([part[1] for part in stack])
    tensors = {
        name + end: part for name, parts in weights.items() for end, part in zip(("", "_scale_inv"), parts, strict=True)
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write(tmp_path / "fp8", tensors, config)
    for name, (weight, scale) in weights.items():
        assert_boxes(folder, name, Fp8Dequantize(None)._dequantize_one(weight, scale, dtype))


def test_mxfp4_has_the_bits_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(60, 200, (3, 10, 4), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = write(tmp_path / "x", {f"{name}_blocks": blocks, f"{name}_scales": scales}, config)
    assert Checkpoint.open(folder).tensors.keys() == {name}
    for dtype in (torch.bfloat16, torch.float32):
        assert_boxes(folder, name, convert_moe_packed_tensors(blocks, scales, dtype=dtype), 50)


def test_every_rank_reads_its_slices_of_gpt_oss(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    """Slices over 4 ranks end inside blocks of 32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    source = checkpoint("gpt-oss", intermediate_size=64)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    plain = {name: tensor.bfloat16() for name, tensor in read_all(source).items()}
    low = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = low.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, blocks.shape[:3], dtype=torch.uint8)
        low[f"{name}_blocks"], low[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    write(tmp_path / "low", low, config | quantization)
    write(tmp_path / "plain", plain, config)
    for grid in (Grid(), Grid(tp=4), Grid(tp=2, ep=2)):
        layout = layout_for(tmp_path / "low")
        for place in grid.places():
            assert_same(load_hf(tmp_path / "low", layout, place), load_hf(tmp_path / "plain", layout, place))
    assert verify(tmp_path / "low", tmp_path / "plain").equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_rounds_the_product_to_the_type_of_the_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, scale = per_row(torch.randn(48, 32))
    folder = write(tmp_path / "x", {"X.weight": weight, "X.weight_scale": scale}, {"quantization_config": COMPRESSED})
    assert_boxes(folder, "X.weight", (weight.to(scale.dtype) * scale).to(dtype))
    groups = {**COMPRESSED, "config_groups": {"group_0": {"weights": {"block_structure": [16, 8]}}}}
    weight, scale = to_blocks(torch.randn(40, 32), (16, 8), torch.bfloat16)
    folder = write(tmp_path / "y", {"X.weight": weight, "X.weight_scale": scale}, {"quantization_config": groups})
    assert_boxes(folder, "X.weight", (weight.to(scale.dtype) * expanded(scale, weight.shape, (16, 8))).to(dtype))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quant_method='gptq', which is not read; pass the checkpoint that it was",
        ),
        ({"quant_method": "awq"}, "quant_method='awq'.*base_model"),
        ({"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes'.*dequantize\(\)\.save_pretrained\(OUT\)"),
        ({"quant_method": "hqq"}, "quant_method='hqq'.*library that made it"),
        ({**COMPRESSED, "format": "pack-quantized"}, "'compressed-tensors' with format='pack-quantized'"),
        ("fp8", "quant_method=None"),
    ],
)
def test_another_method_is_refused_by_name(quantization: Any, message: str, checkpoint: Checkpoints) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        layout_for({**config, "quantization_config": quantization})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"X.weight in .* has no X.weight_scale_inv, its scales"),
        ({"X.weight_scale_inv": torch.ones(2, 2)}, r"scales of shape \(2, 2\) do not cover \(20, 16\), with blocks of"),
        ({"X.weight_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}, "the scales are of type torch.uint8"),
    ],
)
def test_scales_that_do_not_fit_are_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    weight = torch.zeros(20, 16).to(E4M3)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    folder = write(tmp_path / "x", {"X.weight": weight, "Y": torch.ones(1), **tensors}, config)
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(folder)


def test_a_slice_reads_only_its_part(checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=64, intermediate_size=96)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    low, _ = converted(
        source, tmp_path, quantization, lambda weight: to_blocks(weight, (16, 16)), "weight_scale_inv", read_all(source)
    )
    layout = layout_for(low)
    stored = {name for name, (_, info) in Checkpoint.open(low).tensors.items() if hasattr(info, "stored")}
    with counted("preadv") as reads:
        load_hf(low, layout, Place(tp=(1, 4)))
    expected = 0
    for block in layout.at(Place(tp=(1, 4))).values():
        for piece in block.pieces:
            for rows, *rest in [extents(piece.local_range)] if piece.canonical_range else []:
                count = rows * (rest[0] if rest else 1)
                expected += count * (1 if piece.name in stored else 2)
                # One scale for 256 numbers; blocks that are cut count whole.
                expected += 4 * 4 * count // 256 if piece.name in stored else 0
    assert sum(reads) <= expected
