"""The options of a patch."""

from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedModel

from parallel_layers.memory import Recompute

# The allowed values of each flag.
_ALLOWED: dict[str, tuple[bool | str | None, ...]] = {
    **dict.fromkeys(("packed", "fused_head", "offload_activations", "value_head", "npu", "kernels"), (True, False)),
    "router_replay": (True, False, None),
    "keep_probabilities": (True, False, "auto"),
}


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """The arguments of `patch` by which the changes differ.

    Raises:
        ValueError: An argument has a value that is not allowed; any text would count as True, "no" as well.
    """

    packed: bool
    fused_head: bool
    tiled_mlp: int | None
    recompute: Recompute
    offload_activations: bool
    value_head: bool
    npu: bool
    router_replay: bool | None
    kernels: bool
    keep_probabilities: bool | Literal["auto"]

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, allowed))}")
        tiles = self.tiled_mlp
        if tiles is not None and (not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1):
            raise ValueError(f"tiled_mlp={tiles!r} must be a number of tiles, at least 1, or None")

    @property
    def batches(self) -> str:
        """Return the kind of batch in one word."""
        return "packed" if self.packed else "padded"

    def of_copy(self, small: PreTrainedModel) -> "PatchOptions":
        """Return the options of a proof: no new value head beside another head, and "full" for any recomputation."""
        value_head = self.value_head and small.get_output_embeddings() is None
        return replace(self, npu=False, value_head=value_head, recompute="full" if self.recompute else None)
