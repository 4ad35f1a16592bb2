"""Which tests a run includes: `--slow` adds the exhaustive grids; GPU tests are skipped without enough devices."""

import gc
import os
import sys
from importlib.util import find_spec

import pytest

# The tests start many processes that import torch and transformers: whatever one of them has compiled, the others load.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Collections of garbage while modules are imported and tests are collected take seconds and find little.
gc.disable()
# The models are tiny: more threads only wait for each other. Read when torch is imported, by what the tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow` and `--record`."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--record", action="store_true", help="record the parity cases that pass in tests/parity.json")


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which starts the workers
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run everything in two workers, each file in one; a run of chosen tests, and `--record`, stay in one process."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.markexpr
    if chosen or config.option.record or config.option.usepdb or hasattr(config, "workerinput"):
        return
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that a plain run leaves out the slow tests."""
    return None if config.getoption("--slow") else "slow tests are left out: run them with --slow"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless asked for, GPU tests without the devices (`gpu(2)` needs two), vLLM's without vLLM."""
    import torch

    if not config.getoption("--slow"):
        # A Ray cluster and its first group take 20 s to start; `.ci/run` has these tests.
        slow = [i for i in items if i.get_closest_marker("slow") or "ray_cluster" in getattr(i, "fixturenames", ())]
        if hasattr(config, "workerinput"):  # reports of thousands of skipped tests take seconds
            left_out = set(slow)
            items[:] = [item for item in items if item not in left_out]
        else:
            for item in slow:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; `.ci/run` has an environment with it"))
        if gpu := item.get_closest_marker("gpu"):
            needed = gpu.args[0] if gpu.args else 1
            if devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {devices}"))


def pytest_collection_finish() -> None:
    """Spare garbage collections the modules and the tests, which live until the end."""
    gc.enable()
    gc.freeze()
