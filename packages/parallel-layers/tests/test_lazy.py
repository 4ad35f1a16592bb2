"""The bounds that a package declares, against what is installed."""

from contextlib import nullcontext
from importlib import metadata

import pytest

import parallel_layers
from parallel_layers import lazy


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that `importlib.metadata` tells."""
    versions: dict[str, str] = {}
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or version(name))
    lazy.check_requirements.cache_clear()
    return versions


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.9", "2.11.0a0+nv26.3"])
def test_versions_inside_the_bounds_are_taken(version: str, installed: dict[str, str]) -> None:
    installed["torch"] = version
    lazy.check_version("parallel-layers", "torch", ">=2.11,<2.16")


@pytest.mark.parametrize("version", ["2.10.9", "2.9.0+cpu", "2.16.0", "2.16.0.dev20261101", "3.0"])
def test_others_are_refused_with_the_bounds_and_the_command(version: str, installed: dict[str, str]) -> None:
    installed["torch"] = version
    with pytest.raises(ImportError) as caught:
        lazy.check_version("parallel-layers", "torch", ">=2.11,<2.16")
    assert str(caught.value) == (
        f'torch {version} is installed, and parallel-layers supports >=2.11,<2.16: pip install "torch>=2.11,<2.16"'
    )


def test_the_first_use_of_a_name_refuses_a_version(installed: dict[str, str]) -> None:
    installed["torch"] = "2.10.0"
    with pytest.raises(ImportError, match=r"torch 2\.10\.0 is installed, and parallel-layers supports .*2\.11"):
        parallel_layers.__getattr__("ParallelDims")
    installed["torch"] = "2.11.0"
    assert parallel_layers.__getattr__("ParallelDims") is parallel_layers.ParallelDims


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("torch >=3,<4", True),
        ("torch[opt]>=3", True),
        ("zope.interface<2", True),
        ("torch<2.16,>=2.11", False),
        ("torch", False),
        ("absent>=3", False),
        ("torch>=3; extra == 'newest'", False),
    ],
)
def test_the_requirements_of_a_distribution_are_read(
    line: str, refused: bool, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that only an extra needs, or that is not installed, is left to its import."""
    installed |= {"torch": "2.13.0", "zope.interface": "2.0"}
    monkeypatch.setattr(metadata, "requires", lambda _: [line])
    message = r"is installed, and ours supports .*: pip install"
    with pytest.raises(ImportError, match=message) if refused else nullcontext():
        lazy.check_requirements("ours")
