"""Runs in a store: what another machine finds after a kill at any moment, and a run that goes on there."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from ckpt.cli import app as ckpt_app
from ckpt.files import Store
from rl_train.cli.commands import app
from rl_train.cluster.machines import Machines
from rl_train.loop.folder import check_folder, how_to_go_on
from rl_train.loop.recipe_run import run_recipe
from rl_train.loop.run_store import RunStore
from rl_train.options.fields import working_copy
from rl_train.options.file_options import SftOptions

URL = "memory://bucket/run"
Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Go on as a machine of a name, which has a cache of its own; return its folder of the run."""

    def become(name: str, url: str = URL) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return working_copy(Path(url))

    yield become
    fsspec.filesystem("memory").store.clear()


def store(folder: Path) -> RunStore:
    found = RunStore.of(folder)
    assert found is not None
    return found


def save(folder: Path, step: int, keep: int = 2) -> None:
    """Write what a run has after a step: a line of metrics, a checkpoint, and without older checkpoints."""
    names = ("rank-0.safetensors", "state.json")
    files = {f"training/actor/step-{step:08d}/{name}": f"{name} of {step}" for name in names}
    options = json.dumps({"model": "m", "dataset": "d", "command": "sft", "steps": 4})
    files |= {"options.json": options, "training/actor/latest": f"step-{step:08d}", "actor/config.json": str(step)}
    files |= {"actor/model.safetensors": str(step), f"training/ahead/{step:08d}.safetensors": "ahead", ".lock": "x"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": step}) + "\n")
    for name in (f"step-{step - keep:08d}/state.json", f"step-{step - keep:08d}/rank-0.safetensors"):
        (folder / "training" / "actor" / name).unlink(missing_ok=True)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_another_machine_finds_the_run_without_what_was_pruned(machine: Machine) -> None:
    here = machine("here")
    run = store(here)
    for step in range(1, 5):
        save(here, step)
        (here / "rollouts").mkdir(exist_ok=True)
        (here / "rollouts" / f"step-{step:08d}.parquet").write_text("of a step that is taken again")
        run.push()
        (here / "rollouts" / f"step-{step:08d}.parquet").unlink()
    (here / "actor" / "model.safetensors").write_text("changed alone")
    run.push()
    expected = {name: text for name, text in contents(here).items() if name != ".lock"}
    there = machine("there")
    store(there).pull()
    assert contents(there) == expected
    assert sorted(path.name for path in (there / "training" / "actor").iterdir()) == [
        "latest", "step-00000003", "step-00000004"
    ]  # fmt: skip


def test_only_a_later_checkpoint_replaces_what_a_machine_has(machine: Machine) -> None:
    here = machine("here")
    save(here, 1)
    store(here).push()
    there = machine("there")
    store(there).pull()
    save(there, 2)
    store(there).pull()
    assert (there / "metrics.jsonl").read_text().count("\n") == 2, "this machine is ahead"
    store(there).push()
    machine("here")
    store(here).pull()
    assert (here / "metrics.jsonl").read_text().count("\n") == 2, "the store is ahead"
    (here / "metrics.jsonl").write_text("1\n2\n3\n")
    store(here).pull()
    assert (here / "metrics.jsonl").read_text().count("\n") == 3, "this machine has steps behind the same checkpoint"


@pytest.mark.parametrize("call", ["put_file", "rm_file"])
def test_an_upload_that_ends_anywhere_leaves_a_whole_checkpoint(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A result or checkpoint that another machine finds is of one step; the newest one that `latest` names is there."""
    files, calls, dies_at = fsspec.filesystem("memory"), 0, 0
    original = getattr(type(files), call)

    def dying(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == dies_at:
            raise OSError("the network is gone")
        original(self, *arguments, **options)

    for dies_at in range(1, 40):
        files.store.clear()
        here = machine(f"{dies_at}")
        run = store(here)
        for step in (1, 2, 3):
            save(here, step)
            if step == 3:
                calls = 0
                monkeypatch.setattr(type(files), call, dying)
            try:
                run.push()
            except OSError:
                break
        monkeypatch.setattr(type(files), call, original)
        there = machine(f"{dies_at} there")
        store(there).pull()
        latest = (there / "training/actor/latest").read_text()
        assert latest in ("step-00000002", "step-00000003")
        for folder in (there / "training/actor").glob("step-*"):
            step = int(folder.name.removeprefix("step-"))
            assert contents(folder) == {name: f"{name} of {step}" for name in ("rank-0.safetensors", "state.json")}
        assert (there / "training/actor" / latest).is_dir()
        assert (there / "training/ahead" / f"{latest[5:]}.safetensors").is_file()
        assert len(set(contents(there / "actor").values())) <= 1
        assert int(latest[5:]) <= len((there / "metrics.jsonl").read_text().splitlines())
        if calls < dies_at:
            break
        run.push()
        again = machine(f"{dies_at} again")
        store(again).pull()
        assert (again / "training/actor/latest").read_text() == "step-00000003", "the next upload mends it"
    assert dies_at > 2


def test_failed_uploads_are_told_and_the_last_one_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, told = machine("here"), list[Any]()
    save(here, 1)
    run = store(here)

    def fail() -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(run, "push", fail)
    error = r"memory://bucket/run cannot be written: .*gone.*; the run is complete in "
    with pytest.raises(ValueError, match=error), run.pushed(told.append):
        pass
    assert told == [{"message": f"{URL} is behind {here}"}]


def test_a_machine_that_is_behind_another_one_removes_nothing(machine: Machine) -> None:
    here = machine("here")
    run = store(here)
    save(here, 1)
    run.push()
    there = machine("there")
    store(there).pull()
    save(there, 2)
    store(there).push()
    with pytest.raises(ValueError, match=r"another machine goes on with this run: .* has step-00000002, which "):
        run.push()
    assert fsspec.filesystem("memory").exists("/bucket/run/training/actor/step-00000002/state.json")
    save(here, 3)
    run.push()


def test_a_checkpoint_that_is_pruned_during_its_upload_is_not_whole(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, files = machine("here"), fsspec.filesystem("memory")
    put = type(files).put_file

    def pruning(self: Any, source: str, target: str) -> None:
        if source.endswith("rank-0.safetensors"):
            Path(source).unlink()  # and state.json a moment later
        put(self, source, target)

    save(here, 1)
    monkeypatch.setattr(type(files), "put_file", pruning)
    store(here).push()
    assert not files.exists("/bucket/run/training/actor/step-00000001/state.json")


def test_a_step_does_not_wait_for_an_upload(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, goes_on = store(machine("here")), Event()
    monkeypatch.setattr(run, "push", lambda: goes_on.wait(10))
    with run.pushed(lambda event: None) as follow:
        begin = time.monotonic()
        for step in (1, 2):
            follow({"step": step})
        assert time.monotonic() - begin < 5
        goes_on.set()


def test_a_folder_of_other_files_is_refused(machine: Machine) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/run/notes.txt", b"mine")
    with pytest.raises(
        ValueError, match=r"memory://bucket/run cannot be .*: it holds other files, such as notes.txt, and no"
    ):
        store(machine("here")).pull()
    assert RunStore.of(Path("run")) is None


@pytest.mark.parametrize("name", ["/lost", "training/../../lost"])
def test_an_object_whose_name_leads_out_of_the_run_is_refused(machine: Machine, name: str) -> None:
    here, files = machine("here"), fsspec.filesystem("memory")
    save(here, 1)
    store(here).push()
    files.store[f"/bucket/run/{name}"] = files.store["/bucket/run/options.json"]
    with pytest.raises(ValueError, match=r"memory://bucket/run .*leads out of its folder"):
        store(machine("there")).pull()


def test_a_run_is_uploaded_after_steps_and_at_its_end(machine: Machine, model: Path) -> None:
    here = machine("here")
    options = SftOptions(model=model, dataset=Path("rows.jsonl"), out=Path(URL))
    checked: Any = SimpleNamespace(options=options, options_as_given=None, inputs={}, changes=())
    files = fsspec.filesystem("memory")

    def run(checked_run: Any, tell: Any) -> dict[str, float]:
        save(here, 1)
        tell({"step": 1})
        while not files.exists("/bucket/run/training/actor/latest"):
            time.sleep(0.01)
        save(here, 2)
        return {}

    assert run_recipe(checked, lambda event: None, run) == {}
    assert files.cat_file("/bucket/run/training/actor/latest") == b"step-00000002"
    assert files.exists("/bucket/run/report.html")
    assert options.out == here


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty folder: in this process, and in moto's S3 on this machine."""
    if request.param == "memory":
        yield "memory://bucket"
        return
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    server.stop()


@pytest.mark.slow
def test_model_rows_and_run_in_a_store_and_a_resume_on_another_machine(
    bucket: str, machine: Machine, model: Path, tmp_path: Path
) -> None:
    place = Store.of(bucket)
    assert place is not None
    rows = "".join(json.dumps({"text": letters}) + "\n" for letters in ("abcd", "bcde", "cdef", "defg", "efgh"))
    place.files.pipe_file(f"{place.path}/rows.jsonl", rows.encode())
    for file in model.iterdir():
        place.files.put_file(str(file), f"{place.path}/model/{file.name}")

    def run(out: str, steps: int) -> None:
        given = {"model": f"{bucket}/model", "dataset": f"{bucket}/*.jsonl", "out": out, "steps": steps}
        given |= {"batch-size": 2, "save-every": 1, "device": "cpu", "learning-rate": 0.01}
        result = CliRunner().invoke(app, ["sft", *(f"--{name}={value}" for name, value in given.items())])
        assert result.exit_code == 0, result.output

    run(str(tmp_path / "whole"), 4)
    machine("here")
    run(f"{bucket}/run", 2)
    there = machine("there", f"{bucket}/run")
    run(f"{bucket}/run", 4)

    def losses(folder: Path) -> list[float]:
        return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    assert losses(there) == losses(tmp_path / "whole")
    last = machine("last", f"{bucket}/run")
    store(last).pull()
    assert (last / "actor/model.safetensors").read_bytes() == (tmp_path / "whole/actor/model.safetensors").read_bytes()
    assert (last / "report.html").is_file()
    assert os.listdir(last / "training" / "actor")
    out = tmp_path / "out"
    for program, arguments in ((app, ["report", f"{bucket}/run"]), (app, ["export", f"{bucket}/run", str(out)]),
                               (ckpt_app, ["verify", f"{bucket}/run/actor", str(out)])):  # fmt: skip
        result = CliRunner().invoke(program, arguments)
        assert result.exit_code == 0, result.output
    assert b"<title>" in place.files.cat_file(f"{place.path}/run/report.html")


def test_errors_about_the_folder_of_a_run_name_its_url(machine: Machine) -> None:
    here = machine("here")
    save(here, 3)
    options = SftOptions.model_validate({"model": Path("m"), "dataset": Path("d"), "out": Path(URL), "steps": 2})
    assert how_to_go_on(options).endswith(f"the newest training checkpoint in {URL}")
    fix = f"into {URL}/training/*/latest, and remove {here}, its copy on this machine"
    with pytest.raises(
        ValueError, match=re.escape(f"steps=2, but {URL} has gone on to step 3; ") + ".*" + re.escape(fix)
    ):
        check_folder(options)
    for name, value in (("command", "dpo"), ("seed", 1)):
        (here / "options.json").write_text(
            json.dumps({"model": "m", "dataset": "d", "command": "sft", "steps": 4, name: value})
        )
        with pytest.raises(ValueError, match=f"^{URL} holds a run "):
            check_folder(options)
    (here / "options.json").unlink()
    with pytest.raises(ValueError, match=f"^{URL} holds other files, .*no options.json of an earlier run"):
        check_folder(options)


def test_several_machines_need_a_folder_that_they_share(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("here")
    monkeypatch.setattr(Machines, "here", lambda: Machines(count=2))
    options = SftOptions.model_validate({"model": Path("m"), "dataset": Path("d"), "out": Path(URL)})
    with pytest.raises(ValueError, match=r"torchrun has started 2 commands, .*; give a folder that all machines share"):
        check_folder(options)
