"""The stand-in for a GPU changes nothing but while it is entered."""

import contextlib
import os
import queue
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_utils import megatron_device
from megatron_utils.testing import cpu_stand_in, stand_in_is_active


def replaced() -> dict[str, Any]:
    """Everything that the stand-in replaces, as it is now."""
    from megatron_utils.testing.cpu import _STAND_INS

    return {f"{module.__name__}.{name}": vars(module)[name] for module, names in _STAND_INS for name in names}


def test_all_is_as_before_when_it_is_left() -> None:
    before = replaced()
    assert not stand_in_is_active()
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    assert megatron_device() == gpu
    with contextlib.suppress(KeyError), cpu_stand_in():
        with cpu_stand_in():
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        # Leaving the inner one leaves the outer one entered.
        assert stand_in_is_active()
        assert megatron_device() == torch.device("cpu")
        inside = replaced()
        assert all(inside[name] is not function for name, function in before.items())
        assert torch.zeros(1, device="cuda", pin_memory=True).cuda().type() == "torch.cuda.FloatTensor"
        raise KeyError
    assert not stand_in_is_active()
    assert replaced() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert not torch.overrides._get_current_function_mode_stack()


IMPORTED = """
import torch, torch.distributed as dist
from megatron.core.transformer.moe import router, token_dispatcher  # what the stand-in reaches into
from megatron.core.tensor_parallel import random
modules = torch, torch.cuda, torch.Tensor, dist, random, token_dispatcher, router.TopKRouter
before = [dict(vars(module)) for module in modules]
import megatron_utils.testing
from megatron_utils.testing import cpu_stand_in
for module, state in zip(modules, before):
    after = vars(module)
    changed = [name for name in state if after.get(name) is not state[name] and name != "__warningregistry__"]
    assert not changed, (module, changed)
"""

NOT_USED = """
import importlib, sys
from pathlib import Path
import megatron_utils
root = Path(megatron_utils.__file__).parent
for file in root.rglob("*.py"):
    name = ".".join((root.name, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    if not name.startswith("megatron_utils.testing"):
        importlib.import_module(name)
used = [name for name in sys.modules if name.startswith("megatron_utils.testing")]
assert not used, used
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [IMPORTED, NOT_USED], ids=["importing it changes nothing", "nothing imports it"])
def test_only_entering_it_has_an_effect(program: str) -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr


class UnpickledIn:
    """Becomes the id of the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


def test_the_process_that_passes_on_results_of_a_save_unpickles_none() -> None:
    """It would import torch, on every rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    name = next(name for name in vars(filesystem_async) if name.endswith("get_write_results_queue"))
    with cpu_stand_in():
        results = getattr(filesystem_async, name)()
    results.put(UnpickledIn())
    assert results.get_nowait() == os.getpid()
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_torch_compile_can_be_used_first_inside_it() -> None:
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    with cpu_stand_in():
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(())) == 1
    trace_rules.clear_lru_cache()
