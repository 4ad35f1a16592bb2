"""Names of families, losses and gradients that tests of several files use."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from hf_patches.families.table import FAMILIES, RECURRENT
from hf_patches.testing.tiny_models import tiny_config

# Below, some routers do not choose the experts themselves, and DeepSeek-V2 does not run in groups.
OLD = Version(transformers.__version__) < Version("5.15")
# Below, recurrent layers are refused.
STATELESS_ONLY = Version(transformers.__version__) < Version("5.16")
MISSING = {"deepseek_v2"} if OLD else set()
MISSING |= {"qwen3_5", "qwen3_5_moe", *RECURRENT} if STATELESS_ONLY else set()
# Of the table of families, those that the installed transformers has.
NAMED = sorted((FAMILIES.keys() & CONFIG_MAPPING.keys()) - MISSING)
TEXT = [name for name in NAMED if FAMILIES[name] is None]
VISION = [name for name in NAMED if FAMILIES[name] is not None]
# Families whose layers keep keys and values only.
STATELESS = [name for name in NAMED if tiny_config(name).get_text_config().model_type not in RECURRENT]
MIXTURES = [name for name in NAMED if hasattr(tiny_config(name).get_text_config(), "num_experts_per_tok")]


def recurrent(*names: str) -> list[Any]:
    """Return families with recurrent layers as parameters of a test, skipped where transformers lacks them."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(name not in NAMED, reason="refused with this transformers"))
        for name in names
    ]


def scalar_loss(scores: Any, seed: int = 1) -> Tensor:
    """Return a loss with a different weight for every log-prob and entropy, so that no wrong gradient cancels."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, scores.log_probs.shape[0], generator=generator).to(scores.log_probs.device)
    return (weights[0] * scores.log_probs).sum() + (weights[1] * scores.entropy).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients by the names of trained parameters; zeros for parameters without a gradient."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_gradients_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert that gradients agree per element, within `tolerance` of the largest element of each gradient."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, wanted in expected.items():
        error = (actual[name] - wanted).abs().max().item()
        scale = max(wanted.abs().max().item(), 1e-6)
        assert error <= tolerance * scale, f"gradient of {name}: off by {error:.3g}, largest element {scale:.3g}"
