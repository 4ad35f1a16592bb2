"""Which backend of the gated delta rule a call gets, by the table alone."""

from collections.abc import Callable, Iterator

import pytest
import torch

from parallel_layers.linear_attention import backends
from parallel_layers.linear_attention.backends import (
    BACKENDS,
    DELTA_RULE,
    MAMBA2,
    available_backends,
    choose_backend,
    why_not,
)

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretends to a GPU, a version of Triton and packages."""

    def pretend(*installed: str, capability: tuple[int, int] = HOPPER, triton: str = "3.6.0") -> None:
        monkeypatch.setattr(backends, "_is_installed", {"chunked", *installed}.__contains__)
        monkeypatch.setattr(backends, "capability", lambda device: capability)
        monkeypatch.setattr(backends, "version", lambda name: triton)
        monkeypatch.setattr(backends, "find_spec", lambda name: name if name in installed else None)
        backends._choose.cache_clear()

    yield pretend
    backends._choose.cache_clear()


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "per_channel", "trains"),
    [
        (HOPPER, "3.3.1", False, False, True),
        (HOPPER, "3.4.0", False, False, False),
        (HOPPER, "3.6.0", False, False, False),
        (HOPPER, "3.6.0", False, True, True),
        (HOPPER, "3.6.0", True, False, True),
        (HOPPER, "3.7.0+git1234", False, False, False),
        (HOPPER, "3.7.1", False, False, True),
        (BLACKWELL, "3.6.0", False, False, True),
    ],
)
def test_auto_never_picks_a_forward_whose_backward_raises(
    machine: Callable[..., None],
    capability: tuple[int, int],
    triton: str,
    tilelang: bool,
    per_channel: bool,
    trains: bool,
) -> None:
    machine("fla", *["tilelang"] * tilelang, capability=capability, triton=triton)

    def choose(name: str, *, gradients: bool) -> str:
        return choose_backend(name, "cuda", torch.bfloat16, 128, per_channel=per_channel, gradients=gradients)

    assert choose("auto", gradients=False) == choose("fla", gradients=False) == "fla"
    assert choose("auto", gradients=True) == ("fla" if trains else "chunked")
    if not trains:
        with pytest.raises(ValueError, match=rf"Triton 3.4 to 3.7.0, and {triton[:5]}.* is installed.*one of chunked"):
            choose("fla", gradients=True)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cuda", torch.bfloat16, 256, None),
        ("cuda", torch.float16, 64, None),
        ("cpu", torch.bfloat16, 64, "it runs on cuda, not on cpu"),
        ("cuda", torch.float32, 64, "it takes torch.bfloat16, torch.float16, not torch.float32"),
        ("cuda", torch.bfloat16, 512, "its largest head size is 256, not 512"),
    ],
)
def test_a_backend_that_cannot_says_why(
    machine: Callable[..., None], device: str, dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    machine("fla")
    assert why_not("fla", device, dtype, head_dim) == reason
    expected = "chunked" if reason else "fla"
    assert choose_backend("auto", device, dtype, head_dim) == expected
    machine()
    assert available_backends() == ("chunked",)
    assert str(why_not("fla", device, dtype, head_dim)).startswith("it needs the fla-core package, 0.6 or newer")
    assert choose_backend("auto", device, dtype, head_dim) == "chunked"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        ("cuda", torch.bfloat16, 256, "triton"),
        ("cuda", torch.float32, 128, "triton"),
        ("cuda", torch.float64, 128, "chunked"),
        ("cuda", torch.float16, 128, "chunked"),
        ("cuda", torch.bfloat16, 512, "chunked"),
        ("cpu", torch.bfloat16, 128, "chunked"),
    ],
)
def test_each_recurrence_has_its_kernels(
    machine: Callable[..., None], device: str, dtype: torch.dtype, head_dim: int, expected: str
) -> None:
    machine("fla", "triton")
    assert choose_backend("auto", device, dtype, head_dim, recurrence=MAMBA2) == expected
    assert why_not("fla", device, dtype, head_dim, recurrence=MAMBA2) == f"it computes {DELTA_RULE}, not {MAMBA2}"
    assert why_not("triton", device, dtype, head_dim) == f"it computes {MAMBA2}, not {DELTA_RULE}"
    machine()
    assert choose_backend("auto", device, dtype, head_dim, recurrence=MAMBA2) == "chunked"


def test_the_plain_form_can_do_everything() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for device in ("cpu", "cuda", "meta"):
            assert why_not("chunked", device, dtype, 10_000, per_channel=True, gradients=True) is None
            assert why_not("chunked", device, dtype, 10_000, gradients=True, recurrence=MAMBA2) is None
    assert list(BACKENDS)[-1] == "chunked"
