"""`Tower`: the vision modules of a model of transformers, whose state dict has the names of the checkpoint's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

# Where files name a tower's tensors otherwise than transformers: family -> name in the module (a regular expression)
# and in files, the first that matches.
_BLOCK, _IN_FILES = r"^vision_tower\.layers\.(\d+)\.", r"vision_tower.encoder.blocks.\1."
_NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "kimi_k25": (
        (_BLOCK + r"norm1\.", _IN_FILES + "norm0."),
        (_BLOCK + r"norm2\.", _IN_FILES + "norm1."),
        (_BLOCK + r"mlp\.fc1\.", _IN_FILES + "mlp.fc0."),
        (_BLOCK + r"mlp\.fc2\.", _IN_FILES + "mlp.fc1."),
        (_BLOCK + r"attn\.proj\.", _IN_FILES + "wo."),
        (_BLOCK + r"attn\.wqkv\.", _IN_FILES + "wqkv."),
        (r"^vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
        (r"\.pos_emb\.position_embeddings$", ".pos_emb.weight"),
        (r"^mm_projector\.in_proj\.", "mm_projector.proj.0."),
        (r"^mm_projector\.out_proj\.", "mm_projector.proj.2."),
    )
}


class Tower(nn.Module):
    """The modules of a vision-language model of transformers that turn pixels into embeddings, with new weights.

    Args:
        inner: The model without its head, on the meta device; its modules beside the language model are replaced.
        config: The config of the model.
        prefix: The prefix in files of a tower that is one module.
        dtype, device: Those of the parameters.
    """

    def __init__(
        self, inner: nn.Module, config: Any, prefix: str, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.names = _NAMES.get(config.model_type, ((r"^visual\.", prefix),))
        for name, module in list(inner.named_children()):
            module_class: Any = type(module)
            with torch.device(device):
                if isinstance(module, PreTrainedModel):  # keeps buffers in fp32
                    new_module = module_class._from_config(config.vision_config, dtype=dtype)
                else:
                    new_module = module_class(config).to(dtype)
            self.add_module(name, new_module.eval())
            inner.add_module(name, new_module)
        if config.model_type == "kimi_k25":
            for layer in self.get_submodule("vision_tower.layers").children():
                _fuse(layer.get_submodule("attn"), config.vision_config.num_attention_heads)
        self.register_state_dict_post_hook(_rename)


def _rename(tower: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Give the tensors of a state dict the names that they have in files."""
    assert isinstance(tower, Tower)
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        in_files = (re.sub(pattern, file_name, name) for pattern, file_name in tower.names if re.search(pattern, name))
        state[next(in_files, name)] = state.pop(key)


class _Projection(nn.Module):
    """A projection of queries, keys or values by a fused linear layer.

    Files pair the numbers of a head that rotate together, `[D/2, 2]`; the tower of transformers takes `[2, D/2]`.

    Args:
        fused: The linear layer of queries, keys and values, `[3H, H]`, which belongs to another module.
        number: 0, 1 or 2.
        heads: The number of heads to reorder; None: values, which do not rotate.
    """

    def __init__(self, fused: nn.Linear, number: int, heads: int | None) -> None:
        super().__init__()
        self._fused, self._number, self._heads = (fused,), number, heads  # a tuple: no module of this one

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., H]`."""
        (fused,) = self._fused
        result = F.linear(x, fused.weight.chunk(3)[self._number], fused.bias.chunk(3)[self._number])
        if self._heads is None:
            return result
        return result.unflatten(-1, (self._heads, -1, 2)).transpose(-1, -2).flatten(-3)


def _fuse(attention: nn.Module, heads: int) -> None:
    """Replace the projections of queries, keys and values by one linear layer, as files have them."""
    query = attention.get_submodule("q_proj")
    assert isinstance(query, nn.Linear)
    width = query.in_features
    fused = nn.Linear(width, 3 * width, dtype=query.weight.dtype, device=query.weight.device)
    attention.add_module("wqkv", fused)
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        attention.add_module(name, _Projection(fused, number, heads if number < 2 else None))
