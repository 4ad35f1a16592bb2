"""Attention of single tokens to the blocks of a pool, against plain attention to the same keys in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_layers.attention.packed import packed_attention
from parallel_layers.kernels.float8 import quantize_rows
from parallel_layers.kernels.paged_decode import paged_decode

# Query heads, key-value heads, D, D', tokens of a block, lengths, options.
CASES: dict[str, tuple[int, int, int, int, int, list[int], dict[str, Any]]] = {
    "short": (4, 2, 16, 16, 64, [0, 63, 130], {}),
    "window": (6, 2, 24, 8, 64, [64, 200], {"window": 70}),
    "softcap and sinks": (6, 2, 24, 24, 128, [5, 200], {"softcap": 2.0, "sinks": True}),
    "values in keys": (8, 1, 40, 32, 64, [100, 127], {"in_keys": True}),
}
ON_GPUS = {
    "many": (32, 8, 64, 64, 64, [(i * 37) % 700 for i in range(300)], {}),
    "latent": (128, 1, 576, 512, 64, [1000, 127], {"in_keys": True}),
    "long, window": (32, 8, 128, 128, 64, [20000, 3], {"window": 300}),
    "long, sinks": (32, 8, 128, 128, 64, [20000, 3], {"sinks": True}),
}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def entries(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    """The keys or values of a sequence, in fp64 where they are in FP8."""
    stored = pool[blocks] if scales is None else pool[blocks].double() * scales[blocks][..., None]
    return stored.transpose(1, 2).flatten(0, 1)


def check(device: torch.device, dtype: torch.dtype, case: tuple[Any, ...], *, float8: bool = False) -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim, value_dim, page, lengths, options = case
    width = max(lengths) // page + 2
    keys = torch.randn(len(lengths) * width + 1, kv_heads, page, head_dim, device=device, dtype=dtype)
    values = torch.randn_like(keys[..., :1].expand(*keys.shape[:3], value_dim))
    scales = None
    if float8:
        (keys, key_scales), (values, value_scales) = quantize_rows(keys), quantize_rows(values)
        scales = key_scales, key_scales if options.get("in_keys") else value_scales
    if in_keys := options.get("in_keys", False):
        values = keys[..., :value_dim]
    table = torch.randperm(len(keys) - 1, device=device).view(len(lengths), width).int()
    # As a split of one projection: rows with other heads between them.
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    v = (k if in_keys else v)[..., :value_dim]
    sinks = torch.randn(heads, device=device) if options.get("sinks") else None
    how = {"scale": head_dim**-0.5, "softcap": options.get("softcap"), "window": options.get("window")}
    expected = []
    for n, length in enumerate(lengths):
        own_k, own_v = (
            entries(pool, scales and scales[number], table[n].long())[:length]
            for number, pool in enumerate((keys, values))
        )
        wide = [
            x.double().cpu() for x in (q[n : n + 1], torch.cat((own_k, k[n : n + 1])), torch.cat((own_v, v[n : n + 1])))
        ]
        bounds = [torch.tensor([0, count], dtype=torch.int32) for count in (1, length + 1)]
        own = None if sinks is None else sinks.double().cpu()
        expected.append(
            packed_attention(*wide, bounds[0], 1, cu_seqlens_k=bounds[1], max_seqlen_k=length + 1, sinks=own, **how)
        )
    on_device = torch.tensor(lengths, device=device).int()
    out = paged_decode(q, k, v, keys, values, table, on_device, sinks=sinks, scales=scales, **how)
    torch.testing.assert_close(out.double().cpu(), torch.cat(expected), rtol=0, atol=TOLERANCES[dtype])
    for n, length in enumerate(lengths):
        place: tuple[Tensor, slice, int] = (table[n, length // page].long(), slice(None), length % page)
        if scales is None:
            assert torch.equal(keys[place], k[n])
            assert torch.equal(values[place], v[n])
            continue
        for number, (pool, new) in enumerate(((keys, k[n]), (values, v[n]))):
            rounded, scale = quantize_rows(k[n] if in_keys else new)
            assert torch.equal(scales[number][place], scale)
            # The interpreter rounds numbers to FP8 wrongly, to the next number at most.
            apart = (pool[place].float() - rounded[..., : pool.shape[-1]].float()).abs()
            assert apart.max() <= (0 if device.type == "cuda" else 64)


@pytest.mark.parametrize("case", CASES)
def test_as_plain_attention(device: torch.device, case: str) -> None:
    check(device, torch.float32, CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_in_float8_have_scales(device: torch.device, case: str) -> None:
    check(device, torch.float32, CASES[case], float8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", {**CASES, **ON_GPUS})
def test_float8_on_gpus(case: str) -> None:
    check(torch.device("cuda"), torch.bfloat16, {**CASES, **ON_GPUS}[case], float8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", {**CASES, **ON_GPUS})
def test_on_gpus(dtype: torch.dtype, case: str) -> None:
    if case == "latent" and dtype == torch.float32:
        pytest.skip("`supports_paged_decode` refuses it")
    check(torch.device("cuda"), dtype, {**CASES, **ON_GPUS}[case])
