"""Which backend a case gets, by the table alone: as if everything were installed, or all but some."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from parallel_layers.attention import backends
from parallel_layers.attention.backends import BACKENDS, Backend, choose_backend, why_not
from parallel_layers.attention.kernel_interface import Kernel
from parallel_layers.attention.packed import packed_attention
from parallel_layers.attention.reference import REFERENCE

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def install(*names: str) -> None:
        monkeypatch.setattr(backends, "_is_installed", names.__contains__)
        backends._choose.cache_clear()

    yield install
    backends._choose.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "lse", "expected"),
    [
        (torch.bfloat16, 128, False, False, "flash-attn-4"),
        (torch.bfloat16, 128, True, True, "flash-attn-4"),
        (torch.bfloat16, 72, True, True, "flash-attn"),  # not a multiple of 32
        (torch.float16, 192, False, True, "flash-attn"),  # latent attention
        (torch.float16, 256, True, False, "flash-attn"),
        (torch.bfloat16, 257, False, False, "sdpa"),
        (torch.bfloat16, 576, False, False, "sdpa"),  # latents themselves
        (torch.bfloat16, 576, True, False, "reference"),
        (torch.float32, 64, False, False, "sdpa"),
        (torch.float32, 64, False, True, "reference"),
    ],
)
def test_auto_takes_the_first_that_can(
    install: Install, dtype: torch.dtype, head_dim: int, softcap: bool, lse: bool, expected: str
) -> None:
    install(*BACKENDS)
    assert choose_backend("auto", "cuda", dtype, head_dim, softcap, lse) == expected
    assert choose_backend("auto", "cpu", dtype, head_dim, softcap, lse) == "reference"


@pytest.mark.parametrize(("value_dim", "expected"), [(128, "flash-attn-4"), (64, "flash-attn")])
def test_auto_knows_the_pairs_of_a_kernel(install: Install, value_dim: int, expected: str) -> None:
    install(*BACKENDS)
    assert choose_backend("auto", "cuda", torch.bfloat16, 192, False, False, value_dim) == expected


@pytest.mark.parametrize(
    ("missing", "softcap", "expected"),
    [
        (["flash-attn-4"], False, "flash-attn"),
        (["flash-attn-4", "flash-attn"], False, "varlen"),
        (["flash-attn-4", "flash-attn"], True, "reference"),
        (["flash-attn-4", "flash-attn", "varlen"], False, "sdpa"),
    ],
)
def test_auto_looks_at_what_is_installed(install: Install, missing: list[str], softcap: bool, expected: str) -> None:
    install(*(name for name in BACKENDS if name not in missing))
    assert choose_backend("auto", "cuda", torch.bfloat16, 64, softcap, False) == expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "softcap", "message"),
    [
        (
            "flash-attn-4",
            "cuda",
            torch.bfloat16,
            256,
            False,
            "its largest head size is 128, not 256; use 'auto' or one of",
        ),
        ("flash-attn", "cuda", torch.bfloat16, 12, False, "its head sizes are multiples of 8, not 12"),
        ("flash-attn", "cuda", torch.float32, 64, False, "it takes torch.bfloat16, torch.float16, not torch.float32"),
        ("flash-attn", "cpu", torch.bfloat16, 64, False, "it runs on cuda, not on cpu"),
        ("varlen", "cuda", torch.bfloat16, 64, True, "it has no soft-cap"),
    ],
)
def test_a_backend_that_cannot_says_why(
    install: Install, name: str, device: str, dtype: torch.dtype, head_dim: int, softcap: bool, message: str
) -> None:
    install(*BACKENDS)
    with pytest.raises(ValueError, match=f"backend='{name}' cannot do this case: {message}"):
        choose_backend(name, device, dtype, head_dim, softcap, False)


@settings(max_examples=200, deadline=None)
@given(
    installed=st.sets(st.sampled_from(sorted(set(BACKENDS) - {"sdpa", "reference", "exact"}))),
    name=st.sampled_from(sorted(BACKENDS)),
    device=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    head_dim=st.sampled_from([8, 12, 32, 72, 128, 192, 256, 264, 576]),
    softcap=st.booleans(),
    lse=st.booleans(),
)
def test_every_case_is_done_or_refused_by_name(
    installed: set[str], name: str, device: str, dtype: torch.dtype, head_dim: int, softcap: bool, lse: bool
) -> None:
    """A refusal names the backend and exactly those that would do; `auto` takes the first of them."""
    case = (device, dtype, head_dim, softcap, lse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_is_installed", (installed | {"sdpa", "reference", "exact"}).__contains__)
        backends._choose.cache_clear()
        able = [other for other in BACKENDS if why_not(other, *case) is None]
        assert "reference" in able
        first = next(other for other in able if device == "cuda" or other == "reference")
        assert choose_backend("auto", *case) == first
        if name in able:
            assert choose_backend(name, *case) == name
        else:
            with pytest.raises(ValueError, match=f"backend='{name}' cannot do .*; use 'auto' or one of ") as error:
                choose_backend(name, *case)
            assert str(error.value).endswith(f"one of {', '.join(able)}")
    backends._choose.cache_clear()


def forward_of_one_head_size(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Stands for the flash kernels, which take queries, keys and values of one head size."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    return REFERENCE.forward(q, k, v, *rest)


def backward_of_one_head_size(d_out: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    assert d_out.shape[-1] == q.shape[-1]
    return REFERENCE.backward(d_out, q, *rest)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(6, 4), (4, 6), (5, 5)])
def test_head_sizes_are_made_one_for_kernels_that_want_it(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int
) -> None:
    kernel = Kernel(forward_of_one_head_size, backward_of_one_head_size)
    monkeypatch.setitem(BACKENDS, "one-head-size", Backend("nothing", lambda: True, kernel))
    torch.manual_seed(0)
    shapes = ((9, 4, head_dim), (9, 2, head_dim), (9, 2, value_dim))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    outs = [packed_attention(*leaves, cu_seqlens, 5, backend=name) for name in ("one-head-size", "reference")]
    seed = torch.randn_like(outs[0])
    gradients = [torch.autograd.grad(out, leaves, seed) for out in outs]
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(gradients[0], gradients[1])
