"""A symbol that transformers has moved is named by an error; `.ci/upstream` runs the tests on other versions."""

import importlib
import sys
from unittest import mock

import pytest
from transformers import AttentionInterface
from transformers.integrations import moe


def test_a_moved_symbol_fails_with_its_name_and_importing_changes_nothing():
    own = moe.ExpertsInterface
    others = {name: module for name, module in sys.modules.items() if not f"{name}.".startswith("hf_patches.")}
    with mock.patch.dict(sys.modules, others, clear=True):
        with mock.patch.object(moe, "ExpertsInterface"):
            del moe.ExpertsInterface
            message = r"cannot import name 'ExpertsInterface' from 'transformers\.integrations\.moe'"
            with pytest.raises(ImportError, match=message):
                importlib.import_module("hf_patches").patch  # noqa: B018
        before = dict(AttentionInterface._global_mapping), dict(own._global_mapping)
        importlib.import_module("hf_patches.testing.tiny_models")
        assert before == (AttentionInterface._global_mapping, own._global_mapping)
        assert "torch_npu" not in sys.modules
