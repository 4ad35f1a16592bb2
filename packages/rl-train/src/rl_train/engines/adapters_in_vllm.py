"""Adapters in vLLM's names and file format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ckpt.files import ADAPTER, ADAPTER_WEIGHTS
from ckpt.layout import EXPERTS, load_config
from rl_train.weight_sync.buckets import NamedTensors

# The experts' module in transformers and in vLLM, by model_type, where the names differ.
_MIXTRAL, _GEMMA4 = (".mlp.experts.", ".block_sparse_moe.experts."), (".experts.", ".moe.experts.")
_MODULES = {"mixtral": _MIXTRAL, "minimax_m2": _MIXTRAL, "gemma4": _GEMMA4, "gemma4_text": _GEMMA4}


def write_adapter(folder: Path, adapter: dict[str, Any], named_tensors: NamedTensors, model: str | Path) -> None:
    """Write an adapter of a model to a folder, for vLLM to read; `adapter` is its adapter_config.json."""
    tensors = {name: tensor.cpu().clone() for name, tensor in in_vllm_names(named_tensors, model)}
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER).write_text(json.dumps(adapter), encoding="utf-8")


def in_vllm_names(named_tensors: NamedTensors, model: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter with the names of vLLM's modules; vLLM skips adapters of other names silently."""
    modules = _MODULES.get(load_config(model)["model_type"], ("", ""))
    if modules is _GEMMA4 and not _has_moe_in_gemma4():
        modules = ("", "")
    for name, tensor in named_tensors:
        yield name.replace(*modules), tensor


def _has_moe_in_gemma4() -> bool:
    """Say whether the installed vLLM, up to 0.30, has a module `moe` around the experts of Gemma 4."""
    from vllm.model_executor.models import gemma4

    return hasattr(gemma4, "Gemma4MoE")


def has_stacked_experts(adapter: dict[str, Any]) -> bool:
    """Say whether an adapter_config.json has routed experts.

    Raises:
        ValueError: It has one of their two weights, and vLLM takes both or none.
    """
    targets = [name for name in adapter.get("target_parameters") or () if f".{name}".endswith(EXPERTS)]
    for module, _, last in (name.rpartition(".") for name in targets):
        for weight in ("gate_up_proj", "down_proj"):
            if f"{module}.{weight}" not in targets:
                raise ValueError(
                    f"vLLM takes adapters of gate_up_proj and down_proj of the experts together, and {module} has one "
                    f"of {last} alone; add experts.{weight} to the targets, or send merged weights"
                )
    return bool(targets)
