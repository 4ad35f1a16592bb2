"""The Parquet files of `--save-rollouts`, and learning from them."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_models import Actor
from rl_models.api import WholeBatches
from rl_train.data.codec import TextCodec
from rl_train.data.examples import NONE, ExampleReader, whole
from rl_train.data.mixture import read_sources
from rl_train.data.prompts import read_prompts
from rl_train.engines import NativeEngine
from rl_train.loop.checked_run import CheckedRun, check_run
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.objective import advantages
from rl_train.loop.reinforcement import Reinforcement
from rl_train.options.options import TrainOptions
from rl_train.trajectories.saved_rollouts import SavedRollouts

SAMPLES, PROMPTS = 3, 2


@pytest.fixture
def loop(model: Path, prompts: Path, tmp_path: Path, in_process: Any) -> Callable[..., Loop]:
    """Makes a run of one step, in which the responses to the prompt "a" alone have different rewards."""
    actor = WholeBatches(Actor.from_pretrained(model, device="cpu"))

    def make(first: int = 1, **options: Any) -> Loop:
        numbers = iter(range(1000))
        small: dict[str, Any] = {"prompts_per_step": PROMPTS, "samples": SAMPLES, "max_new_tokens": 4, "steps": 1}
        small |= {"out": tmp_path / "run", "save_every": 0, "save_rollouts": True, "prompts": prompts}
        resolved = TrainOptions(model=model, reward="r:f", **small | options)
        resolved.out.mkdir(exist_ok=True)
        rows = read_prompts(resolved.prompts, model, 99)[:PROMPTS]
        checked_run = CheckedRun(resolved, rows, [], (), None)
        rewards = in_process(lambda prompt, response, row: float(prompt == "a") * next(numbers))
        recipe = Reinforcement(
            lambda make: make(), lambda event: None, True, checked_run, Models(actor), NativeEngine(actor), rewards
        )
        return Loop(resolved, resolved, recipe)

    return make


def rows_of(out: Path, step: int = 1) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(out / "rollouts" / f"step-{step:08d}.parquet").to_pylist()
    return rows


@pytest.mark.parametrize("equal_groups", ["keep", "drop"])
def test_all_responses_of_a_step_are_read_back(
    loop: Callable[..., Loop], equal_groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    run, learned = loop(equal_groups=equal_groups), []

    def spied(options: Any, batch: Any, *scores: Any) -> Any:
        estimates = advantages(options, batch, *scores)
        learned.append(batch.with_fields(**estimates))
        return estimates

    monkeypatch.setattr("rl_train.loop.reinforcement.advantages", spied)
    metrics = run.run()
    rows, codec = rows_of(run.options.out), TextCodec(run.options.model)
    assert [(row["response"], row["sample"]) for row in rows] == [(number, 0) for number in range(SAMPLES)] * PROMPTS
    assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(metrics["reward"])
    (batch,) = learned
    fields = {name: batch.split(name) for name in ("log_probs", "old_log_probs", "advantages", "mask")}
    number = 0
    for row in rows:
        begin = row["mask"].index(True)
        letter = "abcdefghijkl"[row["line"] - 1]
        assert (row["prompt_text"], row["step"]) == (codec.decode(row["tokens"][:begin], special=True), 1)
        assert row["prompt_text"].endswith(letter)
        assert row["source"] == str(run.options.prompts)
        assert row["response_text"] == codec.decode(row["tokens"][begin:], special=True)
        assert row["versions"] == [-1] * begin + [0] * (len(row["tokens"]) - begin)
        assert row["truncated"] == (sum(row["mask"]) == 4)
        if equal_groups == "drop" and letter != "a":
            assert row["old_log_probs"] is row["advantages"] is None
            assert row["reward"] == 0, "what the step discards is kept"
            continue
        assert row["tokens"] == batch.split()[number].tolist()
        for name, values in fields.items():
            assert row[name] == values[number].tolist()
        number += 1
    assert number == len(batch)


def test_a_run_that_goes_on_removes_the_files_of_later_steps(loop: Callable[..., Loop]) -> None:
    pytest.importorskip("pyarrow")
    folder = (run := loop()).options.out / "rollouts"
    folder.mkdir()
    for step in (1, 2, 11):
        (folder / f"step-{step:08d}.parquet").write_text("of an earlier run")
    (folder / "notes.parquet").write_text("of the user")
    run.run()
    assert sorted(file.name for file in folder.iterdir()) == ["notes.parquet", "step-00000001.parquet"]
    assert rows_of(run.options.out)


@pytest.mark.parametrize("url", [None, "memory://bucket/run[1]"])
@pytest.mark.parametrize("tokenizer", [True, False])
def test_the_page_shows_what_is_saved_as_the_samples_of_the_run(
    loop: Callable[..., Loop], upload: Callable[[Path, str], None], url: str | None, *, tokenizer: bool
) -> None:
    pytest.importorskip("pyarrow")
    run = loop(equal_groups="drop", show_every=1)
    run.run()
    out, rows = run.options.out, rows_of(run.options.out)
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    (out / "rollouts" / "notes.parquet").write_text("of the user")
    if url is not None:
        upload(out, url)
    saved = SavedRollouts(Path(url or out), str(run.options.model) if tokenizer else "organisation/none")
    assert saved.rewards == [(1, row["reward"]) for row in rows]
    prompts = [[(number, read()) for number, read in responses] for responses in saved.prompts_of(1)]
    assert [[number for number, _ in responses] for responses in prompts] == [[0, 1, 2], [3, 4, 5]]
    samples = [sample for responses in prompts for _, sample in responses]
    if not tokenizer:
        expected = [[{"role": "policy", "text": row["response_text"]}] for row in rows]
        assert [sample["turns"] for sample in samples] == expected
        return
    for line in lines:
        same = [sample for sample in samples if sample["turns"] == line["turns"]]
        assert same, "a sample of the run is one of the responses, with the same values of tokens"
        assert {name: same[0][name] for name in same[0] if name != "prompt"}.items() <= line.items()


def test_rollouts_that_are_damaged_anywhere_and_sources_without_utf8(
    loop: Callable[..., Loop], prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    source = Path(shutil.copy(prompts, tmp_path / "\udcff.jsonl"))
    run = loop(prompts=source)
    run.run()
    out = run.options.out
    assert {row["source"] for row in rows_of(out)} == {f"{tmp_path}/\\udcff.jsonl"}
    content = (file := out / "rollouts" / "step-00000001.parquet").read_bytes()
    for damaged in (b"", content[:-1], content[:4] + bytes(400) + content[404:]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="rollouts cannot be read as Parquet"):
            list(SavedRollouts(out, "organisation/none").prompts_of(1))


def test_the_best_responses_are_rows_to_learn_from(loop: Callable[..., Loop], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = loop()
    run.run()
    best = parquet.read_table(run.options.out / "rollouts", filters=[("reward", ">", 1)])
    parquet.write_table(best, tmp_path / "best.parquet")
    examples, _ = read_sources(ExampleReader(run.options.model, reader=whole), [tmp_path / "best.parquet"])
    kept = [row for row in rows_of(run.options.out) if row["reward"] > 1]
    assert 0 < len(kept) == len(examples) < SAMPLES * PROMPTS
    for row, example in zip(kept, examples, strict=True):
        ((tokens, labels),) = example.sequences
        assert tokens == row["tokens"]
        assert labels == [1 if drawn else NONE for drawn in row["mask"]]


@pytest.mark.parametrize("mask", [[1, 0], "110", [0, 1, 2]])
def test_a_mask_that_does_not_fit_is_refused(model: Path, tmp_path: Path, mask: Any) -> None:
    reader = ExampleReader(model, reader=whole)
    with pytest.raises(ValueError, match=r'line 1: "mask" must be a list of true and false for each of the 3 tokens'):
        read_sources(reader, [tmp_path / "rows.jsonl"], [{"tokens": [5, 6, 7], "mask": mask}])


def test_without_pyarrow_the_run_is_refused_before_it_starts(
    model: Path, prompts: Path, folder_of_rewards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    options = TrainOptions(model=model, prompts=prompts, reward="exact-match", out=tmp_path / "run", save_rollouts=True)
    rows = [{"text": "a", "answer": "b"}]
    with pytest.raises(ValueError, match="save_rollouts writes Parquet with pyarrow, which is not installed: pip"):
        check_run(options, rows)
