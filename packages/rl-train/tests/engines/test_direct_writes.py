"""Weight syncs into a model whose `load_weights` stacks tensors, as vLLM's do, by recorded copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_train.engines.direct_writes import DirectWrites


class UnquantizedLinearMethod:
    """The name of vLLM's class for plain weights."""


class UnquantizedFusedMoEMethod:
    """The name of vLLM's class for plain weights of experts."""


class Model(nn.Module):
    """Rank 1 of two: its rows of q, k and o, stacked experts, a padded vocabulary, a norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method: Any = UnquantizedLinearMethod()
        sizes = {"qk": (6, 4), "o": (8, 2), "experts": (3, 8, 4), "embed": (16, 4)}
        self.weights = nn.ParameterDict({name: torch.zeros(*size).bfloat16() for name, size in sizes.items()})
        self.norm = nn.Parameter(torch.zeros(4))
        self.computed = self.halved = ""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            kind, _, number = name.partition(".")
            if name == self.computed:
                weight = weight + 1
            if kind in ("q", "k"):
                begin, length = (0, 4) if kind == "q" else (4, 2)
                self.weights["qk"].data.narrow(0, begin, length).copy_(weight.narrow(0, length, length))
            elif name == self.halved:
                self.weights["o"].data.copy_(weight.narrow(1, 2, 2)).mul_(0.5)
            elif kind == "o":
                self.weights["o"].data.copy_(weight.narrow(1, 2, 2))
            elif kind == "expert":
                self.weights["experts"].data[int(number)].copy_(weight.t())
            elif kind == "embed":
                self.weights["embed"].data[:10].copy_(weight[10:])
                self.weights["embed"].data[10:].fill_(0)
            elif kind == "norm":
                self.norm.data.copy_(weight)


SHAPES = {"q": (8, 4), "k": (4, 4), "o": (8, 4), "embed": (20, 4), "norm": (4,), "elsewhere": (3,)}
SHAPES |= {f"expert.{number}": (4, 8) for number in range(3)}


class Engine:
    """A model, and the calls of `DirectWrites`."""

    def __init__(self) -> None:
        self.model, self.calls = Model(), list[str]()
        self.writes = DirectWrites(self.model, self.reload, lambda: self.calls.append("finish"))

    def reload(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.calls.append("reload")
        self.model.load_weights(named_tensors)

    def sync(self, seed: int, without: tuple[str, ...] = ()) -> None:
        """Send tensors that are views of one buffer, and compare the model with one that has loaded them."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(7 + torch.Size(shape).numel(), generator=generator).bfloat16()[7:].view(shape)
            for name, shape in SHAPES.items()
            if name not in without
        }
        self.writes.load(iter(tensors.items()))
        expected = Model()
        expected.computed, expected.halved = self.model.computed, self.model.halved
        expected.load_weights(tensors.items())
        for name, weight in expected.named_parameters():
            assert torch.equal(self.model.get_parameter(name), weight), name


def test_later_syncs_copy() -> None:
    engine = Engine()
    for seed in range(4):
        engine.sync(seed)
    assert engine.calls == ["reload", "reload", "finish", "finish"]
    with pytest.raises(ValueError, match="the weight sync ended without k, norm"):
        engine.sync(4, without=("k", "norm"))
    with pytest.raises(ValueError, match="elsewhere came twice, or was no part of the last"):
        engine.writes.load(iter([("elsewhere", torch.ones(3)), ("elsewhere", torch.ones(3))]))


def computes(engine: Engine) -> None:
    engine.model.computed = "o"


def halves(engine: Engine) -> None:
    engine.model.halved = "o"


def is_quantized(engine: Engine) -> None:
    engine.model.quant_method = object()
    engine.writes = DirectWrites(engine.model, engine.reload, lambda: None)


def packs_experts(engine: Engine) -> None:
    """On a CPU vLLM may compute experts from a packed copy of the weights."""
    engine.model.quant_method = UnquantizedFusedMoEMethod()
    engine.writes = DirectWrites(engine.model, engine.reload, lambda: None)


@pytest.mark.parametrize("fault", [computes, halves, is_quantized, packs_experts])
def test_models_that_stay_with_vllm_s_way(fault: Any, recwarn: pytest.WarningsRecorder) -> None:
    """A loader whose copies cannot be recorded is named in a warning."""
    engine = Engine()
    fault(engine)
    for seed in range(4):
        engine.sync(seed)
    assert engine.calls == ["reload"] * 4
    warnings = [str(warning.message) for warning in recwarn if "keep vLLM's reload_weights" in str(warning.message)]
    assert len(warnings) == (fault in (computes, halves))


def test_a_parameter_without_a_copy() -> None:
    engine = Engine()
    engine.model.further = nn.Parameter(torch.ones(2))
    tensors = {name: torch.ones(shape).bfloat16() for name, shape in SHAPES.items()}
    for _ in range(3):
        engine.writes.load(iter(tensors.items()))
    assert engine.calls == ["reload"] * 3


def test_a_form_that_is_made_after_loading() -> None:
    """The check of the second sync sees that the copies give other bits."""
    engine, load = Engine(), Model.load_weights

    def shuffled(named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        engine.calls.append("reload")
        load(engine.model, named_tensors)
        engine.model.weights["o"].data.copy_(engine.model.weights["o"].flip(0))

    engine.writes = DirectWrites(engine.model, shuffled, lambda: None)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    for _ in range(4):
        engine.writes.load(iter(tensors.items()))
    assert engine.calls == ["reload"] * 4
    assert torch.equal(engine.model.weights["o"], tensors["o"][:, 2:].flip(0))


def test_new_memory_is_recorded_anew() -> None:
    engine = Engine()
    for seed in range(3):
        engine.sync(seed)
    engine.model.norm.data = torch.zeros(4)
    for seed in range(3, 6):
        engine.sync(seed)
    assert engine.calls == ["reload", "reload", "finish"] * 2
