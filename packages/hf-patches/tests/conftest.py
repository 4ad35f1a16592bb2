"""Fixtures of the tests of hf-patches."""

import os

import pytest
from hypothesis import settings

# The first example of a session pays for imports; a loaded machine is slow at any time.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

# Nothing is ever downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
