"""Every public loss says where it comes from."""

import inspect
import re

import pytest

from rl_models import losses

# Statistics of a batch, no loss.
NO_LOSS = {"whiten"}
# Older than arXiv.
IN_PRINT = {"entropy_bonus": "Williams and Peng 1991"}
PUBLIC = [name for name in losses.__all__ if inspect.isfunction(getattr(losses, name)) and name not in NO_LOSS]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_loss_names_its_source(name: str) -> None:
    docstring = inspect.getdoc(getattr(losses, name)) or ""
    assert re.search(IN_PRINT.get(name, r"arXiv:\d{4}\.\d{5}|https?://\S+"), docstring)
