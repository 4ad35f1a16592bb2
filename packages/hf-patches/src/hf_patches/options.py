"""The options of a patch."""

from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedModel

from parallel_layers.memory.recompute import Recompute


@dataclass(frozen=True, kw_only=True)
class PatchOptions:
    """The arguments of `patch` by which the changes differ."""

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

    @property
    def batches(self) -> str:
        """Return the kind of batch in one word."""
        return "packed" if self.packed else "padded"

    def of_copy(self, small: PreTrainedModel) -> "PatchOptions":
        """Return the options of a proof: no new value head beside another head, and "full" for any recomputation."""
        value_head = self.value_head and small.get_output_embeddings() is None
        return replace(self, npu=False, value_head=value_head, recompute="full" if self.recompute else None)
