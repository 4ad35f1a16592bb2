"""`load_engine`: a native model over parallel-layers, loaded by ckpt onto its grid."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import ckpt
from ckpt import Checkpoint, agree
from ckpt.layout import adaptable
from ckpt.transfer import float8_sides
from parallel_layers import ModelConfig, ParallelDims, RotaryEmbedding
from parallel_layers.linear import LowRank
from parallel_layers.mlp import XIELU
from parallel_layers.model import add_lora_, hold_in_float8_
from parallel_models.engine.adapters import Adapters, describe
from parallel_models.engine.checkpoint import model_config, stored_dtype
from parallel_models.engine.engine import Role
from parallel_models.engine.grid import Grid
from parallel_models.engine.options import EngineOptions, RouterLosses
from parallel_models.engine.shared_base import load_heads, require_base, share_base_
from parallel_models.engine.vision import Vision, carry
from parallel_models.model.decoder import Chunk, ModelOptions
from parallel_models.model.language_models import CausalLM, CausalLMWithValue, ValueModel
from parallel_models.model.packed_model import PackedModel
from parallel_models.training.parallel_engine import ParallelEngine, shared_copies

# (checkpoint, model, grid, the prefix in files of a tower that is one module) -> the model's vision, with its tower on
# the first pipeline stage
BuildVision = Callable[[Checkpoint, PackedModel, Grid, str], Vision]

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
    for applies, text in (
        (dims.ep > 1, f"ep={dims.ep} is"),
        (options.router_losses != RouterLosses(), f"router_losses={options.router_losses} is"),
    ):
        if applies and not any(config.moe):
            raise ValueError(f"{text} for a mixture of experts, which {config.family} is not; leave it out")
    for applies, text in (
        (dims.cp > 1, f"cp={dims.cp}: a prompt and its responses stay on one rank; use tp or pp"),
        (
            options.router_losses.sequence_balance != 0,
            f"router_losses={options.router_losses}: a response would count as a separate sequence; use balance",
        ),
    ):
        if applies and options.share_prefixes:
            raise ValueError(f"share_prefixes=True does not go with {text}, or leave share_prefixes out")
    for applies, text, lack in (
        (
            options.base_format is not None,
            f"base_format={options.base_format!r}",
            "its projections are not held in FP8",
        ),
        (options.share_prefixes, "share_prefixes=True", "the state behind a prompt does not reach its responses"),
        (options.tp_invariant, "tp_invariant=True", "its sums follow the grid"),
    ):
        if applies and config.has_linear_attention:
            raise ValueError(
                f"{text} is not offered with the linear attention of {config.family}: {lack}; leave it out"
            )
    ckpt.layout_for(config.hf).require_tp(dims.tp, None if dims.expert_tensor_parallel else 1)


def load_engine(
    path: str | os.PathLike[str] | Checkpoint, role: Role, grid: Grid, options: EngineOptions
) -> ParallelEngine:
    """Load a checkpoint; every rank of the grid calls this, and reads only its own slices.

    A vision-language model computes text, and passes the tower's tensors through to its saves.

    Args:
        path: The folder of the checkpoint, or the opened checkpoint.
        role: The heads of the model.
        grid, options: The ranks and the options.

    Raises:
        ValueError: The checkpoint is broken, or an option does not fit the model or the grid; on every rank alike.
    """
    checkpoint = agree(lambda: Checkpoint.open(path), grid.everyone)
    return build_engine(checkpoint, role, grid, options).loaded("parallel", checkpoint, options)


def build_engine(
    checkpoint: Checkpoint,
    role: Role,
    grid: Grid,
    options: EngineOptions,
    base: ParallelEngine | None = None,
    *,
    build_vision: BuildVision | None = None,
) -> ParallelEngine:
    """Return the engine of a checkpoint, without `Engine.loaded`; refusals are the same on every rank.

    Args:
        checkpoint: What the checkpoint's config and headers say.
        role: The heads of the model.
        grid, options: The ranks and the options.
        base: An engine whose frozen base the new engine shares: only the adapters and a value head are new.
        build_vision: Makes the vision of a vision-language model. None: such a model computes text, and passes the
            tower's tensors through to its saves.
    """
    if options.deterministic:
        be_deterministic()
    places = _places(grid, options.pipeline.virtual_stages)
    built = agree(lambda: _build_model(checkpoint, role, grid, options, places, base, build_vision), grid.everyone)
    model, layout, adapters, vision = built.model, built.layout, built.adapters, built.vision
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
        load_heads(checkpoint, layout, places, state, grid)
    for place in places if base is None else ():
        copies = shared_copies(layout, place)
        stored = {copy: torch.empty_like(state[original]) for copy, original in copies.items()}
        ckpt.load_hf(checkpoint, layout, place, into=state | stored, group=grid.everyone)
        differing = [pair for pair in copies.items() if not torch.equal(stored[pair[0]], state[pair[1]])]
        _warn_of_other_copies(checkpoint.path, layout.at(place), differing)
    if adapters is not None and adapters.files is not None:
        targets = [{name: state[name] for name in adapters.layout.at(place) if name in state} for place in places]
        ckpt.load_adapter(adapters.files, adapters.layout, places, into=targets, group=grid.everyone)
    engine = ParallelEngine(model, layout, places, grid, options, None if adapters is None else adapters.layout, vision)
    if base is not None:
        share_base_(model, base.model)
    return engine


class _BuiltModel(NamedTuple):
    """The chunks of a rank without weights, the layout of their tensors, the adapters, and the vision."""

    model: PackedModel
    layout: ckpt.Layout
    adapters: Adapters | None
    vision: Vision | None


def _build_model(
    checkpoint: Checkpoint,
    role: Role,
    grid: Grid,
    options: EngineOptions,
    places: Sequence[ckpt.Place],
    base: ParallelEngine | None,
    build_vision: BuildVision | None,
) -> _BuiltModel:
    """Build the chunks of a rank on the meta device; ValueError for what does not fit."""
    group = grid.group("tp")
    config = model_config(checkpoint)
    require_fit(config, grid.dims, options)
    config = replace(config, decoder=replace(config.decoder, context_parallel=options.context_parallel))
    losses = options.router_losses
    config = config.with_router_losses(
        balance_loss=losses.balance, sequence_balance_loss=losses.sequence_balance, z_loss=losses.z
    )
    split = options.pipeline.split
    if base is not None and grid.dims.pp > 1:  # by cost, another head might divide the layers in another way
        split = [len(layers) for layers in base.layout.chunk_layers(places[0].grid)]
    layout = ckpt.layout_for(checkpoint, target="parallel", role=role, layers=split, num_labels=options.num_labels)
    require_predictions(layout, options)
    layout = replace(layout, predicts=options.mtp_loss_scaling_factor > 0)
    model_options: ModelOptions = {
        "group": group,
        "sequence_parallel": group is not None if options.sequence_parallel is None else options.sequence_parallel,
        "context_group": grid.group("cp"),
        "expert_group": grid.group("ep"),
        "expert_tensor_parallel": grid.dims.expert_tensor_parallel,
        "chunks": _chunks(layout, places),
        "recompute": options.recompute,
        "tiled_mlp": options.tiled_mlp,
        "offload_activations": options.offload_activations,
        "float8": options.float8,
        "keep_probabilities": options.kept_probabilities,
        "tp_invariant": options.tp_invariant,
        "prediction_layers": layout.prediction_layers,
        "mtp_loss": layout.predicts,
        "dtype": options.dtype or stored_dtype(checkpoint),
        # The checkpoint replaces all parameters: do not initialise them.
        "device": "meta",
    }
    labels = {} if role == "causal_lm" else {"num_labels": layout.num_labels}
    model = MODELS[role](config, **model_options, **labels)
    if base is not None and layout.family.tower:
        raise ValueError(
            f"{checkpoint.path} has a vision tower, which models cannot share; load the second model separately"
        )
    vision = None
    if layout.family.tower and build_vision is not None:
        vision = build_vision(checkpoint, model, grid, layout.family.carried[0][0])
    if layout.carried and vision is None and model.chunks[0].first:
        carry(model, layout, checkpoint, "meta")
    if options.lora is None:
        return _BuiltModel(model, layout, None, vision)
    adapters = describe(options.lora, layout, str(checkpoint.path))
    add_lora_(model, adapters.options, sources=adaptable(layout)[0], chosen=adapters.layout.chosen)
    if options.base_format is not None:
        hold_in_float8_(model, float8_sides(layout, places))
    if vision is not None and vision.tower is not None:
        vision.tower.requires_grad_(False)
    if base is not None:
        require_base(model, base.model)
    return _BuiltModel(model, layout, adapters, vision)


def _own_parts(model: PackedModel) -> list[nn.Module]:
    """Return the modules that a model on a shared base has for itself: adapters, a value head, rotary tables."""
    kinds = (LowRank, RotaryEmbedding)
    return [module for name, module in model.named_modules() if isinstance(module, kinds) or name == "score"]


def require_predictions(layout: ckpt.Layout, options: EngineOptions) -> None:
    """Raise ValueError where multi-token-prediction layers are to be trained and cannot be."""
    if not options.mtp_loss_scaling_factor:
        return
    option = f"mtp_loss_scaling_factor={options.mtp_loss_scaling_factor} trains multi-token-prediction layers, "
    if not layout.prediction_layers:
        raise ValueError(f"{option}and the checkpoint has none for role={layout.role!r}; leave it out")
    for hinders, conflict in (
        (layout.tied, "tied embeddings"),
        (options.tp_invariant, "tp_invariant=True"),
        (options.lora is not None, "lora"),
        (options.share_prefixes, "share_prefixes=True"),
        # torch's schedule would go backward twice through what two layers share.
        (options.pipeline.schedule == "zero-bubble", "schedule='zero-bubble'"),
    ):
        if hinders:
            raise ValueError(f"{option}which is not offered with {conflict}; leave one of them out")


def _warn_of_other_copies(path: Path, blocks: Mapping[str, ckpt.Block], differing: list[tuple[str, str]]) -> None:
    """Say that copies in the files are not used: vLLM and Megatron-Core share the model's own tensors, too."""
    for copy, original in differing:
        names = blocks[copy].names[0], blocks[original].names[0]
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
            etp=None if dims.expert_tensor_parallel else (0, 1),
        )
        for chunk in range(virtual_stages)
    ]


def _chunks(layout: ckpt.Layout, places: Sequence[ckpt.Place]) -> list[Chunk]:
    """Return the layers of each chunk of this rank."""
    layers = layout.chunk_layers(places[0].grid)
    return [Chunk(layers[p.chunk], first=p.chunk == 0, last=p.chunk == len(layers) - 1) for p in places]


def be_deterministic() -> None:
    """Make this process compute sums in fixed orders from now on; call this before the first use of cuBLAS.

    torch takes deterministic algorithms, and raises for an operation without one; flash attention takes its
    deterministic backward. cuBLAS gets one workspace, unless the environment has `CUBLAS_WORKSPACE_CONFIG`.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only reveals reads of uninitialized memory, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
