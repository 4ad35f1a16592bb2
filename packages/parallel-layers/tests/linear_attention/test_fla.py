"""The calls of fla-core's kernels, which CPUs do not have: their arguments, and when none is called."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from token_recurrence import boundaries
from torch import Tensor

from parallel_layers.linear_attention import backends, convolution, delta_rule
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule

LENGTHS = [130, 1, 0, 64, 63]
TOKENS = sum(LENGTHS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any]]]:
    """Every call of a kernel, whose outputs are the values; states are a mark."""
    found: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []

    def kernel(name: str, number: int) -> Any:
        def call(*tensors: Tensor, **options: Any) -> tuple[Tensor, str]:
            found.append((name, tensors, options))
            return tensors[number], "state"

        return call

    for module, name, number in (
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", 2),
        ("fla.ops.kda", "chunk_kda", 2),
        ("fla.modules.causal_conv1d.ops", "causal_conv1d", 0),
    ):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: kernel(name, number)}))
    for module in (convolution, delta_rule):
        monkeypatch.setattr(module, "choose_backend", lambda *_, **__: "fla")
    return found


def inputs(tokens: int = TOKENS, *, per_channel: bool = False) -> tuple[Tensor, ...]:
    q, v = torch.randn(tokens, 2, 4), torch.randn(tokens, 4, 6)
    return q, q, v, -torch.rand(tokens, 4, *[4] * per_channel), torch.rand(tokens, 4)


def check_table(table: Tensor) -> None:
    """The chunks of 64 tokens of each sequence; spare ones lie behind the end of the last sequence."""
    expected = [[n, chunk] for n, length in enumerate(LENGTHS) for chunk in range(-(-length // 64))]
    assert table[: len(expected)].tolist() == expected
    spare = table[len(expected) :]
    assert len(spare) > 0
    assert (spare[:, 0] == len(LENGTHS) - 1).all()
    assert (spare[:, 1] * 64 >= LENGTHS[-1]).all()


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_delta_rule_gets_boundaries_and_a_table_of_chunks(calls: list[Any], per_channel: bool) -> None:
    """chunk_kda takes no table. Boundaries are a copy each time, because fla remembers tables by the tensor."""
    tensors, bounds = inputs(per_channel=per_channel), boundaries(LENGTHS)
    states = torch.zeros(len(LENGTHS), 4, 4, 6)
    options: dict[str, Any] = {"normalize": True, "initial_state": states, "output_state": True}
    out, state = gated_delta_rule(*tensors, bounds, **options)
    assert torch.equal(out, tensors[2])
    assert state == "state"
    ((name, given, keywords),) = calls
    assert name == ("chunk_kda" if per_channel else "chunk_gated_delta_rule")
    assert all(torch.equal(x[0], y) for x, y in zip(given, tensors, strict=True))
    assert torch.equal(keywords["cu_seqlens"], bounds.long())
    if not per_channel:
        check_table(keywords.pop("chunk_indices"))
    del keywords["cu_seqlens"]
    assert keywords.pop("initial_state") is states
    assert keywords == {"output_final_state": True, "scale": 0.5, "use_qk_l2norm_in_kernel": True, "chunk_size": 64}


def test_the_convolution_gets_boundaries_and_a_table_of_chunks(calls: list[Any]) -> None:
    x, weight, bias = torch.randn(TOKENS, 5), torch.randn(5, 4), torch.randn(5)
    out, _ = short_convolution(x, weight, boundaries(LENGTHS), bias=bias, activation="silu")
    assert torch.equal(out, x)
    ((_, given, keywords),) = calls
    assert all(torch.equal(a, b) for a, b in zip(given, (x[None], weight, bias), strict=True))
    check_table(keywords.pop("chunk_indices"))
    assert torch.equal(keywords.pop("cu_seqlens"), boundaries(LENGTHS).long())
    assert keywords == {"activation": "silu"}


def test_no_kernel_gets_no_tokens(calls: list[Any]) -> None:
    bounds = boundaries([0, 0])
    out, state = gated_delta_rule(*inputs(0), bounds, output_state=True)
    assert out.shape == (0, 4, 6)
    assert state is not None
    assert not state.any()
    assert short_convolution(torch.randn(0, 5), torch.randn(5, 4), bounds)[0].shape == (0, 5)
    assert not calls


@pytest.mark.parametrize(
    ("installed", "has"), [("0.5.1", False), ("0.6.0", True), ("0.10.2", True), ("1.0.0rc1", True), (None, False)]
)
def test_older_versions_are_not_used(monkeypatch: pytest.MonkeyPatch, installed: str | None, has: bool) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(backends, "version", version)
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    assert backends._has_fla() == has
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert not backends._has_fla()
