"""Which parameters count as shards, of layers that stand for Transformer Engine's: those need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_utils.gpt import packed_model


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("weight0", "weight11", "bias0"):
            self.register_parameter(name, nn.Parameter(torch.ones(2, 2)))


class Row(Grouped): ...


class Whole(nn.Linear):
    """Marked as a shard by its own library."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]


class Part(Whole): ...


def test_grouped_experts_are_shards_and_whole_linears_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (columns, names, zero), (rows, row_names, one) = packed_model._SHARDED
    monkeypatch.setattr(packed_model, "_SHARDED", (((columns, Grouped), names, zero), ((rows, Row), row_names, one)))
    monkeypatch.setattr(packed_model, "TELinear", Whole)
    chunk: Any = nn.ModuleDict({"column": Grouped(), "whole": Whole(), "part": Part(), "norm": nn.RMSNorm(2)})
    packed_model._mark_shards(chunk)
    found = {name: getattr(p, "tensor_model_parallel", None) for name, p in chunk.named_parameters()}
    assert found == {
        "column.weight0": True,
        "column.weight11": True,
        "column.bias0": True,
        "whole.weight": False,
        "whole.bias": False,
        "part.weight": True,
        "part.bias": None,
        "norm.weight": None,
    }
    assert chunk["column"].weight11.partition_dim == 0

    monkeypatch.setattr(packed_model, "_SHARDED", ((columns, names, zero), ((rows, Row), row_names, one)))
    chunk = nn.ModuleDict({"row": Row()})
    packed_model._mark_shards(chunk)
    assert chunk["row"].weight11.partition_dim == 1
    assert not hasattr(chunk["row"].bias0, "tensor_model_parallel")
