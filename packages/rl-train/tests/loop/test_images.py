"""A run on a model that sees: it learns which colour an image has, and images stay with their prompt on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import COLOURS, question, save_model, save_pictures

from parallel_models import SamplingOptions
from rl_models import Actor, ActorCritic, OptimizerOptions
from rl_models.api import WholeBatches
from rl_train.data.images import ImageChat
from rl_train.engines import NativeEngine
from rl_train.loop.batches import read_batches, write_batches
from rl_train.loop.checked_run import check_run
from rl_train.loop.folder import check_folder
from rl_train.loop.loop import Loop
from rl_train.loop.models import Models
from rl_train.loop.reinforcement import Reinforcement
from rl_train.options.groups import RolloutOptions
from rl_train.options.options import TrainOptions

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def run(model: Path, tmp_path: Path, in_process: Any) -> Run:
    """A run on pictures of two sizes and on a question without one."""

    def make(kind: type[Actor] = Actor, backend: str = "transformers", **options: Any) -> Any:
        rows = []
        for size in ((8, 8), (16, 8)):
            folder = tmp_path / f"{size[0]}"
            folder.mkdir()
            files = save_pictures(folder, size)
            rows += [{"messages": question(path=str(file)), "answer": colour} for colour, file in files.items()]
        rows.append({"messages": "which colour", "answer": "red"})
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        small: dict[str, Any] = {"prompts_per_step": 7, "max_new_tokens": 1, "save_every": 0, "device": "cpu"}
        resolved = TrainOptions(
            model=model,
            prompts=prompts,
            reward="exact-match",
            out=tmp_path / "run",
            backend=backend,
            **small | options,
        )
        check_folder(resolved)
        (tmp_path / "run").mkdir(exist_ok=True)
        optimizer = OptimizerOptions(learning_rate=resolved.optimizer.learning_rate)
        actor = kind.from_pretrained(model, backend=backend, device="cpu", optimizer=optimizer)
        models = Models(WholeBatches(actor))

        def reward(prompt: str, response: str, row: Any) -> float:
            return float(response == row["answer"])

        engine, judge = NativeEngine(models.actor), in_process(reward)
        checked_run = check_run(resolved)
        recipe = Reinforcement(lambda make: make(), lambda event: None, True, checked_run, models, engine, judge)
        return Loop(resolved, resolved, recipe)

    return make


def rewards(loop: Any) -> list[float]:
    lines = (loop.options.out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward"] for line in lines]


def test_a_step_with_images_keeps_them_through_scores_updates_and_files(run: Run, tmp_path: Path) -> None:
    loop = run(steps=1, algorithm="grpo", samples=3, mini_batch=8)
    loop.run()
    prompts = loop.recipe.checked_run.prompts
    asked = loop.recipe._ask(prompts, SamplingOptions(2, n=2))
    batch = asked.result()
    assert [one is not None for one in batch.visual] == [True] * 12 + [False] * 2
    assert batch.visual[0] is batch.visual[1]
    write_batches(tmp_path / "ahead.safetensors", {"7": batch, "text": batch.select([12, 13])})
    read = read_batches(tmp_path / "ahead.safetensors")
    assert read["text"].visual == ()
    assert [one and one.digest for one in read["7"].visual] == [one and one.digest for one in batch.visual]
    assert read["7"].visual[0] is read["7"].visual[1]
    actor = loop.recipe.models.actor
    assert torch.equal(actor.log_probs(read["7"]).log_probs, actor.log_probs(batch).log_probs)


def test_what_engines_cannot_see_is_refused_before_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageChat, "process", lambda self: ([5, 6], None))  # the processor of videos needs torchvision
    prompts = tmp_path / "prompts.jsonl"
    film = [{"role": "user", "content": [{"type": "video", "path": "film.mp4"}, {"type": "text", "text": "what"}]}]
    prompts.write_text(
        "".join(json.dumps({"messages": messages, "answer": "red"}) + "\n" for messages in ("which colour", film))
    )
    small: dict[str, Any] = {"prompts_per_step": 2, "max_new_tokens": 1, "steps": 1, "device": "cpu"}
    options = TrainOptions(
        model=model, prompts=prompts, reward="exact-match", out=tmp_path / "run", backend="parallel", **small
    )
    assert len(check_run(options).prompts) == 2
    with pytest.raises(ValueError, match=r"line 2: the messages have a video, .* use --rollouts native"):
        check_run(options.model_copy(update={"rollouts": RolloutOptions(engine="vllm")}))
    with pytest.raises(ValueError, match=r"line 2: the messages have an image, .* compute text alone"):
        check_run(options.model_copy(update={"rollouts": RolloutOptions(devices="cpu")}))
    with pytest.raises(ValueError, match=r"line 2: the messages have an image, .* not go over HTTP"):
        check_run(options.model_copy(update={"rollouts": RolloutOptions(engine="http://host:1")}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Actor, {"algorithm": "grpo", "samples": 16}),
        (Actor, {"algorithm": "grpo", "samples": 16, "backend": "parallel"}),
        (ActorCritic, {"algorithm": "ppo", "samples": 16, "share_backbone": True}),
    ],
)
def test_a_policy_learns_what_the_images_show(run: Run, kind: type[Actor], options: dict[str, Any]) -> None:
    loop = run(kind, steps=120, learning_rate=5e-3, **options)
    loop.run()
    found = rewards(loop)
    assert max(found[:3]) < 0.4
    assert min(found[-3:]) > 0.9, found
    batch = loop.recipe._ask(
        loop.options.prompts, loop.recipe.checked_run.prompts, SamplingOptions(1, temperature=0.0)
    ).result()
    answers = [loop.recipe.checked_run.codec.decode(row.tolist()) for row in batch.responses()]
    assert answers == [*COLOURS, *COLOURS, "red"]
