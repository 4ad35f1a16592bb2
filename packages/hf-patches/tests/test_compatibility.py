"""The oldest transformers that is claimed, and what happens when a symbol has moved."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import transformers
from transformers import AttentionInterface
from transformers.integrations import moe

OLDEST = "5.17.0"


def run(code_or_args, **environment):
    arguments = [sys.executable, *code_or_args]
    return subprocess.run(
        arguments, env=os.environ | environment, capture_output=True, text=True, timeout=1500, check=False
    )


def test_a_moved_symbol_fails_with_its_name_and_importing_changes_nothing():
    own = moe.ExpertsInterface
    others = {name: module for name, module in sys.modules.items() if not f"{name}.".startswith("hf_patches.")}
    with mock.patch.dict(sys.modules, others, clear=True):
        with mock.patch.object(moe, "ExpertsInterface"):
            del moe.ExpertsInterface
            message = r"cannot import name 'ExpertsInterface' from 'transformers\.integrations\.moe'"
            with pytest.raises(ImportError, match=message):
                importlib.import_module("hf_patches")
        before = dict(AttentionInterface._global_mapping), dict(own._global_mapping)
        importlib.import_module("hf_patches.testing")
        assert before == (AttentionInterface._global_mapping, own._global_mapping)
        assert "torch_npu" not in sys.modules


@pytest.mark.slow
def test_the_suite_passes_on_the_oldest_transformers(tmp_path):
    """Installs it beside the current one, so it needs the package registry."""
    if transformers.__version__ == OLDEST:
        pytest.skip("this is the oldest")
    # Its pins are older than the workspace's, so uv must not see the workspace's constraints.
    for packages in (["--no-deps", f"transformers=={OLDEST}"], ["huggingface-hub>=1.5,<2"]):
        install = ["uv", "pip", "install", "--quiet", "--python", sys.executable, "--target", str(tmp_path), *packages]
        subprocess.run(install, cwd=tmp_path, check=True, timeout=600)
    here = Path(__file__)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    version = run(["-c", "import transformers; print(transformers.__version__)"], PYTHONPATH=path)
    assert version.stdout.strip() == OLDEST
    result = run(["-m", "pytest", str(here.parent), "-q", "-x", f"--ignore={here}"], PYTHONPATH=path)
    assert result.returncode == 0, result.stdout[-3000:]
