"""`backend="parallel"`: the native models over parallel-layers, loaded by ckpt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

import ckpt
from ckpt import agree
from parallel_layers import ParallelDims
from parallel_layers.linear.low_rank import LowRank
from parallel_layers.lora import LoraOptions, add_lora_, hold_in_float8_
from parallel_layers.mlp.activations import XIELU
from parallel_layers.model import ModelConfig
from parallel_layers.rotary import RotaryEmbedding
from rl_models.engines.adapters import describe
from rl_models.engines.carried import carry
from rl_models.engines.checkpoint import stored_dtype
from rl_models.engines.engine import Role
from rl_models.engines.options import EngineOptions, RouterLosses
from rl_models.engines.parallel.engine import ParallelEngine, shared_copies
from rl_models.engines.sharing import load_heads, require_base, share_base_
from rl_models.grid import Grid
from rl_models.models.decoder import Chunk, ModelOptions
from rl_models.models.language_models import CausalLM, CausalLMWithValue, PackedModel, ValueModel

if TYPE_CHECKING:
    from rl_models.engines.parallel.vision import Vision

MODELS: dict[Role, type[PackedModel]] = {
    "causal_lm": CausalLM,
    "value": ValueModel,
    "causal_lm_with_value": CausalLMWithValue,
}


def require_fit(config: ModelConfig, dims: ParallelDims, options: EngineOptions) -> None:
    """Raise ValueError for an option that does not apply to this grid or this model."""
    if options.sequence_parallel and dims.tp == 1:
        raise ValueError("sequence_parallel=True needs tp > 1; leave it out or set dims=ParallelDims(tp=...)")
    options.pipeline.require_pipeline(dims.pp)
    for given, text in (
        (dims.ep > 1, f"ep={dims.ep} is"),
        (options.router_losses != RouterLosses(), f"router_losses={options.router_losses} is"),
    ):
        if given and not any(config.moe):
            raise ValueError(f"{text} for a mixture of experts, which {config.family} is not; leave it out")
    for given, text in (
        (dims.cp > 1, f"cp={dims.cp}: a prompt and its responses stay on one rank; use tp or pp"),
        (
            options.router_losses.sequence_balance != 0,
            f"router_losses={options.router_losses}: a response would be a sequence of its own; use balance",
        ),
    ):
        if given and options.share_prefixes:
            raise ValueError(f"share_prefixes=True does not go with {text}, or leave share_prefixes out")
    # See `Grid.expert_tensor_parallel`.
    whole_experts = any(config.moe) and dims.dp * dims.cp % dims.ep != 0
    ckpt.layout_for(config.hf).require_tp(dims.tp, 1 if whole_experts else None)


def load(
    path: str, role: Role, grid: Grid, options: EngineOptions, base: ParallelEngine | None = None
) -> ParallelEngine:
    """Load a checkpoint; each rank reads only its own slices, and refusals are the same on every rank.

    With `base` only the adapters and a value head are new, and the rest is that engine's.
    """
    group = grid.group("tp")
    sequence_parallel = group is not None if options.sequence_parallel is None else options.sequence_parallel
    pipeline = options.pipeline
    places = _places(grid, pipeline.virtual_stages)

    def build() -> tuple[PackedModel, ckpt.Layout, ckpt.AdapterLayout | None, Vision | None]:
        config = ModelConfig.from_hf(path)
        require_fit(config, grid.dims, options)
        config = replace(config, decoder=replace(config.decoder, context_parallel=options.context_parallel))
        losses = options.router_losses
        config = config.with_router_losses(
            balance_loss=losses.balance, sequence_balance_loss=losses.sequence_balance, z_loss=losses.z
        )
        split = pipeline.split
        if base is not None and grid.dims.pp > 1:  # by cost, another head might divide the layers in another way
            split = [len(layers) for layers in base.layout.chunk_layers(places[0].grid)]
        layout = ckpt.layout_for(path, target="parallel", role=role, layers=split)
        require_predictions(layout, options)
        layout = replace(layout, predicts=options.mtp_loss_scaling_factor > 0)
        model_options: ModelOptions = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "context_group": grid.group("cp"),
            "expert_group": grid.group("ep"),
            "expert_tensor_parallel": grid.expert_tensor_parallel,
            "chunks": _chunks(layout, places),
            "recompute": options.recompute,
            "tiled_mlp": options.tiled_mlp,
            "offload_activations": options.offload_activations,
            "float8": options.float8,
            "keep_probabilities": options.kept_probabilities,
            "tp_invariant": options.tp_invariant,
            "prediction_layers": layout.prediction_layers,
            "mtp_loss": layout.predicts,
            "dtype": options.dtype or stored_dtype(path),
            # The checkpoint replaces all parameters: do not initialise them.
            "device": "meta",
        }
        model = MODELS[role](config, **model_options)
        if base is not None and layout.family.tower:
            raise ValueError(f"{path} has a vision tower, which models do not share; load a second model of its own")
        vision = _vision(path, model, grid, layout.family.carried[0][0]) if layout.family.tower else None
        if layout.carried and vision is None and model.chunks[0].first:
            carry(model, layout, path, "meta")
        if options.lora is None:
            return model, layout, None, vision
        lora, adapters = describe(options.lora, layout, path)
        add_lora_(model, lora, sources=ckpt.adaptable(layout)[0], chosen=adapters.chosen)
        if options.base_format is not None:
            hold_in_float8_(model, ckpt.float8_sides(layout, places))
        if vision is not None and vision.tower is not None:
            vision.tower.requires_grad_(False)
        if base is not None:
            require_base(model, base.model)
        return model, layout, adapters, vision

    model, layout, adapters, vision = agree(build, grid.everyone)
    for module in [model] if base is None else _own_parts(model):
        module.to_empty(device=grid.device)
    if vision is not None and vision.tower is not None:
        model.add_module("tower", vision.tower)
    for module in model.modules():
        if isinstance(module, XIELU):
            module.reset_parameters()  # a checkpoint may lack the activation's constants
        if isinstance(module, LowRank):
            module.reset_parameters()
            module.eval()  # dropout is for updates alone
    if isinstance(model, ValueModel) and model.chunks[-1].last:
        # A causal language model's checkpoint has no value head, which then starts as zeros.
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.requires_grad_(True)  # adapters have frozen all parameters
    state = model.state_dict()
    if base is not None:
        load_heads(path, layout, places, state, grid)
    for place in places if base is None else ():
        copies = shared_copies(layout, place)
        stored = {copy: torch.empty_like(state[own]) for copy, own in copies.items()}
        ckpt.load_hf(path, layout, place, into=state | stored, group=grid.everyone)
        other = [(copy, own) for copy, own in copies.items() if not torch.equal(stored[copy], state[own])]
        _warn_of_other_copies(path, layout.at(place), other)
    if adapters is not None and not isinstance(options.lora, LoraOptions):
        parts = [{name: state[name] for name in adapters.at(place) if name in state} for place in places]
        ckpt.load_adapter(str(options.lora), adapters, places, into=parts, group=grid.everyone)
    engine = ParallelEngine(model, layout, places, grid, options, path, adapters, vision)
    if base is not None:
        share_base_(model, base.model)
    return engine


def _own_parts(model: PackedModel) -> list[nn.Module]:
    """Return the modules that a model on a shared base has for itself: adapters, a value head, rotary tables."""
    kinds = (LowRank, RotaryEmbedding)
    return [module for name, module in model.named_modules() if isinstance(module, kinds) or name == "score"]


def _vision(path: str, model: PackedModel, grid: Grid, prefix: str) -> Vision:
    """Return the vision of a vision-language model, with the tower on the first stage; `prefix`: see `Tower`.

    Raises:
        ImportError: hf-patches is not installed.
        ValueError: The tower adds to more layers than the first stage has.
    """
    try:
        from rl_models.engines.parallel.vision import Vision  # imported here: models of text alone need no transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the vision tower of {model.config.family} needs {error.name}, which is not installed; in a clone of "
            "this project: pip install ./packages/hf-patches"
        ) from error
    chunk, dtype = model.chunks[0], next(model.parameters()).dtype
    vision = Vision(path, grid, prefix if chunk.first else None, dtype=dtype, device=grid.device)
    if chunk.first and vision.depth > len(chunk.layers):
        raise ValueError(
            f"the vision tower of {model.config.family} adds to the outputs of {vision.depth} layers, and the first "
            f"stage has {len(chunk.layers)}; use a smaller pp, or PipelineOptions(split=[{vision.depth}, ...])"
        )
    return vision


def require_predictions(layout: ckpt.Layout, options: EngineOptions) -> None:
    """Raise ValueError where multi-token-prediction layers are to be trained and cannot be."""
    if not options.mtp_loss_scaling_factor:
        return
    given = f"mtp_loss_scaling_factor={options.mtp_loss_scaling_factor} trains multi-token-prediction layers, "
    if not layout.prediction_layers:
        raise ValueError(f"{given}and the checkpoint has none for role={layout.role!r}; leave it out")
    for hinders, what in (
        (layout.tied, "tied embeddings"),
        (options.tp_invariant, "tp_invariant=True"),
        (options.lora is not None, "lora"),
        (options.share_prefixes, "share_prefixes=True"),
        # torch's schedule would go backward twice through what two layers share.
        (options.pipeline.schedule == "zero-bubble", "schedule='zero-bubble'"),
    ):
        if hinders:
            raise ValueError(f"{given}which is not offered with {what}; leave one of them out")


def _warn_of_other_copies(path: str, blocks: Mapping[str, ckpt.Block], other: list[tuple[str, str]]) -> None:
    """Say that copies in the files are not used: vLLM and Megatron-Core share the model's own tensors, too."""
    for copy, own in other:
        names = blocks[copy].names[0], blocks[own].names[0]
        warnings.warn(
            f"{path}: {names[0]} differs from {names[1]}. The model uses {names[1]} for both, as vLLM and "
            f"Megatron-Core do, and a save writes {names[1]} for both",
            stacklevel=6,
        )


def _places(grid: Grid, virtual_stages: int) -> list[ckpt.Place]:
    """Return the place of each chunk of this rank."""
    dims = grid.dims
    return [
        ckpt.Place(
            tp=(grid.rank("tp"), dims.tp),
            pp=(grid.rank("pp"), dims.pp),
            vpp=(chunk, virtual_stages),
            ep=(grid.rank("ep"), dims.ep),
            etp=None if grid.expert_tensor_parallel else (0, 1),
        )
        for chunk in range(virtual_stages)
    ]


def _chunks(layout: ckpt.Layout, places: Sequence[ckpt.Place]) -> list[Chunk]:
    """Return the layers of each chunk of this rank."""
    layers = layout.chunk_layers(places[0].grid)
    return [Chunk(layers[p.chunk], first=p.chunk == 0, last=p.chunk == len(layers) - 1) for p in places]
