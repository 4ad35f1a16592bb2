"""The backends of actors and critics; each implements `Engine`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ckpt import Checkpoint, agree
from parallel_models import Engine, EngineOptions, Grid, OptimizerOptions, Role
from parallel_models.engine import OUTPUTS, prediction_layers
from rl_models.backends.options import BackendOptions


@dataclass(frozen=True)
class Backend:
    """One row of `BACKENDS`: a module with `load(checkpoint, role, grid, options) -> Engine`, and its offer.

    With `lora` the function also takes `base`, an engine whose frozen base the new one shares.
    A backend of your own is a row in a module of yours, which `backend="module:NAME"` names.

    Attributes:
        axes, roles: The offered forms of parallelism, and the offered roles.
        lacks: The fields of `BackendOptions` that must keep their defaults, with the reason of each.
        lacks_in_optimizer: The fields of `OptimizerOptions` that must keep their defaults, with the reason of each.
        scales_loss: Train fp16 under a loss scale.
        package: The package of this workspace that the module needs; empty: the base has all.
    """

    module: str
    axes: tuple[str, ...]
    roles: tuple[Role, ...]
    lacks: Mapping[str, str] = field(default_factory=dict)
    lacks_in_optimizer: Mapping[str, str] = field(default_factory=dict)
    scales_loss: bool = False
    package: str = ""


_OF_MEGATRON = "these options are for backend='megatron'"
BACKENDS: dict[str, Backend] = {
    "parallel": Backend(
        "rl_models.backends.parallel.load",
        ("dp", "pp", "cp", "tp", "ep", "replicate"),
        tuple(OUTPUTS),
        {"megatron": _OF_MEGATRON},
    ),
    "megatron": Backend(
        "rl_models.backends.megatron.load",
        ("dp", "pp", "cp", "tp", "ep"),
        ("causal_lm", "value"),
        {
            "router_losses": "Megatron-Core's losses count padding, are 1/k as large, and take the k best scores for "
            "the routing, even where biases, groups or a replay chose other experts",
            "share_prefixes": "Megatron-Core's layers compute every sequence whole",
            "keep_probabilities": "the head of its models computes them again",
            "tp_invariant": "Megatron-Core's linears add in an order that depends on tp",
            "mtp_loss_scaling_factor": "its models have no multi-token-prediction layers",
            "base_format": "Megatron-Core's linears compute in the dtype of their weights",
        },
        {
            "algorithm": "Megatron-Core has AdamW here",
            "moments": "Megatron-Core keeps its moments in fp32",
            "offload": "Megatron-Core updates its state where it lies",
        },
        scales_loss=True,
        package="megatron-utils",
    ),
    "transformers": Backend(
        "rl_models.backends.transformers.load",
        ("dp", "cp", "tp", "ep", "replicate"),
        tuple(OUTPUTS),
        {
            "pipeline": "its models are not divided into stages",
            "context_parallel": "its attention is divided over cp by Ulysses alone",
            "router_losses": "hf-patches computes none of these losses",
            "float8": "transformers' linears compute in the dtype of their weights",
            "tp_invariant": "the bits of its matrix products depend on the batch",
            "mtp_loss_scaling_factor": "transformers leaves out multi-token-prediction layers",
            "base_format": "transformers' linears compute in the dtype of their weights",
            "megatron": _OF_MEGATRON,
        },
        package="hf-patches",
    ),
}


def row_of(backend: str) -> Backend:
    """Return the row of a backend, of `BACKENDS` or of a module that `backend="module:NAME"` names.

    Raises:
        ValueError: The backend is unknown, or the module cannot be imported or has no such row.
    """
    if backend in BACKENDS:
        return BACKENDS[backend]
    module, colon, name = str(backend).partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(
            f"backend={backend!r} is not available; available: {', '.join(BACKENDS)}, or module:NAME, a "
            "rl_models.backends.Backend of your own"
        )
    try:
        entry = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a user's module may raise any error
        raise ValueError(f"backend={backend!r}: importing {module} raised {type(error).__name__}: {error}") from error
    if not isinstance(entry, Backend):
        raise ValueError(
            f"backend={backend!r}: {name} of {module} must be a rl_models.backends.Backend, got {type(entry).__name__}"
        )
    return entry


def offered(backend: str, role: Role, grid: Grid) -> Backend:
    """Return the row of a backend, which must offer a role on a grid.

    Raises:
        ValueError: The backend is unknown, or does not offer the role or a form of parallelism.
    """
    entry = row_of(backend)
    grid.require(entry.axes, backend)
    if role not in entry.roles:
        alternatives = " or ".join(f"backend={name!r}" for name, row in BACKENDS.items() if role in row.roles)
        raise ValueError(
            f"backend={backend!r} does not offer the role {role!r}; it offers {', '.join(entry.roles)}: use "
            f"{alternatives}, or a model for each of these roles"
        )
    return entry


def require_options(backend: str, options: EngineOptions) -> None:
    """Raise ValueError for an option that a backend lacks."""
    for name, reason in row_of(backend).lacks.items():
        if (value := getattr(options, name)) and value != getattr(BackendOptions(), name):
            raise ValueError(f"backend={backend!r} does not offer {name}={value!r}: {reason}; leave it out")


def require_learning(backend: str, dtype: torch.dtype) -> None:
    """Raise ValueError if a backend cannot train parameters of a dtype."""
    if dtype == torch.float16 and not row_of(backend).scales_loss:
        raise ValueError(
            f"backend={backend!r} does not train a model in float16: fp16 needs a loss scale, without which small "
            "gradients vanish; load it with dtype=torch.bfloat16 or torch.float32, or use backend='megatron'; leave "
            "out optimizer=... for a model that is never updated"
        )


def require_optimizer(backend: str, optimizer: OptimizerOptions, *, adapters: bool) -> None:
    """Raise ValueError if a backend, or a model with adapters, does not have an optimizer."""
    for name, reason in row_of(backend).lacks_in_optimizer.items():
        if (value := getattr(optimizer, name)) != getattr(OptimizerOptions(), name):
            raise ValueError(f"backend={backend!r} has no optimizer with {name}={value!r}: {reason}; leave it out")
    if optimizer.algorithm == "muon" and adapters:
        raise ValueError(
            "algorithm='muon' orthogonalises whole weight matrices, and low-rank adapters are factors of a change; "
            "leave out lora or algorithm='muon'"
        )


def load_engine(
    backend: str, checkpoint: Checkpoint, role: Role, grid: Grid, options: EngineOptions, base: Engine | None = None
) -> Engine:
    """Load a checkpoint onto a backend; ValueError for an option without support, ImportError without a package.

    With `base`, an engine of this checkpoint with adapters, the new engine shares the tensors of the frozen base.
    """
    entry = offered(backend, role, grid)
    require_options(backend, options)
    if options.num_labels is not None and role == "causal_lm":
        raise ValueError(
            f"num_labels={options.num_labels} is of a value head, which an Actor lacks; leave it out, or load a Critic"
        )
    # Imported on demand: transformers takes seconds to import, and the native backend does not need it.
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        if not entry.package:
            raise
        raise ImportError(
            f"backend={backend!r} needs {error.name}, which is not installed; in a clone of this project: pip install "
            f"./packages/{entry.package}"
        ) from error
    predicting: tuple[str, ...] = ()
    if backend != "parallel" and role != "value":
        predicting = agree(lambda: prediction_layers(checkpoint), grid.everyone)
    if predicting:
        warnings.warn(
            f"backend={backend!r} leaves out the {len(predicting)} multi-token-prediction layers of {checkpoint.path}, "
            "and its saves have none; use backend='parallel' to keep them",
            stacklevel=4,
        )
    shared = {} if base is None else {"base": base}
    engine: Engine = module.load(checkpoint, role, grid, options, **shared)
    return engine.loaded(backend, checkpoint, options)
