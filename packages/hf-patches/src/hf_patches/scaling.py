"""Measure how a model changes the logits z of its output embedding.

The transform may be factor * z or softcap * tanh(factor * z / softcap). The fused head computes log-probs inside the
output embedding, so the head must apply this transform itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_patches.proofs import ModuleView

# Small enough for tanh(x) = x, and large enough for tanh(x) = 1; finite in fp32.
_TINY, _HUGE = 2.0**-20, 1e30
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class HeadScaling:
    """The transform of the logits z of the head: softcap * tanh(factor * z / softcap), or factor * z."""

    factor: float = 1.0
    softcap: float | None = None


class _HiddenOutput(tuple[Tensor, ...]):
    """The output of a backbone that consists of hidden states; other fields are None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _StandIn(ModuleView):
    """A view of a module whose call returns a given result."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.result


def measure_scaling(model: PreTrainedModel, backbone: nn.Module, head: nn.Module) -> HeadScaling:
    """Return the scaling of the logits.

    The `forward` of the model's class runs with stand-ins for the backbone and for the output embedding, which returns
    chosen fp64 logits. So neither parameters nor hooks take part, and the model may be sharded or on the meta device.

    Raises:
        ValueError: The `forward` does not run with stand-ins, or the logits are transformed in another way.
    """
    name = type(model).__name__
    ordinary = torch.linspace(-90, 90, 121, dtype=torch.float64, device="cpu")
    z = torch.cat([ordinary.new_tensor([_TINY, _HUGE]), ordinary])[None, None]
    hidden = _HiddenOutput((z.new_zeros(1, 1, 1),))
    returned: dict[nn.Module, Any] = {backbone: hidden, head: z}
    advice = "which the fused head cannot compute; pass fused_head=False"
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        logits = type(model).forward(_stand_in(model, returned, hidden), input_ids=ids, return_dict=True).logits
    except Exception as error:  # a model's code may refuse stand-ins with any error
        raise ValueError(
            f"{name}.forward computes more than a backbone and an output embedding ({type(error).__name__}: {error}), "
            f"{advice}"
        ) from error
    same_shape = isinstance(logits, Tensor) and logits.shape == z.shape
    scaling = _fit(logits.flatten()) if same_shape else HeadScaling()
    if not same_shape or not torch.allclose(logits.double(), _scaled(z, scaling), rtol=_TOLERANCE, atol=0):
        raise ValueError(f"{name} transforms its logits by neither a factor nor a soft-cap, {advice}")
    return scaling


def _stand_in(module: nn.Module, returned: Mapping[nn.Module, Any], otherwise: Any) -> _StandIn:
    """Return a stand-in of a module. A forward may call any module that holds the backbone or the head."""
    inner = {name: child for name, child in module.named_children() if returned.keys() & set(child.modules())}
    views = {name: _stand_in(child, returned, otherwise) for name, child in inner.items()}
    return _StandIn(module, result=returned.get(module, otherwise), **views)


def _fit(logits: Tensor) -> HeadScaling:
    tiny, huge = logits[:2].tolist()
    factor = float(f"{tiny / _TINY:.12g}")  # an exact 1 costs nothing later
    bounded = abs(huge) < abs(factor) * _HUGE * 1e-3
    return HeadScaling(factor, abs(huge) if bounded else None)


def _scaled(z: Tensor, scaling: HeadScaling) -> Tensor:
    if scaling.softcap is None:
        return scaling.factor * z
    return scaling.softcap * torch.tanh(scaling.factor * z / scaling.softcap)
