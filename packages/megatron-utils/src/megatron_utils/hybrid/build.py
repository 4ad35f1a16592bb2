"""`build_hybrid`: this rank's chunks of a hybrid model, and what is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_utils.core_version import INSTALLED
from megatron_utils.gpt.config import transformer_config
from megatron_utils.gpt.layer_spec import LayerSpec
from megatron_utils.gpt.packed_model import Role, build_chunks, padded_vocabulary
from megatron_utils.grid import MegatronGrid
from megatron_utils.hybrid.description import describe_hybrid
from parallel_layers import ModelConfig

if TYPE_CHECKING:
    from megatron_utils.hybrid.model import PackedHybridModel

# Megatron-Core's letter of a layer, what it is, and the packages whose kernels it needs.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "M": ("Mamba-2", ("mamba_ssm", "causal_conv1d", "einops")),
    "G": ("a gated delta network", ("fla",)),
    "*": ("attention", ()),
    "-": ("an MLP", ()),
    "E": ("a mixture of experts", ()),
}
# Package of Python -> the name by which it is installed.
_DISTRIBUTIONS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "einops": "einops", "fla": "fla-core"}


def build_hybrid(
    config: Any,
    pattern: str | None,
    grid: MegatronGrid,
    *,
    role: Role = "causal_lm",
    dtype: torch.dtype = torch.float32,
    layer_spec: LayerSpec = "local",
    value_bias: bool = False,
    num_labels: int = 1,
    layers_per_stage: Sequence[int] | None = None,
    **options: Any,
) -> list[PackedHybridModel]:
    """Build this rank's chunks of Megatron-Core's `HybridModel`: one chunk, or one for each virtual stage.

    A layer is one mixer with a norm before it and a residual around it: Mamba-2 (arXiv:2405.21060), a gated delta
    network (arXiv:2412.06464), attention, an MLP or a mixture of experts. Weights are uninitialised memory, as in
    `build_gpt`; their names are those of Megatron's state dict, `decoder.layers.{i}` with i counting inside the chunk.

    Args:
        config: The input of `ModelConfig.from_hf`, which describes embedding, attention, MLPs, experts and head. Its
            `num_hidden_layers` is the number of layers of the pattern.
        pattern: A letter for each layer: M (Mamba-2), G (gated delta network), * (attention), - (MLP), E (mixture of
            experts); "MEM*-" has five layers. None: the layers and the sizes of Mamba-2 are those of the config, which
            is one of Nemotron-H.
        grid: The active grid, without context parallelism.
        role: "causal_lm", or "value" for fp32 numbers of each token, one for each label.
        dtype: The dtype of the parameters; `A_log` and `D` of Mamba-2 are fp32.
        layer_spec: "local" or "transformer_engine", as in `build_gpt`.
        value_bias: The head of a value model has a bias.
        num_labels: The rows of the head of a value model.
        layers_per_stage: The layers of each of the `pp * virtual_stages` chunks; None: equal parts.
        options: `sequence_parallel`, or any field of `TransformerConfig`: the sizes `mamba_num_heads`,
            `mamba_head_dim`, `mamba_state_dim`, `mamba_num_groups`, `linear_num_key_heads`, `linear_key_head_dim`,
            `linear_num_value_heads`, `linear_value_head_dim`, `linear_conv_kernel_dim`; `attention_output_gate`.

    Raises:
        ValueError: A letter is unknown, the number of layers differs from the config's, the config has what a hybrid
            model cannot express, the grid or an option is not supported, or as `transformer_config`.
        ImportError: Megatron-Core has no hybrid model that takes packed batches, or kernels of a layer are missing.
    """
    if not INSTALLED.hybrid:
        raise ImportError(
            f"megatron-core {importlib.metadata.version('megatron-core')} is installed, and hybrid models need 0.18 or "
            'newer: pip install "megatron-core>=0.18" (Python 3.12 or newer)'
        )
    model = ModelConfig.from_hf(config)
    if pattern is None:
        model, pattern, sizes = describe_hybrid(model, grid.dims.tp)
        options = sizes | options
    _check_pattern(pattern, model)
    if grid.dims.cp > 1:
        raise ValueError(f"cp={grid.dims.cp} is not supported by hybrid models on Megatron-Core; use cp=1")
    if "G" in pattern and grid.dims.tp > 1 and options.get("sequence_parallel") is False:
        raise ValueError(
            "sequence_parallel=False with tp > 1 is not supported by gated delta networks: Megatron-Core would not sum "
            "the gradients of the norm of their heads; leave it out"
        )
    from megatron_utils.hybrid.model import PackedHybridModel, stack_spec

    parts = (grid.virtual_stages or 1) * grid.dims.pp
    megatron_config = transformer_config(
        model,
        grid.dims,
        dtype=dtype,
        virtual_stages=grid.virtual_stages,
        expert_tp=grid.expert_tp,
        layers_per_stage=None if layers_per_stage is None else list(layers_per_stage),
        **options,
    )
    stages = "|".join(_parts(pattern, layers_per_stage or [len(pattern) // parts] * parts))

    def make(stage: int | None, pre_process: bool, post_process: bool) -> PackedHybridModel:
        return PackedHybridModel(
            megatron_config,
            model,
            stack_spec(megatron_config, model, layer_spec, grid.groups, mixture="E" in pattern),
            role,
            padded_vocabulary(model.vocab_size, grid),
            value_bias,
            num_labels,
            hybrid_layer_pattern=stages,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=grid.groups,
            vp_stage=stage,
        )

    return build_chunks(grid, make)


def _parts(pattern: str, sizes: Sequence[int]) -> list[str]:
    """Return the consecutive parts of a pattern."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [pattern[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _check_pattern(pattern: str, model: ModelConfig) -> None:
    kinds = ", ".join(f"{letter} ({name})" for letter, (name, _) in _KINDS.items())
    if unknown := sorted(set(pattern) - _KINDS.keys()):
        raise ValueError(f"pattern={pattern!r} has {', '.join(map(repr, unknown))}; a layer is one of {kinds}")
    if len(pattern) != model.num_layers:
        raise ValueError(
            f"pattern={pattern!r} has {len(pattern)} layers and num_hidden_layers is {model.num_layers}; give a letter "
            "for each layer"
        )
    if "E" in pattern and not any(model.moe):
        raise ValueError(f"pattern={pattern!r} has experts (E), and {model.family} has none; use - for an MLP")
    decoder = model.decoder
    misfits = {
        "latent attention": decoder.latent is not None,
        f"norm_placement={decoder.norm_placement!r}": decoder.norm_placement != "pre",
        "a bias of attention's output": decoder.output_bias,
        "layers with fields of their own": any(model.own_fields),
    }
    if found := [name for name, has in misfits.items() if has]:
        raise ValueError(f"{model.family} has {', '.join(found)}, which no layer of a hybrid model has here")
    needed = {package: letter for letter in set(pattern) for package in _KINDS[letter][1]}
    if missing := sorted(package for package in needed if importlib.util.find_spec(package) is None):
        names = " ".join(_DISTRIBUTIONS[package] for package in missing)
        layers = " and ".join(sorted({_KINDS[needed[package]][0] for package in missing}))
        raise ImportError(f"{layers} on Megatron-Core needs kernels that are not installed: pip install {names}")
