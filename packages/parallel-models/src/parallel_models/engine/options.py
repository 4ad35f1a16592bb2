"""Options of loading and running a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

from parallel_layers.attention import ContextParallel
from parallel_layers.memory import Recompute, require_recompute
from parallel_layers.model import Float8Recipe, LoraOptions
from parallel_models.engine.checks import require_flags, require_kind, require_number

# Importing this file needs no torch, so that command lines print their help at once.
if TYPE_CHECKING:
    import torch

# Options, or a folder with an adapter of PEFT, whose weights and options are taken.
Lora = LoraOptions | str | os.PathLike[str]

# The dtypes that models compute in, as torch prints them.
COMPUTED = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


def require_lora(lora: object) -> None:
    """Raise ValueError unless `lora` is `LoraOptions` or a path."""
    if not isinstance(lora, LoraOptions | str | os.PathLike):
        raise ValueError(f"lora={lora!r} must be LoraOptions(...), or a folder with an adapter of PEFT")


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline: the split of the layers and the order of micro-batches.

    Attributes:
        schedule: The order of forward and backward passes: "1f1b" or "zero-bubble". "1f1b" is one forward, one backward
            (PipeDream-Flush, arXiv:2006.09503; with virtual stages interleaved, arXiv:2104.04473). "zero-bubble"
            computes the gradients of inputs before the gradients of weights, which fill the pipeline's bubbles
            (arXiv:2401.10241).
        virtual_stages: The number of model chunks on each rank. Chunk v of rank p is chunk v * pp + p of the model.
        split: The number of layers of each of the pp * virtual_stages chunks, such as 3,5 (None: by the layers' cost).
            See `ckpt.layout.place.split_by_cost`.
    """

    schedule: Literal["1f1b", "zero-bubble"] = "1f1b"
    virtual_stages: int = 1
    split: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("1f1b", "zero-bubble"):
            raise ValueError(f"schedule={self.schedule!r} is unknown; use '1f1b' or 'zero-bubble'")
        require_number("virtual_stages", self.virtual_stages, at_least=1, integer=True)
        if (split := self.split) is None:
            return
        if not (isinstance(split, Sequence) and split and all(isinstance(n, int) and n > 0 for n in split)):
            shown = list(split) if isinstance(split, Sequence) else split
            raise ValueError(f"split={shown!r} must give every chunk at least one layer, such as [2, 2]")

    def require_pipeline(self, pp: int) -> None:
        """Raise ValueError for virtual stages or a split without a pipeline (pp 1)."""
        if pp == 1 and (self.virtual_stages > 1 or self.split is not None):
            option = f"virtual_stages={self.virtual_stages}" if self.split is None else f"split={list(self.split)}"
            raise ValueError(f"{option} needs pp > 1; leave it out, or give dims with pp, such as pp=2")


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Weights of the auxiliary losses of a mixture of experts, which an update adds to its loss.

    The losses of each layer cover all tokens of the update, prompts included, over all micro-batches and ranks. They do
    not depend on how the batch was divided.

    Attributes:
        balance: The weight of the load-balancing loss over the global batch (arXiv:2501.11873). Configs name it
            `router_aux_loss_coef`; see `parallel_layers.moe.load_balancing_loss`. One more forward pass of each update,
            without the head, counts the load of every expert.
        sequence_balance: The weight of DeepSeek-V3's balance loss within each sequence. See
            `parallel_layers.moe.sequence_balance_loss`.
        z: The weight of the router z-loss. See `parallel_layers.moe.router_z_loss`.
    """

    balance: float = 0.0
    sequence_balance: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in vars(self).items():
            require_number(name, weight, at_least=0)


@dataclass(frozen=True)
class EngineOptions:
    """The options of loading and running a model.

    Attributes:
        dtype: The dtype of the parameters (None: as stored in the checkpoint). "megatron" alone trains fp16.
        sequence_parallel: Shard the tokens over tp between blocks, `[T/tp, H]` (None: where tp > 1).
        pipeline: The schedule and the split of the layers, for pp > 1.
        context_parallel: The form of context parallelism, for cp > 1: "ulysses", "ring" or "heads". "ulysses":
            attention exchanges tokens for heads. "ring": attention sends keys and values. Recurrent layers send states
            in both. "heads": both exchange tokens for heads.
        router_losses: The losses of a mixture of experts; the coefficients of the config are ignored.
        recompute: Compute again in the backward instead of saving: "full", every layer; "selective", every MLP or
            mixture of experts; or numbers of layers, such as 0-3,9 (None: save everything).
        tiled_mlp: The number of tiles of tokens in which each dense MLP is computed (None: all tokens at once). The
            backward computes each tile again, so only one tile's intermediate activations exist at a time.
        offload_activations: Keep what layers save for the backward in pinned host memory. The copies run beside the
            other layers (`parallel_layers.memory.activations`).
        float8: The FP8 recipe of the GEMMs of linears and routed experts: "current", "block" or "mxfp8" (None: the
            dtype of the weights). It needs GPUs with Transformer Engine (`parallel_layers.linear.with_float8`), and on
            "megatron" the "transformer_engine" layers.
        share_prefixes: Compute a prompt once for all of its sequences in a micro-batch. The prompt is every token
            before the mask. Sequences of one prompt stay together as far as a micro-batch holds. The tokens of a prompt
            count once in the losses of routers. Without images; on "parallel" without cp.
        keep_probabilities: Keep the head's probabilities `[T, V/tp]` in bf16 for the backward, which then computes one
            GEMM less ("auto": where there is memory). On GPUs, by `parallel_layers.linear_log_probs`. "auto" decides
            for each micro-batch; never with `deterministic` or `tp_invariant`, nor on a backend without it.
        tp_invariant: Give log-probs and values whose bits depend neither on tp and ep nor on the rest of a batch, by
            `parallel_layers.invariant`. Generation computes in the same way: draws have the log-probs of training.
        mtp_loss_scaling_factor: The weight of the loss that trains the multi-token-prediction layers (0: keep the
            layers as they are). It is lambda in equation 25 of DeepSeek-V3 (arXiv:2412.19437).
        deterministic: Give the same bits at every run on the same grid. This sets the whole process for good, see
            `be_deterministic`.
        lora: Low-rank adapters: `LoraOptions`, or a folder with an adapter of PEFT. The base is frozen;
            the adapters and a value head are trained. None: train all weights.
        num_labels: The number of labels of a new value head: numbers for each token, such as several rewards or the
            classes of a token (None: 1). A checkpoint with a value head says itself.
        base_format: The format of the frozen projections under `lora`: "fp8", with a scale for each block of 128 x 128
            (None: `dtype`). Every GEMM dequantises its weight again ("parallel" alone). Plain weights are quantized
            while they are loaded, and a checkpoint in block FP8 keeps its numbers.
        save_dtype: The dtype of the weights that `save_pretrained` writes (None: the dtype of the parameters).
    """

    dtype: torch.dtype | None = None
    sequence_parallel: bool | None = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    context_parallel: ContextParallel = "ulysses"
    router_losses: RouterLosses = field(default_factory=RouterLosses)
    recompute: Recompute = None
    tiled_mlp: int | None = None
    offload_activations: bool = False
    float8: Float8Recipe | None = None
    share_prefixes: bool = False
    keep_probabilities: bool | Literal["auto"] = "auto"
    tp_invariant: bool = False
    mtp_loss_scaling_factor: float = 0.0
    deterministic: bool = False
    lora: Lora | None = None
    base_format: Literal["fp8"] | None = None
    num_labels: int | None = None
    save_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        require_flags(self)
        for name, kind in (("pipeline", PipelineOptions), ("router_losses", RouterLosses)):
            require_kind(name, getattr(self, name), kind)
        if self.lora is not None:
            require_lora(self.lora)
        for name, choices in (
            ("context_parallel", get_args(ContextParallel)),
            ("float8", (*get_args(Float8Recipe), None)),
            ("base_format", ("fp8", None)),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is unknown; use {' or '.join(map(repr, choices))}")
        for name in ("dtype", "save_dtype"):
            if (dtype := getattr(self, name)) is not None and str(dtype) not in COMPUTED:
                raise ValueError(f"{name}={dtype!r} must be one of {', '.join(COMPUTED)}")
        require_recompute(self.recompute)
        require_number("mtp_loss_scaling_factor", self.mtp_loss_scaling_factor, at_least=0)
        for name in ("tiled_mlp", "num_labels"):
            if (number := getattr(self, name)) is not None:
                require_number(name, number, at_least=1, integer=True)
        for name in ("keep_probabilities", "float8", "share_prefixes"):
            if (value := getattr(self, name)) not in (False, None, "auto") and self.tp_invariant:
                raise ValueError(f"{name}={value!r} excludes tp_invariant=True; leave one of them out")
        if self.keep_probabilities not in (False, True, "auto"):
            raise ValueError(f"keep_probabilities={self.keep_probabilities!r} must be False, True or 'auto'")
        if self.lora is not None and self.tp_invariant:
            raise ValueError("tp_invariant=True excludes lora: adapters have ordinary GEMMs; leave out one of the two")
        if self.base_format is not None and (self.lora is None or self.float8 is not None):
            raise ValueError(
                f"base_format={self.base_format!r} is for the frozen base of adapters: it needs lora, not "
                f"{self.lora!r}, and excludes float8={self.float8!r}"
            )

    @property
    def kept_probabilities(self) -> bool | Literal["auto"]:
        """Return `keep_probabilities`, False for "auto" where free memory must not decide a model's bits."""
        fixed = self.deterministic or self.tp_invariant
        return False if fixed and self.keep_probabilities == "auto" else self.keep_probabilities


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, by which editors complete them."""

    dtype: torch.dtype | None
    sequence_parallel: bool | None
    pipeline: PipelineOptions
    context_parallel: ContextParallel
    router_losses: RouterLosses
    recompute: Recompute
    tiled_mlp: int | None
    offload_activations: bool
    float8: Float8Recipe | None
    share_prefixes: bool
    keep_probabilities: bool | Literal["auto"]
    tp_invariant: bool
    mtp_loss_scaling_factor: float
    deterministic: bool
    lora: Lora | None
    base_format: Literal["fp8"] | None
    num_labels: int | None
    save_dtype: torch.dtype | None
