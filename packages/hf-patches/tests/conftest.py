"""Fixtures of the tests of hf-patches."""

import os

import pytest

# Nothing is ever downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
