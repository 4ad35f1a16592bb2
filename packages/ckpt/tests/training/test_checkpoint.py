from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted import counted
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt import Place, layout_for, load_hf, load_training, restore_rng, save_training
from ckpt.files.atomic import FolderWriter
from ckpt.files.locks import Lock
from ckpt.training.rng import capture_rng, state_of_rank, streams_to_json
from ckpt.training.runs import latest_step, saved_steps, steps_of_latest

Checkpoints = Callable[..., Path]


def optimizer_state(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"step": torch.tensor(7.0), "exp_avg": 2 * tensor, "exp_avg_sq": (3 * tensor).double()}
        for name, tensor in tensors.items()
    }


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], tensor) and actual[name].dtype == tensor.dtype for name, tensor in expected.items()
    )


def save_on(group: Any, source: str, root: str, target: Any, place: list[dict[str, Any]]) -> int:
    layout, at = layout_for(source, target), Place(**place[group.rank()])
    tensors = load_hf(source, layout, at)
    torch.manual_seed(100 + group.rank())
    with counted("pwritev") as written:
        save_training(
            root,
            11,
            tensors,
            layout,
            at,
            optimizer=optimizer_state(tensors),
            extra={"scheduler": {"last_epoch": 11}, "data": [1, 2.5, None]},
            group=group,
        )
    return sum(written)


def load_on(group: Any, source: str, root: str, target: Any, place: list[dict[str, Any]]) -> dict[str, Any]:
    layout, at = layout_for(source, target), Place(**place[0 if group is None else group.rank()])
    state = load_training(root, layout, at, group=group)
    expected = load_hf(source, layout, at)
    moments = optimizer_state(expected)
    restore_rng(state.rng)
    return {
        "weights": same(state.tensors, expected),
        "optimizer": state.optimizer.keys() == moments.keys()
        and all(same(state.optimizer[name], slots) for name, slots in moments.items()),
        "step": state.step,
        "extra": state.extra,
        "drawn": float(torch.rand(())),
    }


GRIDS: dict[str, list[dict[str, Any]]] = {
    "tp2": [{"tp": (r, 2)} for r in range(2)],
    "tp2 dp2": [{"tp": (r % 2, 2)} for r in range(4)],
    "pp2 tp2": [{"tp": (r % 2, 2), "pp": (r // 2, 2)} for r in range(4)],
    "ep4": [{"ep": (r, 4)} for r in range(4)],
}


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("llama-tied", ("pp2 tp2", "megatron"), ("tp2", "parallel")),
        ("llama-bias", ("tp2 dp2", "parallel"), ("pp2 tp2", "megatron")),
        ("deepseek", ("ep4", "parallel"), ("tp2", "megatron")),
    ],
)
def test_a_run_saved_on_one_grid_resumes_on_another(
    name: str,
    first: tuple[str, str],
    second: tuple[str, str],
    checkpoint: Checkpoints,
    tmp_path: Path,
    ranks: Any,
) -> None:
    source = checkpoint(name)
    places = GRIDS[first[0]]
    written = ranks.run(save_on, str(source), str(tmp_path), first[1], places, world=len(places))
    state = load_training(tmp_path, layout_for(source))
    stored = [*state.tensors.values(), *(t for slots in state.optimizer.values() for t in slots.values())]
    # Replicas are written once (each canonical tensor has its own step count of 4 bytes).
    assert sum(written) == pytest.approx(sum(t.numel() * t.element_size() for t in stored), rel=0.05)
    places = GRIDS[second[0]]
    results = ranks.run(load_on, str(source), str(tmp_path), second[1], places, world=len(places))
    for rank, result in enumerate(results):
        assert result["weights"]
        assert result["optimizer"]
        assert result["step"] == 11
        assert result["extra"] == {"scheduler": {"last_epoch": 11}, "data": [1, 2.5, None]}
        torch.manual_seed(100 + rank)
        assert result["drawn"] == float(torch.rand(()))


def sharded(tensors: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """Return what FSDP2 makes of a place's tensors: rows of each on every rank, none on some."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def save_sharded(group: Any, source: str, root: str) -> int:
    layout = layout_for(source)
    tensors = sharded(load_hf(source, layout), group)
    moments = optimizer_state(tensors)
    for slots in moments.values():
        # An optimizer may hold its moments as DTensors, or as the local parts alone.
        slots["exp_avg"] = slots["exp_avg"].to_local()
    with counted("pwritev") as written:
        save_training(root, 3, tensors, layout, optimizer=moments, group=group)
    return sum(written)


def load_sharded(group: Any, source: str, root: str) -> bool:
    layout = layout_for(source)
    expected = sharded(load_hf(source, layout), group)
    into = {name: tensor * 0 for name, tensor in expected.items()}
    state = load_training(root, layout, into=into, group=group)
    moments = optimizer_state(expected)
    return all(
        torch.equal(into[name].to_local(), tensor.to_local())
        and torch.equal(state.optimizer[name]["exp_avg"], moments[name]["exp_avg"].to_local())
        and torch.equal(state.optimizer[name]["exp_avg_sq"], moments[name]["exp_avg_sq"].to_local())
        for name, tensor in expected.items()
    )


def test_dtensors_are_saved_and_loaded_by_their_parts(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    # 3 ranks do not divide the rows of anything, and a vector of 1 leaves two of them without.
    source = str(checkpoint("qwen3-moe"))
    written = ranks.run(save_sharded, source, str(tmp_path), world=3)
    assert max(written) < 0.5 * sum(written)
    assert all(ranks.run(load_sharded, source, str(tmp_path), world=2))
    assert load_on(None, source, str(tmp_path), "parallel", [{"tp": (0, 1)}])["weights"]


def save_async(group: Any, source: str, root: str) -> None:
    layout, at = layout_for(source), Place(tp=(group.rank() % 2, 2))
    background = dist.new_group(backend="gloo")
    tensors = load_hf(source, layout, at)
    pending = save_training(root, 3, tensors, layout, at, group=background, asynchronous=True)
    # Training goes on, on another group, and changes the weights: the save keeps what it has copied.
    for tensor in tensors.values():
        tensor.add_(1)
    for _ in range(20):
        dist.all_reduce(torch.ones(10), group=group)
    pending.wait(timeout=30)
    assert pending.done
    dist.destroy_process_group(background)


def test_an_asynchronous_save_keeps_the_state_it_was_given(checkpoint: Checkpoints, tmp_path: Path, ranks: Any) -> None:
    source = checkpoint("llama")
    ranks.run(save_async, str(source), str(tmp_path), world=4, timeout=60)
    layout = layout_for(source)
    assert same(load_training(tmp_path, layout).tensors, load_hf(source, layout))


def test_the_stall_of_an_asynchronous_save_is_the_copy_alone(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk that stands still the call returns all the same; the save ends when the disk moves again."""
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    extra = {"losses": [1.0]}
    disk = threading.Event()
    fsync = os.fsync

    def stuck(fd: int) -> None:
        assert disk.wait(60)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", stuck)
    pending = save_training(tmp_path, 3, tensors, layout, extra=extra, asynchronous=True)
    try:
        # Training goes on and changes everything that it has handed over.
        for tensor in tensors.values():
            tensor.add_(1)
        extra["losses"].append(2.0)
        assert not pending.done
        with pytest.raises(TimeoutError, match=r"still running after 0\.1 s"):
            pending.wait(timeout=0.1)
        assert latest_step(tmp_path) is None
    finally:
        disk.set()
    pending.wait(timeout=60)
    state = load_training(tmp_path, layout)
    assert same(state.tensors, load_hf(source, layout))
    assert state.extra == {"losses": [1.0]}


def test_what_goes_wrong_in_the_background_is_raised_by_the_wait(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_for(checkpoint("llama"))
    tensors = load_hf(checkpoint("llama"), layout)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    pending = save_training(tmp_path, 3, tensors, layout, asynchronous=True)
    with pytest.raises(OSError, match="No space left"):
        pending.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_in_the_background_without_a_wait_is_warned_of(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_for(checkpoint("llama"))
    tensors = load_hf(checkpoint("llama"), layout)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_and_forget() -> None:
        pending = save_training(tmp_path, 3, tensors, layout, asynchronous=True)
        while not pending.done:
            time.sleep(0.01)
        del pending
        gc.collect()

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.warns(RuntimeWarning, match="the save of step 3 in the background has failed, .*No space left"):
        save_and_forget()


def save_odd(group: Any, source: str, root: str, odd: str) -> str:
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    extra = {"x": {1, 2}} if odd == "extra" and group.rank() == 1 else {}
    step = -1 if odd == "step" and group.rank() == 1 else 1
    if odd == "memory" and group.rank() == 1:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].as_subclass(Unreadable)
    try:
        save_training(root, step, tensors, layout, extra=extra, group=group)
    except (ValueError, RuntimeError, KeyError) as error:
        return str(error)
    return "saved"


class Unreadable(torch.Tensor):
    """A tensor that fails in a way that nobody foresaw."""

    def detach(self) -> Tensor:
        raise KeyError("lost")


@pytest.mark.parametrize(
    ("odd", "message"), [("extra", "extra must be made of JSON values"), ("step", "step=-1"), ("memory", "lost")]
)
def test_one_ranks_mistake_of_any_kind_is_an_error_on_all(
    odd: str, message: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = str(checkpoint("llama"))
    seen = ranks.run(save_odd, source, str(tmp_path), odd, world=2, timeout=60)
    assert all(message in text for text in seen), seen
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(checkpoint: Checkpoints, tmp_path: Path) -> tuple[Path, Path]:
    source = checkpoint("llama")
    layout = layout_for(source)
    save_training(tmp_path, 1, load_hf(source, layout), layout)
    return tmp_path, source


def test_old_checkpoints_are_pruned_and_latest_points_to_the_newest(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    for step in (2, 3, 4):
        save_training(root, step, {name: tensor + step for name, tensor in tensors.items()}, layout, keep=2)
    assert saved_steps(root) == [3, 4]
    assert latest_step(root) == 4
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    older = load_training(root, layout, step=3)
    assert torch.equal(older.tensors["model.norm.weight"], tensors["model.norm.weight"] + 3)
    with pytest.raises(ValueError, match=r"no checkpoint of step 1; it has \[3, 4\]"):
        load_training(root, layout, step=1)
    with pytest.raises(ValueError, match="keep=0"):
        save_training(root, 5, tensors, layout, keep=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_that_are_not_finite_are_not_saved(asynchronous: bool, saved: tuple[Path, Path]) -> None:
    """With `keep`, such checkpoints would soon take the place of every good one."""
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    moments = {name: {"exp_avg": torch.full_like(tensor, torch.inf)} for name, tensor in tensors.items()}
    save_training(root, 2, tensors, layout, optimizer=moments)  # the weights alone are looked at
    tensors["model.norm.weight"][3] = -torch.inf
    tensors["model.layers.1.mlp.gate_up_proj.weight"][80, 3] = torch.nan  # a part of up_proj
    message = r"^model.layers.1.mlp.up_proj.weight, model.norm.weight hold NaN or infinite values, so nothing is saved"
    with pytest.raises(ValueError, match=message):
        save_training(root, 3, tensors, layout, keep=1, asynchronous=asynchronous).wait()
    assert (saved_steps(root), latest_step(root)) == ([1, 2], 2)


def test_a_run_that_went_back_keeps_and_resumes_its_own_checkpoints(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    for step in (10, 20, 30):
        save_training(root, step, tensors, layout, keep=3)
    load_training(root, layout, step=10)
    (root / "step-00000020" / "notes.txt").write_text("mine")
    with pytest.warns(RuntimeWarning, match=r"step-00000020 held \['notes.txt'\], which the checkpoint"):
        save_training(root, 13, tensors, layout, keep=2)
    assert saved_steps(root) == [10, 13]
    assert load_training(root, layout).step == 13
    assert [file.read_text() for file in root.glob("step-00000020.kept-*/*")] == ["mine"]
    # Checkpoints of a run that was left stay as long as there is room for them.
    save_training(root, 5, tensors, layout, keep=2)
    assert saved_steps(root) == [5, 13]
    assert (latest_step(root), steps_of_latest(root)) == (5, [5])


@pytest.mark.parametrize("call", [0, 1])
def test_a_kill_around_the_pointer_leaves_the_checkpoint_it_named(
    call: int, saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a checkpoint's appearance and the pointer's, and between the pointer's and the end of the pruning."""
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    newer = {name: tensor + 1 for name, tensor in tensors.items()}

    unlink = os.unlink

    def killed(path: Any, *_: Any, **__: Any) -> None:
        if Path(path).suffix != ".lock":
            raise KeyboardInterrupt
        unlink(path)

    with monkeypatch.context() as patch:
        # A removal takes a file after another, so the kill falls before all of them here.
        patch.setattr(*((os, "replace") if call == 0 else (os, "unlink")), killed)
        with pytest.raises(KeyboardInterrupt):
            save_training(root, 2, newer, layout, keep=1)
    assert latest_step(root) == call + 1
    assert same(load_training(root, layout).tensors, newer if call else tensors)
    assert saved_steps(root) == ([2] if call else [1, 2])
    save_training(root, 3, tensors, layout, keep=1)
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step-00000003"]


def test_what_a_killed_save_of_another_step_left_is_removed(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    (root / ".step-00000007.saving-1-abc").mkdir()
    living = FolderWriter(root / "step-00000008")
    save_training(root, 2, load_hf(source, layout), layout)
    hidden = sorted(entry.name for entry in root.iterdir() if entry.name.startswith("."))
    assert hidden == [".step-00000008.lock", living.path.name]
    living.discard()


def test_a_folder_of_a_run_is_saved_to_by_one_process_at_a_time(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    before = sorted(root.rglob("*"))
    with (
        Lock(root / "latest", f"saves a training checkpoint to {root}"),
        pytest.raises(
            ValueError, match=rf"process \d+ of .* saves a training checkpoint to {root}; wait until it ends"
        ),
    ):
        save_training(root, 2, tensors, layout)
    assert sorted(root.rglob("*")) == before
    save_training(root, 2, tensors, layout)


def test_the_same_step_can_be_saved_again(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    tensors = {name: tensor + 1 for name, tensor in load_hf(source, layout).items()}
    save_training(root, 1, tensors, layout)
    assert same(load_training(root, layout).tensors, tensors)


def test_weights_are_loaded_into_existing_parameters(saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout, place = layout_for(source), Place(tp=(1, 2))
    expected = load_hf(source, layout, place)
    into = {name: torch.nn.Parameter(torch.full_like(tensor, 9.0)) for name, tensor in expected.items()}
    load_training(root, layout, place, into=into)
    assert all(torch.equal(into[name], tensor) for name, tensor in expected.items())
    with pytest.raises(ValueError, match=r"into\['model.norm.weight'\] is missing"):
        load_training(root, layout, place, into={name: t for name, t in into.items() if name != "model.norm.weight"})


def test_random_states_are_restored(saved: tuple[Path, Path]) -> None:
    root, source = saved
    torch.manual_seed(5)
    random.seed(5)
    layout = layout_for(source)
    save_training(root, 2, load_hf(source, layout), layout)
    drawn = (torch.rand(3).tolist(), random.random())
    restore_rng(load_training(root, layout).rng)
    assert (torch.rand(3).tolist(), random.random()) == drawn


def test_more_ranks_than_were_saved_get_random_states_of_their_own(
    checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = str(checkpoint("llama"))
    ranks.run(save_on, source, str(tmp_path), "parallel", GRIDS["tp2"], world=2)
    first, again = (ranks.run(load_on, source, str(tmp_path), "parallel", GRIDS["pp2 tp2"], world=4) for _ in range(2))
    drawn = [result["drawn"] for result in first]
    for seed, number in zip((100, 101), drawn, strict=False):
        torch.manual_seed(seed)
        assert number == float(torch.rand(()))
    assert len(set(drawn)) == 4
    assert drawn == [result["drawn"] for result in again]
    assert all(result["weights"] and result["optimizer"] for result in first)


def captured(seed: int, shared: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(shared)
    streams = {"own": torch.get_rng_state(), "shared": torch.Generator().manual_seed(shared).get_state()}
    cuda = seed.to_bytes(8, "little").hex() + "10" + "00" * 7
    return {**capture_rng(), "cuda": cuda, "streams": streams_to_json(streams)}


def test_derived_states_differ_by_rank_and_what_all_ranks_shared_stays_shared() -> None:
    # Ranks 0 and 1 are replicas, which draw alike; so are 3 and 4, the ranks of the next round.
    saved = [captured(seed, 7) for seed in (1, 1, 2)]
    states = [state_of_rank(saved, rank) for rank in range(9)]
    assert states[:3] == saved
    for name in ("torch", "cuda"):
        assert len({state[name] for state in states}) == 6
        assert states[3][name] == states[4][name] != states[5][name]
    assert len({state["streams"]["own"] for state in states}) == 6
    assert all(state["streams"]["shared"] == saved[0]["streams"]["shared"] for state in states)
    assert all(state["python"] == saved[0]["python"] for state in states)
    assert state_of_rank(saved[:1], 5) == saved[0]
    for state in states:
        restore_rng({name: value for name, value in state.items() if name != "cuda"})
    pythons = [{"python": capture_rng()["python"]} for seed in (1, 2) if random.seed(seed) is None]
    assert state_of_rank(pythons, 2) not in pythons
    with pytest.raises(ValueError, match=r"the state 'a' of 3 bytes is of no generator .* at most 2 ranks"):
        state_of_rank([{"streams": {"a": "010203"}}, {"streams": {"a": "010204"}}], 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "1"}, "step must be a number"),
        ({"extra": []}, "extra an object"),
        ({"rng": []}, "a list of one object for each rank"),
        ({"rng": [{"torch": "0g", "python": []}]}, r"rng\[0\] holds no states of generators: .*hexadecimal"),
        ({"rng": [{"torch": "00", "python": [3, "x", None]}]}, r"rng\[0\] holds no states of generators"),
        ({"rng": [{"torch": "00", "streams": {"a": 1}}]}, r"rng\[0\] holds no states of generators"),
    ],
)
def test_a_state_of_odd_types_is_refused_by_the_files_name(
    change: dict[str, Any], message: str, saved: tuple[Path, Path]
) -> None:
    root, source = saved
    file = root / "step-00000001" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"step-00000001/state.json is malformed: .*{message}"):
        load_training(root, layout_for(source))


def test_broken_training_checkpoints_are_refused_by_name(saved: tuple[Path, Path], checkpoint: Checkpoints) -> None:
    root, source = saved
    layout = layout_for(source)
    with pytest.raises(ValueError, match=r"another model: it lacks \['model.layers.0.self_attn.q_proj.bias'"):
        load_training(root, layout_for(checkpoint("llama-bias")))
    with pytest.raises(
        ValueError,
        match=r"step-\d+ is damaged or of another model: it does .* of model/model.embed_tokens.weight \(51, 32\)",
    ):
        load_training(root, layout_for(checkpoint("llama", vocab_size=51)))
    with pytest.raises(ValueError, match="has no training checkpoint; give the folder"):
        load_training(root / "none", layout)
    folder = root / "step-00000001"
    shutil.copytree(folder, root / "step-00000002")
    os.truncate(root / "step-00000002" / "rank-00000.safetensors", 5000)
    with pytest.raises(ValueError, match=r"rank-00000.safetensors is damaged or truncated"):
        load_training(root, layout, step=2)
    (folder / "state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"state.json is malformed"):
        load_training(root, layout)
    (root / "latest").write_text("../../etc")
    with pytest.raises(ValueError, match=r"latest names '\.\./\.\./etc', which is no checkpoint"):
        load_training(root, layout)
    for odd, shown in ((b"step-0000000\xff", r"step-0000000\\\\xff"), (b"step-" + b"9" * 5000, "step-999")):
        (root / "latest").write_bytes(odd)
        with pytest.raises(ValueError, match=f"latest names '{shown}.*, which is no checkpoint"):
            load_training(root, layout)


def edit_file(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file, and record no checksums."""
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


MOMENT = "optimizer/exp_avg/model.norm.weight@0"
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (lambda file: file.unlink(), "are missing or unexpected"),
    "further file": (lambda file: shutil.copy(file, file.with_name("rank-00007.safetensors")), "rank-00007"),
    "missing tensor": (
        lambda file: edit_file(file, lambda tensors: tensors.pop("model/lm_head.weight@0,0")),
        r"it lacks \['lm_head.weight'\]",
    ),
    "no box": (
        lambda file: edit_file(file, lambda tensors: tensors.update({f"{MOMENT},x": tensors.pop(MOMENT)})),
        f"the key '{MOMENT},x' of a tensor of shape .* names no box",
    ),
    "beyond": (
        lambda file: edit_file(file, lambda tensors: tensors.update({f"{MOMENT[:-1]}9": tensors.pop(MOMENT)})),
        "does not hold each element of optimizer/exp_avg/model.norm.weight .* reaches outside",
    ),
    "shorter": (
        lambda file: edit_file(file, lambda tensors: tensors.update({MOMENT: tensors[MOMENT][:-1].clone()})),
        "does not hold each element of optimizer/exp_avg/model.norm.weight .* is covered 0 times",
    ),
}


@pytest.mark.parametrize("change", FILES)
def test_files_that_are_not_those_of_the_save_are_refused(change: str, saved: tuple[Path, Path]) -> None:
    root, source = saved
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    save_training(root, 2, tensors, layout, optimizer=optimizer_state(tensors))
    edit, message = FILES[change]
    edit(root / "step-00000002" / "rank-00000.safetensors")
    with pytest.raises(ValueError, match=message):
        load_training(root, layout)


def test_every_rank_hears_of_a_file_that_the_save_did_not_write(
    checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source = str(checkpoint("llama"))
    ranks.run(save_on, source, str(tmp_path), "parallel", GRIDS["tp2"], world=2)
    folder = tmp_path / "step-00000011"
    shutil.copy(folder / "rank-00001.safetensors", folder / "rank-00002.safetensors")
    seen = ranks.run(load_refused, source, str(tmp_path), world=2, timeout=20)
    assert all("rank-00002.safetensors'] (1) are missing or unexpected" in text for text in seen), seen


def load_refused(group: Any, source: str, root: str) -> str:
    try:
        load_training(root, layout_for(source), Place(tp=(group.rank(), 2)), group=group)
    except ValueError as error:
        return str(error)
    return "loaded"


def save_incomplete(group: Any, source: str, root: str) -> str:
    layout, at = layout_for(source), Place(tp=(0, 2))
    try:
        save_training(root, 2, load_hf(source, layout, at), layout, at, group=group)
    except ValueError as error:
        return str(error)
    return "saved"


def test_a_grid_with_an_absent_place_is_not_saved(saved: tuple[Path, Path], ranks: Any) -> None:
    root, source = saved
    seen = ranks.run(save_incomplete, str(source), str(root), world=2, timeout=20)
    assert "saved" not in seen
    assert latest_step(root) == 1
    assert saved_steps(root) == [1]
