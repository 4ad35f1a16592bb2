"""FP8 by blocks on the way out: the published recipe, the same bits from files and live ranks, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

from ckpt import Grid, Layout, Place, layout_for, load_hf, merge, reshard, stream_hf
from ckpt.cli import app
from ckpt.files.block_fp8 import is_quantized, quantize

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]

# Over 4 ranks every block of 128 x 128 lies on several ranks, and the last ones are smaller.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 30}


def test_a_scale_is_the_largest_magnitude_of_its_block_over_448() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.rand(200, 1)
    weight[:128, 128:256] = 0
    weight[128:, 256:] = 1e-44
    numbers, scales = quantize(weight)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (2, 3))
    for i in range(2):
        for j in range(3):
            part = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            if weight[part].any() and weight[part].abs().max() > 1e-30:
                assert scales[i, j] == weight[part].abs().max() / 448
                assert numbers[part].float().abs().max() == 448
                assert torch.equal(numbers[part].float(), (weight[part] / scales[i, j]).to(torch.float8_e4m3fn).float())
            else:
                assert not (numbers[part].float() * scales[i, j]).abs().gt(1e-37).any()


def half_steps(weight: Tensor, scales: Tensor) -> Tensor:
    """Half the distance between neighbouring numbers of FP8 at each weight."""
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    exponent = (weight / wide).abs().clamp(min=2.0**-6).log2().floor()
    return wide * torch.exp2(exponent - 4)


def stream(group: Any, folder: str, layout: Layout) -> dict[str, Tensor]:
    place = Place(tp=(group.rank(), 4))
    tensors = load_hf(folder, layout, place, dtype=torch.bfloat16)
    return {name: tensor.clone() for name, tensor in stream_hf(tensors, layout, group, place, format="fp8")}


@pytest.mark.slow
def test_files_and_live_ranks_give_the_same_fp8(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, ranks: Any, tmp_path: Path
) -> None:
    source = checkpoint("qwen3-moe", **SIZES, moe_intermediate_size=160)
    out = tmp_path / "out"
    merge(source, tmp_path / "plain", dtype=torch.bfloat16)
    reshard(tmp_path / "plain", tmp_path / "shards", Grid(tp=4))
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "shards"), str(out), "--format", "fp8"])
    assert result.exit_code == 0, result.output
    written, plain = read_all(out), read_all(tmp_path / "plain")
    merge(tmp_path / "plain", tmp_path / "whole", format="fp8", max_shard_size="100KB")
    assert_same(read_all(tmp_path / "whole"), written)
    for streamed in ranks.run(stream, str(source), layout_for(source), world=4):
        assert_same(streamed, written)
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in written.values()) == 2 * 4 + 4 * 3 + 3
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["quantization_config"]["weight_block_size"]) == ("bfloat16", [128, 128])
    assert "model.layers.0.mlp.gate" in config["quantization_config"]["modules_to_not_convert"]
    # Read back, each weight is within half a step of FP8, and half a step of bf16.
    merge(out, tmp_path / "back")
    for name, tensor in read_all(tmp_path / "back").items():
        weight = plain[name].float()
        if name + "_scale_inv" in written:
            allowed = half_steps(weight, written[name + "_scale_inv"]) + weight.abs() * 2**-8
            assert ((tensor.float() - weight).abs() <= allowed).all(), name
        else:
            assert torch.equal(tensor, plain[name]), name


def test_transformers_finds_the_projections_that_are_quantized(
    checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    """transformers replaces the modules that the config names, and its own operation gives the values."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear, replace_with_fp8_linear

    for name in ("llama-bias", "deepseek"):
        out = tmp_path / name
        merge(checkpoint(name), out, dtype=torch.bfloat16, format="fp8")
        config = transformers.AutoConfig.from_pretrained(out)
        given = dict(config.quantization_config)
        quantization = transformers.FineGrainedFP8Config(**given)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model = replace_with_fp8_linear(model, given["modules_to_not_convert"], quantization, pre_quantized=True)
        replaced = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, FP8Linear)}
        written = read_all(out)
        assert replaced == {key for key in written if key + "_scale_inv" in written and ".experts." not in key}
        values = load_hf(out, layout_for(out))
        key = "model.layers.0.self_attn.o_proj.weight"
        expected = Fp8Dequantize(None)._dequantize_one(written[key], written[key + "_scale_inv"], torch.bfloat16)
        assert torch.equal(values[key], expected)


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.3.block_sparse_moe.experts.7.w2.weight", True),
        ("model.language_model.layers.0.mlp.gate_up_proj.weight", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.3.self_attn.q_norm.weight", False),
        ("model.visual.blocks.0.mlp.gate_proj.weight", False),
        ("lm_head.weight", False),
        ("model.embed_tokens.weight", False),
    ],
)
def test_projections_of_layers_are_quantized(name: str, quantized: bool) -> None:
    assert is_quantized(name, (256, 256)) is quantized


def test_an_unknown_format_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='int4' is unknown; use 'fp8'"):
        merge(checkpoint("llama"), tmp_path / "out", format="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format='int4' is unknown; use 'fp8'"):
        next(stream_hf({}, layout_for(checkpoint("llama")), format="int4"))  # type: ignore[arg-type]


def test_the_command_names_stacked_experts_that_stay(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for name, kept in (
        ("gpt-oss", "model.layers.*.mlp.experts.down_proj, model.layers.*.mlp.experts.gate_up_proj"),
        ("qwen3-moe", None),
    ):
        out = tmp_path / name
        result = CliRunner().invoke(app, ["convert", str(checkpoint(name)), str(out), "--format", "fp8"])
        assert result.exit_code == 0
        reason = "stacked experts stay as they are, because vLLM reads no block scales for them"
        assert (f"{reason}: {kept}" in result.stdout) if kept else (reason not in result.stdout)
