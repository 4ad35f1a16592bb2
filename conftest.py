"""Which tests a run includes: `--slow` adds the exhaustive grids; GPU tests are skipped without enough devices."""

import gc
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

# The tests start many processes that import torch and transformers: whatever one of them has compiled, the others load.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Collections of garbage while modules are imported and tests are collected take seconds and find little.
gc.disable()
# The models are tiny: more threads only wait for each other. Read when torch is imported, by what the tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Files of tests in memory, where there is room: each checkpoint waits until the disk has it.
if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"


# Of tests that go over all model families, the families that each run has: of each kind of layer one.
FAMILIES_IN_EVERY_RUN = {
    *("llama", "llama_value", "qwen2", "cohere2", "olmo2", "gpt_oss", "qwen3_moe", "glm4_moe", "granitemoe_value"),
    *("deepseek", "deepseek_v3", "gemma4", "gemma4_text", "gemma4_e2b", "kimi_k25", "kimi_k2_5", "qwen3_vl_moe"),
    *("kimi_linear", "qwen3_next"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--slow`, `--families` and `--record`."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--families", action="store_true", help="run tests marked families with all families")
    parser.addoption("--record", action="store_true", help="record the parity cases that pass in tests/parity.json")


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which starts the workers
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run everything in three workers, each file in one; a run of chosen tests, and `--record`, stay in one process.

    Tests of time limits wait, and a third worker computes meanwhile on two cores.
    """
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.markexpr
    if chosen or config.option.record or config.option.usepdb or hasattr(config, "workerinput"):
        return
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 3, "loadfile"


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in a plain run than with `--slow`, without time limits, which a loaded machine exceeds."""
    from hypothesis import settings

    settings.register_profile("shared-machine", deadline=None, max_examples=100 if config.getoption("--slow") else 30)
    settings.load_profile("shared-machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Give a worker files of one package after another.

    Each worker that has a package starts what its tests share: servers that import for seconds, pools, tiny models.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByPackage(LoadFileScheduling):
        """Assigns the next file of the worker's package, then of a package without a worker, then any file."""

        def _assign_work_unit(self, node: Any) -> None:
            busy = {worker: [package_of(file) for file in files] for worker, files in self.assigned_work.items()}
            others = {packages[-1] for worker, packages in busy.items() if packages and worker is not node}
            last = busy.get(node, [])[-1:]
            sizes = Counter(map(package_of, self.workqueue))
            # `max` takes the first of equals: the file with most tests.
            file = max(
                self.workqueue,
                key=lambda file: ([package_of(file)] == last, package_of(file) not in others, sizes[package_of(file)]),
            )
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return ByPackage(config, log)


def package_of(file: str) -> str:
    """Return the folder of a test file's package; empty for the tests between packages."""
    return file.partition("/tests/")[0] if "/tests/" in file else ""


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which tests a run leaves out."""
    left_out = [] if config.getoption("--slow") else ["slow tests are left out: run them with --slow"]
    if not config.getoption("--families"):
        left_out.append("further model families are left out of tests that go over all: run them with --families")
    if getattr(config.option, "numprocesses", None):
        left_out.append("tests for more GPUs than there are, and for vLLM where it is missing, are left out")
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless asked for, GPU tests without the devices (`gpu(2)` needs two), vLLM's without vLLM."""
    import torch

    devices = torch.cuda.device_count()
    left_out = dict[pytest.Item, str]()
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu and devices < (needed := gpu.args[0] if gpu.args else 1):
            left_out[item] = f"needs {needed} CUDA device(s), found {devices}"
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            left_out[item] = "vLLM is not installed; `.ci/run` has an environment with it"
        # A Ray cluster and its first group take 20 s to start; `.ci/run` has these tests.
        is_slow = item.get_closest_marker("slow") or "ray_cluster" in getattr(item, "fixturenames", ())
        if is_slow and not config.getoption("--slow"):
            left_out[item] = "slow: run with --slow"
        if (over := item.get_closest_marker("families")) and not config.getoption("--families"):
            family = re.sub(r"[-.]", "_", item.callspec.params[over.args[0]])  # type: ignore[attr-defined]
            if family not in FAMILIES_IN_EVERY_RUN:
                left_out[item] = "a further family: run with --families"
    if hasattr(config, "workerinput"):  # reports of thousands of skipped tests take seconds
        items[:] = [item for item in items if item not in left_out]
    for item, reason in left_out.items():
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Spare garbage collections the modules and the tests, which live until the end, and collect seldom."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks(request: pytest.FixtureRequest) -> None:
    """Fork the server of all ranks before the first test, with all that was imported; its own imports take 8 s."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in request.session.items):
        import torch

        from parallel_layers.testing import fork_server

        # Where torch has CUDA, imports may have touched a device, which does not work after a fork.
        if sys.platform == "linux" and not torch.backends.cuda.is_built():
            fork_server()
