"""Options of loading and running an actor or a critic: the options of every engine, and of one backend alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from parallel_models import EngineKeywords, EngineOptions
from parallel_models.engine import require_flags, require_kind

# `BackendOptions.float8` -> fields of Megatron-Core's config, with the formats of Transformer Engine's recipes.
FLOAT8 = {
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "block": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


@dataclass(frozen=True)
class MegatronOptions:
    """Options that only `backend="megatron"` has.

    Attributes:
        layers: The implementation of the layers: "local" or "transformer_engine". "local" is Megatron-Core's own, on
            torch; "transformer_engine" takes Transformer Engine's linears, norms and grouped experts.
        distributed_optimizer: Divide the optimizer's masters and moments over dp x cp (ZeRO stage 1,
            arXiv:1910.02054). Loading a training checkpoint then holds them whole in host memory for a while.
    """

    layers: Literal["local", "transformer_engine"] = "local"
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        require_flags(self)
        if self.layers not in ("local", "transformer_engine"):
            raise ValueError(f"layers={self.layers!r} is unknown; use 'local' or 'transformer_engine'")


@dataclass(frozen=True)
class BackendOptions(EngineOptions):
    """The options of `from_pretrained`: the fields of `parallel_models.EngineOptions`, and further ones.

    Attributes:
        megatron: The options that only `backend="megatron"` has.
    """

    megatron: MegatronOptions = field(default_factory=MegatronOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kind("megatron", self.megatron, MegatronOptions)
        if self.lora is not None and self.megatron.layers != "local":
            raise ValueError(
                f"backend='megatron' does not offer lora with layers={self.megatron.layers!r}: Transformer Engine "
                "fuses norms with linears, which hides the adapters' input; use MegatronOptions(layers='local'), or "
                "backend='parallel'"
            )


class BackendKeywords(EngineKeywords, total=False):
    """The fields of `BackendOptions` as keyword arguments, by which editors complete them."""

    megatron: MegatronOptions
