"""Loading a checkpoint with transformers, patched by hf-patches."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

import ckpt
from ckpt import Checkpoint, agree
from ckpt.layout import HEADS, classifies_sequences, labels_of, quantization_of
from ckpt.transfer import load_blocks
from hf_patches import FAMILIES, Patch, TensorParallel, decoder_layers, patch
from parallel_models import Adapters, EngineOptions, Grid, Role
from parallel_models.engine import prediction_layers, require_base, share_base_, stored_dtype
from parallel_models.training import release, shard_over_dp
from rl_models.backends.transformers.adapters import adapter_tensors, add, base_tensors, reset
from rl_models.backends.transformers.engine import TransformersEngine
from rl_models.backends.transformers.slices import UnloadedModel, allocate, fill_randomly, model_without_memory

_SCORE = r"score\.(weight|bias)"


def _from_config(
    config: PreTrainedConfig, role: Role, num_labels: int
) -> tuple[Callable[..., PreTrainedModel], dict[str, str]]:
    """Return the function that makes a role's model, and the options of `model_without_memory`.

    A value model of text has no head of a language model. A model that sees images keeps that head, beside the value
    head, so that transformers' own class reads its saves.
    """
    sees = FAMILIES.get(config.model_type) is not None
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if role == "causal_lm":
        return partial(auto.from_config, trust_remote_code=False), {"may_have": _SCORE}
    if type(config) not in auto._model_mapping:
        raise ValueError(
            f"backend='transformers' has no {role} of model_type={config.model_type!r}: transformers has no causal "
            "language model of this type; use backend='parallel'"
        )
    language_model = auto._model_mapping[type(config)]
    config.num_labels = num_labels
    if role == "value" and not sees:
        names = {"may_lack": _SCORE, "may_have": r"(lm_head|embed_out)\.weight"}
        return _token_classification(language_model)._from_config, names
    return _with_score(language_model)._from_config, {"may_lack": _SCORE}


def _token_classification(language_model: Any) -> Any:
    """Return a class with the decoder of a language model and the value head `score` in place of its own head.

    transformers has such classes for some families only. Saved configs name the class in one way for every family.
    """
    base = next(kind for kind in language_model.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    members = {"__module__": language_model.__module__, "base_model_prefix": language_model.base_model_prefix}
    name = f"{base.__name__.removesuffix('PreTrainedModel')}ForTokenClassification"
    return type(name, (GenericForTokenClassification, base), members)


def _with_score(language_model: Any) -> Any:
    """Return a class of language models with a value head `score` beside its own head."""

    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        language_model.__init__(self, config, *args, **options)
        self.score = nn.Linear(config.get_text_config().hidden_size, config.num_labels)

    # Under the name of transformers' own class, which a saved config names and conversions of tensors go by.
    members = {"__init__": build, "__module__": language_model.__module__}
    return type(language_model.__name__, (language_model,), members)


def load(
    checkpoint: Checkpoint, role: Role, grid: Grid, options: EngineOptions, base: TransformersEngine | None = None
) -> TransformersEngine:
    """Load a checkpoint with transformers and patch it; refusals are the same on every rank.

    With `base` only the adapters and a value head are new, and the other tensors belong to `base`.
    """
    if options.sequence_parallel:
        raise ValueError(
            "backend='transformers' does not offer sequence_parallel=True; leave it out, and divide long sequences "
            "with dims=ParallelDims(cp=...)"
        )
    model, files, lacked = agree(lambda: _build(checkpoint, role, grid, options), grid.everyone)
    patched, lora = agree(lambda: _patch(model, checkpoint, role, grid, options, base), grid.everyone)
    if model.config.model_type not in FAMILIES and (grid.everyone is None or grid.everyone.rank() == 0):
        warnings.warn(
            f"{checkpoint.path}: {type(model).__name__} is not in hf-patches' table of families; accepted by this "
            f"{patched.proof}",
            stacklevel=2,
        )
    if grid.everyone is not None:
        shard_over_dp(model, decoder_layers(patched.backbone), grid)
    if base is not None:
        share_base_(model, base.model)
    allocate(model, grid.device)
    fill_randomly(model, lacked)
    blocks = {name: block for name, block in files.blocks.items() if base is None or name in HEADS}
    load_blocks(files.checkpoint, blocks, base_tensors(model), group=grid.everyone)
    if lora is not None:
        reset(model, lora.options, lora.layout)
    patched.probe()
    release(model)  # all is sharded, as the optimizer must find it
    with torch.no_grad():
        # A new value head starts as zeros, as on the native backend; the probe needs other weights.
        for name in lacked:
            model.get_parameter(name).zero_()
    if lora is not None and lora.files is not None:
        into = adapter_tensors(model, lora.layout)  # a value head among them
        ckpt.load_adapter(lora.files, lora.layout, into=into, group=grid.everyone)
    engine = TransformersEngine(model, patched, role, grid, files, None if lora is None else lora.layout)
    engine.shares_prefixes = options.share_prefixes
    return engine


def _tensor_parallel(grid: Grid, options: EngineOptions) -> TensorParallel | None:
    """Return the ranks that share each layer; None for one rank."""
    tp, ep = grid.dims.tp, grid.dims.ep
    if ep not in (1, tp):
        raise ValueError(
            f"backend='transformers' distributes experts over the ranks of tp={tp}, got ep={ep}; use ep={tp}"
        )
    if tp == 1 or grid.tensor_mesh is None:
        return None
    if options.lora is not None:
        raise ValueError(
            f"backend='transformers' does not offer lora with tp={tp}: transformers' plans shard its own linears, and "
            "PEFT puts other layers in their place; use dp and cp, or backend='parallel'"
        )
    return TensorParallel(grid.tensor_mesh, experts=ep > 1)


def _build(checkpoint: Checkpoint, role: Role, grid: Grid, options: EngineOptions) -> UnloadedModel:
    """Build a model without memory."""
    config = _readable_config(checkpoint)
    # Stay in evaluation mode: with dropout the policy that learns would differ from the policy that acted.
    dtype = options.dtype or stored_dtype(checkpoint)
    labels = 1 if role == "causal_lm" else labels_of(checkpoint, options.num_labels)
    from_config, load_options = _from_config(config, role, labels)
    predicting = [rf"(.*\.)?{re.escape(layer)}.*" for layer in prediction_layers(checkpoint)]
    load_options["may_have"] = "|".join([load_options.get("may_have", "$^"), *predicting])
    unpatched = model_without_memory(from_config, config, checkpoint, dtype, grid.device, **load_options)
    model = unpatched.model
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped GEMM does not take fp64
    if role == "value" and classifies_sequences({"architectures": model.config.architectures}):
        # A reward model: its head has no bias, and is saved without one again.
        model.score.bias = None
        unpatched = unpatched._replace(lacked=[name for name in unpatched.lacked if name != "score.bias"])
    for module in model.modules():
        # FSDP2 needs one dtype in a module. Modules whose parameters are all in fp32 (ERNIE 4.5's routers) keep it.
        if len({parameter.dtype for parameter in module.parameters() if parameter.requires_grad}) > 1:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
        if isinstance(module, nn.Embedding):
            # Packed batches have no padding: the pad token trains like any other token.
            module.padding_idx = None
    if role != "value" and getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(
            f"{checkpoint.path}: the language-model head has a bias, which no backend computes; use a checkpoint "
            "without one (ERNIE 4.5: use_bias=false), or load it as a Critic"
        )
    return unpatched


def _patch(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    role: Role,
    grid: Grid,
    options: EngineOptions,
    base: TransformersEngine | None,
) -> tuple[Patch, Adapters | None]:
    """Patch and shard a model, whose ranks meet in the proof, and give it adapters."""
    patched = patch(
        model,
        family="auto",
        value_head=role != "causal_lm",
        fused_head=role != "value",
        sequence_parallel_group=grid.group("cp"),
        router_replay=None,
        keep_probabilities=False if role == "value" else options.kept_probabilities,
        recompute=options.recompute,
        tiled_mlp=options.tiled_mlp,
        offload_activations=options.offload_activations,
        probe=False,
        tensor_parallel=_tensor_parallel(grid, options),
    )
    if options.share_prefixes and patched.state.is_recurrent:
        raise ValueError(
            f"share_prefixes=True does not go with the recurrent layers of {type(model).__name__}: no response gets "
            "the state behind its prompt; leave share_prefixes out"
        )
    lora = None if options.lora is None else add(model, options.lora, checkpoint, role)
    if base is not None:
        require_base(model, base.model)
    return patched, lora


def _readable_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the config as transformers reads it, from the file once.

    Raises:
        ValueError: Weights are quantized, or transformers does not read the config.
    """
    path = checkpoint.path
    if (quantization := quantization_of(checkpoint.config)) is not None:
        raise ValueError(
            f"{path} holds weights in {quantization['quant_method']}, which backend='transformers' does not train; "
            f"`ckpt merge {path} OUT` makes plain weights, or use backend='parallel'"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, for a field of a wrong type or an unknown family
        raise ValueError(f"transformers does not read {path}/config.json: {' '.join(str(error).split())}") from None
    return config
