"""Each supported version of Megatron-Core has a row; others are refused with the command that installs one."""

import importlib.metadata
import subprocess
import sys

import pytest

from megatron_utils.core_version import VERSIONS, core_version


def test_patch_releases_share_a_row() -> None:
    assert core_version("0.19.2") is core_version("0.19.0rc1") is VERSIONS["0.19"]
    assert core_version() is core_version(importlib.metadata.version("megatron-core"))


@pytest.mark.parametrize("installed", ["0.15.3", "0.20.0", "1.0", "0.1", "unknown"])
def test_other_versions_are_refused(installed: str) -> None:
    with pytest.raises(ImportError) as error:
        core_version(installed)
    assert str(error.value) == (
        f"megatron-core {installed} is installed, and megatron-utils supports 0.16 to 0.19: "
        'pip install "megatron-core>=0.16,<0.20" (0.17 and later need Python 3.12)'
    )


REFUSED = """
import importlib.metadata, sys
importlib.metadata.version = lambda name: "0.20.1"
try:
    import megatron_utils.gpt
except ImportError as error:
    print(error, "megatron" in sys.modules)
"""


def test_an_unsupported_version_is_refused_before_it_is_imported() -> None:
    run = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.startswith("megatron-core 0.20.1 is installed")
    assert run.stdout.endswith("False\n")
