"""vLLM's own reader takes the adapters of every family, and makes of them what PEFT makes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapted_models import peft
from tests.test_adapter_families import adapted, expert_targets
from tests.test_parity_models import ACTORS, MIXTURES, MODELS, checkpoint
from tokenizers import Tokenizer as Words, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen2VLVideoProcessor
from transformers.models.pixtral import modeling_pixtral

from rl_train.engines import in_vllm_names

pytestmark = pytest.mark.vllm

# What vLLM 0.28 says of models that it does not build, or whose adapters it does not take.
REFUSED = {
    "qwen2-window-tied": "Sliding window for some but all layers is not supported",
    "kimi-k2.5": "KimiK25ForConditionalGeneration.* is not supported for LoRA",
    # A CPU build has neither Triton nor CUTLASS.
    "olmo-hybrid": "module 'triton' has no attribute",
    "kimi-linear": "No module named 'cutlass'",
    # It has experts without a gate on GPUs alone.
    **dict.fromkeys(("nemotron-h", "nemotron-h-latent"), "is_act_and_mul=False is supported only for CUDA"),
    "glm4": r"expected target modules in .* but received .*gate_up_proj",  # its names of the halves are in no file
}
# Fields of published configurations that vLLM needs, and transformers does not write.
PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax": {"scoring_func": "sigmoid"},
    "glm4v-moe": {"text_config": {"use_qk_norm": False}},
    # On a CPU vLLM asks for the architecture of the text part, too.
    "qwen3-vl": {"text_config": {"architectures": ["Qwen3ForCausalLM"]}},
    "qwen3-vl-moe": {"text_config": {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}},
    "kimi-k2.5": {"architectures": ["KimiK25ForConditionalGeneration"]},
}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`vllm(folder, fields)`: vLLM's reader of adapters, for the model in a folder, without an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm.config import set_current_vllm_config
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.worker_manager import WorkerLoRAManager
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.model_executor.model_loader import get_model
        from vllm.model_executor.models import registry
        from vllm.v1.attention.backends import fa_utils
        from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

        # vLLM looks at the class of each model in a process of its own, which takes seconds.
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())

        # vLLM 0.28 imports names that newer releases of transformers lack; towers alone need them.
        for name in ("PixtralRotaryEmbedding", "position_ids_in_meshgrid"):
            patch.setattr(modeling_pixtral, name, torch.nn.Identity, raising=False)

        # A worker on a CPU does the same to it.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)

        # A CPU build lacks the kernels of latent attention, and what it makes of that layer's weights.
        patch.setattr(fa_utils, "compile_flash_attn_varlen_func_from_specs", None, raising=False)
        from vllm.v1.attention.backends.mla.prefill import flash_attn

        patch.setattr(flash_attn, "flash_attn_varlen_func", lambda: None)
        patch.setattr(MLAAttention, "process_weights_after_loading", lambda *_: None)

        def reader(folder: Path, fields: dict[str, Any]) -> WorkerLoRAManager:
            config = EngineArgs(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", load_format="dummy", enforce_eager=True,
                max_model_len=16, max_num_batched_tokens=64, max_num_seqs=2, enable_lora=True, max_lora_rank=8,
                max_loras=1, enable_mixed_moe_lora_format=True, limit_mm_per_prompt={"image": 0, "video": 0},
                hf_overrides=fields,
            ).create_engine_config()  # fmt: skip
            with set_current_vllm_config(config):
                model = get_model(vllm_config=config)
                manager = WorkerLoRAManager(config, torch.device("cpu"), {})
                manager.create_lora_manager(model, config)
            return manager

        # The groups of a mixture serve dense models, too.
        folder = tmp_path_factory.mktemp("mixture")
        checkpoint(folder, "qwen3-moe", 2)
        config = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=16).create_engine_config()
        with set_current_vllm_config(config):
            init_worker_distributed_environment(config, 0, f"file://{folder}/store", 0, "gloo")
        yield reader
        cleanup_dist_env_and_memory()


def write_processor(folder: Path) -> None:
    """Write the tokenizer and the processors of images and videos that vLLM reads beside a vision-language model."""
    words = ["<pad>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokens = Words(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokens.add_special_tokens(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<pad>", pad_token="<pad>")
    for each in (tokenizer, Qwen2VLImageProcessorPil(), Qwen2VLVideoProcessor()):
        each.save_pretrained(folder)


def in_layers(name: str) -> str:
    """Return the name of a module from the number of its layer on; models have several names before it."""
    return (
        name.partition("layers.")[2]
        .replace("block_sparse_moe.", "mlp.")
        .replace(".attn.", ".self_attn.")
        .replace(".moe.", ".")
    )


def of_vllm(manager: Any, adapter: Path) -> dict[str, Tensor]:
    """Return what vLLM adds to the weight of each layer; `.w1`, `.w2` and `.w3` are gates, downs and ups of experts."""
    from vllm.lora.request import LoRARequest

    lora = manager._load_adapter(LoRARequest("ours", 1, str(adapter), is_3d_lora_weight=True))
    layers = manager._adapter_manager
    layers.add_adapter(lora)
    assert lora.loras.keys() <= layers.modules.keys(), "vLLM skips adapters of other modules silently"
    deltas = {}
    for name, weights in lora.loras.items():
        if isinstance(weights.lora_a, list):
            experts = [f"{name}.{part}" for part in ("w1", "w2", "w3")]
            parts = experts if name.endswith(".experts") else layers.packed_modules[name]
            factors = zip(parts, weights.lora_b, weights.lora_a, strict=True)
            deltas |= {in_layers(part): up @ down for part, up, down in factors if up is not None}
        else:
            deltas[in_layers(name)] = weights.lora_b @ weights.lora_a
    assert deltas
    return deltas


def of_peft(model: Any, adapter: Path, *, interleaved: bool) -> dict[str, Tensor]:
    """Return what PEFT adds to the weight of each layer, with the names and orders of `of_vllm`."""
    deltas = {}
    theirs = peft().PeftModel.from_pretrained(model, adapter)
    for name, module in theirs.named_modules():
        if not hasattr(module, "lora_A") or not module.lora_A:
            continue
        delta, layer = module.get_delta_weight("default"), in_layers(name.replace(".base_layer", ""))
        parameter = getattr(module, "parameter_name", "weight")
        if parameter == "weight":
            deltas[layer] = delta
            continue
        delta = delta.transpose(1, 2) if interleaved else delta  # gpt-oss has inputs before outputs
        if parameter == "down_proj":
            deltas[f"{layer}.w2"] = delta
        else:
            gate, up = (delta[:, ::2], delta[:, 1::2]) if interleaved else delta.chunk(2, dim=1)
            deltas |= {f"{layer}.w1": gate, f"{layer}.w3": up}
    return deltas


def vllm_reads(vllm: Any, name: str, model: Any, folder: Path) -> None:
    """Compare what vLLM and PEFT make of adapters on all linears, and on routed experts."""
    experts = expert_targets(folder / "base")
    assert bool(experts) == (name in MIXTURES)
    adapted(folder / "base", folder / "adapter", targets=["all-linear", *experts])
    shutil.copytree(folder / "adapter", folder / "sent")
    file = folder / "sent" / "adapter_model.safetensors"
    save_file(dict(in_vllm_names(load_file(file).items(), folder / "base")), file)
    deltas = of_vllm(vllm(folder / "base", PUBLISHED.get(name, {})), folder / "sent")
    torch.testing.assert_close(deltas, of_peft(model, folder / "adapter", interleaved=name == "gpt-oss"))


@pytest.mark.parametrize("name", ACTORS)
def test_vllm_reads_what_peft_reads(vllm: Any, name: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "base", name, 2)
    if "vision_config" in MODELS[name][1]:
        write_processor(tmp_path / "base")
    if name in REFUSED:
        with pytest.raises(Exception, match=REFUSED[name]):
            vllm_reads(vllm, name, model, tmp_path)
    else:
        vllm_reads(vllm, name, model, tmp_path)
