"""quack's `gemm` and `run_gemm_plan` on a CPU, with the demands on layouts that its kernels for Hopper have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import quack

_DENSE = SimpleNamespace(products=[])


@contextmanager
def dense(min_work: int = 1, min_size: int = 1) -> Iterator[tuple[list[dict[str, Any]], list[tuple[int, ...]]]]:
    """Give large products of linear layers to this quack; yield the compiled kernels, and the products' `(M, N, K)`."""
    products: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        compiled = install(patch)
        patch.setattr(quack, "MIN_WORK", min_work)
        patch.setattr(quack, "MIN_SIZE", min_size)
        patch.setattr(quack, "is_hopper", lambda device: True)
        patch.setattr(quack, "has_quack", lambda: True)
        patch.setattr(_DENSE, "products", products)
        yield compiled, products


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let the package find this quack and a Hopper GPU; return the list of compiled kernels."""
    compiled: list[dict[str, Any]] = []

    def gemm(a: Tensor, b: Tensor, d: Tensor, c: None, *, tile_count_semaphore: Tensor | None, **options: Any) -> Any:
        bounds = {name: options.pop(name, None) for name in ("cu_seqlens_m", "cu_seqlens_k")}
        compiled.append(options)
        layouts = [x.stride(-1) == 1 for x in (a, b, d)]
        plan = SimpleNamespace(
            dynamic=options["is_dynamic_persistent"], add=options["add_to_output"], of=(layouts, d.dtype)
        )
        run_gemm_plan(plan, a, b, d, c, tile_count_semaphore=tile_count_semaphore, **bounds)
        return plan

    module = SimpleNamespace(gemm=gemm, run_gemm_plan=run_gemm_plan)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(gemm=module))
    monkeypatch.setattr(quack, "_plans", {})
    return compiled


def run_gemm_plan(
    plan: Any,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: None,
    *,
    tile_count_semaphore: Tensor | None = None,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> None:
    assert (tile_count_semaphore is not None) == plan.dynamic
    assert tile_count_semaphore is None or tile_count_semaphore.tolist() == [0]
    for x in (a, b, d):
        assert not x.requires_grad
        assert 1 in x.stride()[-2:], "contiguous along rows or columns"
    assert plan.of == ([x.stride(-1) == 1 for x in (a, b, d)], d.dtype)
    bounds = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
    if bounds is None:
        _DENSE.products.append((len(a), len(b), a.shape[1]))
        product = a.float() @ b.float().T
        d.copy_(d + product if plan.add else product)
        return
    assert bounds.dtype == torch.int32
    sizes = bounds.diff().tolist()
    assert sum(sizes) == bounds[-1]
    assert bounds[0] == 0
    if cu_seqlens_m is not None:
        assert cu_seqlens_k is None
        assert a.stride(-1) == d.stride(-1) == 1
        assert not plan.add
        for rows, one, out in zip(a.split(sizes), b, d.split(sizes), strict=True):
            out.copy_(rows.float() @ one.float().T)
        return
    assert a.stride(-2) == b.stride(-2) == 1
    for left, right, out in zip(a.split(sizes, dim=1), b.split(sizes, dim=1), d, strict=True):
        product = left.float() @ right.float().T
        out.copy_(out + product if plan.add else product)
