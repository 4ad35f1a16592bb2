"""Low-rank adapters on a transformers model: PEFT's layers replace its linears.

A base weight X.weight is `X.base_layer.weight` then, and the factors are `X.lora_A.default.weight` and
`X.lora_B.default.weight`. Tensors of the base keep their names outside of the module.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import ckpt
from ckpt import Block
from ckpt.layout import HEADS
from parallel_layers.model import LoraOptions
from parallel_layers.module import as_linear, draw, first_row, is_dtensor
from parallel_models import Adapters, Role
from parallel_models.engine import Lora, describe, require_linears
from rl_models.backends.transformers.slices import stored_tensors

_FACTOR = ".default.weight"


class PeftLayout(ckpt.AdapterLayout):
    """The layout of PEFT's layers in a model that is whole on its rank; FSDP2 may divide them further."""

    def at(self, place: ckpt.Place) -> dict[str, Block]:
        """Return the factors and the value head, which every rank has."""
        return {
            name if name in HEADS else name.removesuffix(".weight") + _FACTOR: Block.whole(name, canonical.shape)
            for name, canonical in self.canonical.items()
        }


def add(model: PreTrainedModel, lora: Lora, checkpoint: ckpt.Checkpoint, role: Role) -> Adapters:
    """Freeze a model and put PEFT's layers around the chosen linears, on the device of the model.

    Raises:
        ValueError: The family is not in ckpt's table, a target matches nothing, or is the embedding, the head or an
            expert.
        ImportError: PEFT is not installed.
    """
    if find_spec("peft") is None:
        raise ImportError("lora on backend='transformers' needs peft, which is not installed: pip install 'peft>=0.21'")
    from peft import LoraConfig, inject_adapter_in_model  # an optional extra, which takes seconds to import

    adapters = describe(lora, ckpt.layout_for(checkpoint, target="parallel", role=role), str(checkpoint.path))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    options, described = adapters.options, adapters.layout
    require_linears("transformers", described, linear)
    config: Any = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, use_rslora=options.rslora,
        target_modules=[f"model.{name}" for name in sorted(described.chosen)],
    )  # fmt: skip
    # Without the config of the model: PEFT would turn dense MLPs and shared experts of a mixture into its experts.
    inject_adapter_in_model(config, nn.ModuleDict({"model": model}), low_cpu_mem_usage=True)
    layout = PeftLayout(described.base, described.chosen, described.rank, described.settings)
    dtypes = {name: tensor.dtype for name, tensor in base_tensors(model).items()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name in HEADS)
        if ".lora_" in name:
            parameter.data = parameter.data.to(dtypes[name.partition(".lora_")[0] + ".weight"])
    model.eval()  # PEFT's layers start in training mode, and dropout is for updates alone
    return adapters._replace(layout=layout)


def base_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint holds, without adapters, by the names that they have there."""
    tensors = stored_tensors(model).items()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors if ".lora_" not in name}


def adapter_tensors(model: PreTrainedModel, layout: ckpt.AdapterLayout) -> dict[str, Tensor]:
    """Return the factors and the value head of a model."""
    tensors = stored_tensors(model)
    return {name: tensors[name] for name in layout.at(ckpt.Place())}


@torch.no_grad()
def reset(model: PreTrainedModel, options: LoraOptions, layout: ckpt.AdapterLayout) -> None:
    """Set the initial adapters, which equal the native backend's with the same seed."""
    for name, tensor in adapter_tensors(model, layout).items():
        if name in HEADS:
            continue
        layer, _, factor = name.removesuffix(_FACTOR).rpartition(".")
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        local.zero_()
        if factor == "lora_A" and len(local):
            rows, columns = tensor.shape
            begin = first_row(tensor)
            ranges = [(begin, begin + len(local)), (0, columns)]
            values = draw((rows, columns), ranges, options.seed, f"{layer}.{factor}", as_linear(columns))
            local.copy_(values)
