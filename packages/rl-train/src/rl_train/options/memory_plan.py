"""The options of `rl-train plan`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from parallel_models import EngineOptions, OptimizerOptions
from rl_train.options.fields import Count, CountOrZero, Dims, Folder, Number, Positive
from rl_train.options.groups import CacheLimits
from rl_train.options.nested import Nested, Options
from rl_train.options.run_options import STEP_OF_OPTIMIZER


class PlanOptions(Options):
    """The models, the grid and the micro-batch to plan for; `engine` and `optimizer` are as in `TrainOptions`."""

    model: Folder
    """Checkpoint folder, of which config.json is enough, or name on a hub."""
    tokens: Count = 16384
    """Number of tokens in a micro-batch (one forward pass)."""
    dims: Dims = ""
    """Grid: dp, tp, pp, cp, ep, replicate, such as tp=2 (default: the fastest for --gpu-gib, else dp=N by --ranks)."""
    critic: bool = False
    """Add a critic of the same size."""
    share_backbone: bool = False
    """Add a critic that is a head on the actor's layers."""
    reference: bool = False
    """Add a reference of the same size."""
    teacher: Folder | None = None
    """Add a teacher of this checkpoint, whose whole distribution the policy learns from (--objective.divergence): the
    model, its head beside the policy's, and its hidden states in the batch (default: none)."""
    judge: Folder | None = None
    """Add a judge of this checkpoint, a model of the run (--reward judge:FILE without a URL; default: none)."""
    offload: bool = False
    """Keep one model on the devices and offload the others to host memory."""
    repeated: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of the tokens that repeat a prompt, which --engine.share-prefixes leaves out."""
    micro_batches: Count | None = None
    """Number of micro-batches in an update (default: two for each stage)."""
    longest: Count | None = None
    """Plan the KV cache for prompts with responses of at most N tokens (default: none)."""
    mask_width: CountOrZero = 0
    """Plan sampling masks of N tokens a draw on average, at most --top-k (default: none)."""
    gpu_gib: Positive | None = None
    """List the grids that fit a device with this memory, in GiB, the fastest first, each with the recomputation, tiles
    and offload that it needs, unless you give them (default: no list)."""
    ranks: Count | None = None
    """Number of ranks (default: the fewest that fit --gpu-gib, else the ranks of --dims)."""
    rollouts: CacheLimits = Field(default_factory=CacheLimits)
    engine: Annotated[
        EngineOptions,
        Nested(
            EngineOptions,
            hidden=(
                *("sequence_parallel", "context_parallel", "router_losses", "share_prefixes", "tp_invariant"),
                *("mtp_loss_scaling_factor", "deterministic", "save_dtype"),
            ),
            keep_probabilities=False,
        ),
    ] = Field(default_factory=lambda: EngineOptions(keep_probabilities=False))
    optimizer: Annotated[OptimizerOptions, Nested(OptimizerOptions, hidden=STEP_OF_OPTIMIZER)] = Field(
        default_factory=OptimizerOptions
    )
