"""`Memory`: the memory of a model on one rank; `MemoryOptions`: the training step to plan for."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallel_layers import ParallelDims
from parallel_layers.device import GPU, DeviceType
from parallel_models import CacheOptions, EngineOptions
from parallel_models.engine import require_number
from rl_models import OptimizerOptions
from rl_models.backends import require_optimizer

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one model on one rank, at the time of the peak.

    Attributes:
        weights: Bytes of this rank's weights and adapters, and of its part of a teacher's head.
        optimizer: Moments and fp32 master weights on the device.
        gradients: Gradients of earlier parts of the model, or of earlier micro-batches, at the peak. FSDP2 shards them
            only after the last micro-batch.
        gathered: Weights that FSDP2 gathers at once: embedding, head and two layers; in a pipeline the whole model.
        activations: Saved by the forward for the backward, with FP8 copies of weights.
        layer: Needed in addition while one layer or the embedding runs (backward, if the model is trained), with their
            gradients and cuBLAS's workspaces.
        logits: Needed in addition while the final norm and the heads run, with their gradients and cuBLAS's
            workspaces.
        masks: Sampling masks of the batch, and their copies in its micro-batches.
        states: A teacher's hidden states of the batch, and their copies in its micro-batches.
        cache: Keys and values while responses are drawn, with nothing of the update beside them.
        generation: Needed in addition then: all weights gathered, with `CacheOptions.experts="gather"` also those of
            the other ranks' experts, with `CacheOptions.float8` the copies in FP8, and a prompt's layer or a step's
            fp32 logits.
        host: Moments and fp32 master weights in pinned host memory, which `total` leaves out.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    layer: int = 0
    logits: int = 0
    masks: int = 0
    states: int = 0
    cache: int = 0
    generation: int = 0
    host: int = 0

    @property
    def resting(self) -> int:
        """Return the bytes held between two calls."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """Return the bytes at the peak: of an update, whose head ends before a layer runs backward, or of a draw."""
        held = self.gradients + self.gathered + self.activations + self.masks + self.states
        update = held + max(self.layer, self.logits)
        return self.resting + max(update, self.cache + self.generation)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(EngineOptions):
    """The training step to plan for: the options of an engine, and further ones.

    `keep_probabilities=True` counts the head's probabilities; "auto" keeps them only where the GPU has more memory.

    Attributes:
        dims: The grid.
        tokens: Number of tokens in a micro-batch.
        optimizer: The optimizer.
        repeated: The share of the tokens that repeat a prompt, which `share_prefixes` leaves out.
        micro_batches: Number of micro-batches in an update; None: two for each stage. The gradients of the first are
            there when the second runs.
        device: "cuda" or "cpu", which decides the size of the head's tiles, and whether kernels are fused.
        cache: The cache of an actor that generates; None: the actor does not.
        mask_width: Mean number of ids of a row of the batch's sampling mask; 0: the batch has none.
        teacher_size: The hidden size of a teacher whose whole distribution the model learns from; 0: there is none.
    """

    dims: ParallelDims
    tokens: int
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    repeated: float = 0.0
    micro_batches: int | None = None
    device: DeviceType = GPU
    cache: CacheOptions | None = None
    mask_width: int = 0
    teacher_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "micro_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        require_optimizer("parallel", self.optimizer, adapters=self.lora is not None)
        require_number("repeated", self.repeated, at_least=0)
        if self.repeated >= 1:
            raise ValueError(f"repeated={self.repeated} must be below 1")

    @property
    def received(self) -> int:
        """Return the number of micro-batches in an update."""
        return 2 * self.dims.pp if self.micro_batches is None else self.micro_batches

    @property
    def computed(self) -> int:
        """Return the number of tokens that a rank computes in a micro-batch."""
        return -(-int(self.tokens * (1 - self.repeated)) // self.dims.cp)
