"""Conversations of several turns: token-exact, the policy's tokens alone in the mask, limits, failures, and a run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import CHATML, save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from parallel_layers.head import SamplingMask
from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.cli.commands import app
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt, read_prompts
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.environment_turns import EnvironmentAnswers, EnvironmentTurns, Episode
from rl_train.loop.scoring import Scorer
from rl_train.options.groups import DataOptions
from rl_train.options.options import TrainOptions
from rl_train.quickstart.task import MODEL, VOCABULARY
from rl_train.rewards.function import Rewards
from rl_train.trajectories.episodes import totals
from rl_train.trajectories.recorder import Call, Recorder
from rl_train.trajectories.samples import Part

pytestmark = pytest.mark.usefixtures("folder_of_rewards")
END, A = VOCABULARY.index("</s>"), VOCABULARY.index("a")
# After a message stands an end, and before it its role is not written.
TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.content }}</s>{% endfor %}"
)


class Scripted:
    """An engine that draws given responses, in the order of the calls; each log-prob tells the place of its token."""

    version = 0

    def __init__(self, responses: Sequence[Sequence[int]]) -> None:
        self.responses, self.calls = iter(responses), list[tuple[list[list[int]], SamplingOptions]]()

    def generate_async(self, prompts: Any, sampling: SamplingOptions) -> Future[Batch]:
        self.calls.append(([list(prompt) for prompt in prompts], sampling))
        pairs = [(list(prompt), list(next(self.responses))) for prompt in prompts for _ in range(sampling.n)]
        rows = [prompt + response for prompt, response in pairs]
        fields: dict[str, Any] = {"log_probs": [[-float(place) for place in range(len(row))] for row in rows]}
        mask = SamplingMask.from_rows([[token, 7] for row in rows for token in row])
        future: Future[Batch] = Future()
        lengths = [len(response) for _, response in pairs]
        future.set_result(Batch.from_sequences(rows, response_lengths=lengths, sampling_mask=mask, **fields))
        return future


Draw = Callable[..., tuple[Batch, Scripted, list[str], Scorer]]


@pytest.fixture
def draw(chat_model: Path, tmp_path: Path) -> Iterator[Draw]:
    """Draw conversations about rows with the engine's responses."""
    opened: list[Rewards] = []

    def make(rows: list[dict[str, Any]], responses: list[list[int]], n: int = 1, **options: Any) -> Any:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"messages": "c"} | row) + "\n" for row in rows))
        given: dict[str, Any] = {"environment": "talks:Talk", "max_new_tokens": 12, "rewards.timeout": 0.3} | options
        resolved = TrainOptions(model=chat_model, prompts=file, **given)
        prompts = read_prompts(file, chat_model, 99)
        rewards = Rewards(resolved)
        opened.append(rewards)
        said: list[str] = []
        checked_run, engine = CheckedRun(resolved, prompts, [], (END,), None), Scripted(responses)
        once = lambda make: pickle.loads(pickle.dumps(make()))  # noqa: E731
        talks = EnvironmentTurns(checked_run, engine, rewards, once, said.append)  # type: ignore[arg-type]
        batch = talks.draw(prompts, SamplingOptions(resolved.sampling.max_new_tokens, n=n)).result()
        return batch, engine, said, Scorer(checked_run, rewards, once, said.append)

    yield make
    for rewards in opened:
        rewards.close()


def test_the_tokens_of_a_model_stay_and_what_the_environment_says_is_outside_the_mask(draw: Draw) -> None:
    # The second response does not end with the end of the template, the third one is "ab" as no tokenizer writes it.
    turns = [[5, 6, END], [A, END], [8, A, A + 1, END]]
    batch, engine, _, scorer = draw([{"turns": 3}], turns, max_new_tokens=20)
    said = [A, A + 1, END]
    prompt = [1, A + 2, END]
    assert batch.tokens.tolist() == [*prompt, *turns[0], *said, *turns[1], *said, *turns[2]]
    own = [False] * 3 + [True] * 3 + [False] * 3 + [True] * 2 + [False] * 3 + [True] * 4
    assert batch.mask.tolist() == own
    # The engine was asked to go on with exactly these tokens, and its numbers are those of the batch.
    for (prompts, _), length in zip(engine.calls, (3, 9, 14), strict=True):
        assert prompts == [batch.tokens[:length].tolist()]
    places = torch.arange(batch.num_tokens)
    assert batch["log_probs"].tolist() == torch.where(batch.mask, -places, 0).tolist()
    assert batch.sampling_mask is not None
    kept = [[token, 7] if drawn else [] for token, drawn in zip(batch.tokens.tolist(), batch.mask, strict=True)]
    assert batch.sampling_mask.tolist() == kept
    assert {name: found.tolist() for name, found in totals(batch).items()} == {
        **{"turns": [3], "environment_reward": [3], "tool_errors": [0], "truncated": [0], "failed": [0]}
    }
    ((asked, response),) = scorer.as_read(scorer.checked_run.prompts, batch)
    assert (asked, response, response.finish_reason) == ("c", "bcaeab", "stop")
    assert response.raw == "bc</s>ab</s>a</s>ab</s>eab</s>"
    assert response.environment_reward == 3
    found = scorer(scorer.checked_run.prompts, batch)
    assert found.scores.tolist() == [3]


def test_samples_go_on_for_themselves_within_their_limits(draw: Draw) -> None:
    rows = [{"turns": 1}, {"turns": 9}, {"turns": 9, "messages": "cd"}]
    full = [[5, END], [5, END], [6] * 5 + [END], [6, END], [6] * 12]
    batch, engine, _, scorer = draw(rows, full, **{"data.max_turns": 2})
    # The first conversation ends, the second reaches the limit of turns, the third that of tokens.
    assert [len(prompts) for prompts, _ in engine.calls] == [3, 2]
    assert totals(batch)["turns"].tolist() == [1, 2, 2]
    assert scorer.truncated(batch) == [False, True, True]
    assert [len(row) for row in batch.split()] == [5, 3 + 2 + 3 + 2, 4 + 12]
    sampling = engine.calls[1][1]
    assert (sampling.n, sampling.max_new_tokens, sampling.max_length) == (1, 7, 16)
    assert sampling.seed != engine.calls[0][1].seed


def test_without_room_for_the_messages_a_conversation_ends(draw: Draw) -> None:
    batch, engine, _, scorer = draw([{}], [[5] * 8 + [END]])
    assert len(engine.calls) == 1
    assert scorer.truncated(batch) == [True]
    assert totals(batch)["environment_reward"].tolist() == [1]


def test_an_environment_may_begin_a_conversation(draw: Draw) -> None:
    begin = [{"role": "user", "content": "xyz"}]
    batch, engine, _, _ = draw([{"turns": 1, "begin": begin}, {"turns": 1}], [[5, END]] * 4, n=2)
    ((prompts, sampling),) = engine.calls
    assert [len(prompt) for prompt in prompts] == [5, 5, 3, 3]
    assert sampling.n == 1
    assert len(batch) == 4
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: the environment begins with 17 tokens, which leave no"):
        draw([{"begin": "x" * 15}], [])


def test_failures_stop_the_run_or_count_as_zero(draw: Draw) -> None:
    rows = [{"turns": 1}, {"step": "raise"}, {"reset": "raise"}]
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3: the environment raised RuntimeError: no room .* in res"):
        draw(rows, [[5, END]] * 3)
    batch, _, said, scorer = draw(rows, [[5, END]] * 3, **{"rewards.errors": "zero"})
    assert totals(batch)["environment_reward"].tolist() == [1, 0, 0]
    assert scorer(scorer.checked_run.prompts, batch).errors == 2
    assert len(said) == 2
    assert "rows.jsonl, line 2: the environment raised KeyError: 'gone'" in said[1]


def test_messages_that_the_template_refuses_fail_like_their_environment(draw: Draw) -> None:
    refused = [{"role": "refused", "content": "x"}]
    rows = [{"turns": 1}, {"begin": refused}, {"turns": 9, "step": "refused"}, {"turns": 9, "step": "late failure"}]
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: the environment said .*; .*no such role"):
        draw(rows, [])
    batch, _, said, scorer = draw(rows, [[5, END]] * 5, **{"rewards.errors": "zero"})
    assert totals(batch)["environment_reward"].tolist() == [1, 0, 0, 0]
    assert totals(batch)["failed"].tolist() == [0, 1, 1, 1]
    assert len(said) == 3
    environments = scorer.rewards.environments  # type: ignore[union-attr]
    ends = [environments.ask(key, "close").result(20).error for key in range(4)]  # type: ignore[union-attr]
    assert ends == ["was lost when its process ended"] * 4, "each is closed already"


def test_a_slow_step_keeps_no_other_sample_waiting(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_train.loop.environment_turns._PATIENCE_SECONDS", 0.05)
    rows = [{"step": "hang"}, {"turns": 3}]
    responses = [[5, END]] * 4
    batch, engine, _, _ = draw(rows, responses, **{"rewards.errors": "zero"})
    assert [len(prompts) for prompts, _ in engine.calls] == [2, 1, 1]
    assert totals(batch)["failed"].tolist() == [1, 0]


def test_a_template_without_the_answers_is_refused(chat_model: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_model, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="the chat template leaves out or changes the answers of the model"):
        TextCodec(tmp_path / "bare").continuation([{"role": "user", "content": "a"}], END)


def test_a_dry_run_refuses_tools_that_the_template_leaves_out(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": "c"}')
    known = {"model": chat_model, "prompts": file, "environment": "talks:Counter", "device": "cpu", "stop-ids": 2}
    result = CliRunner().invoke(app, ["train", "--dry-run", *(f"--{name}={value}" for name, value in known.items())])
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert f"{file}, line 1: the chat template leaves out the name of the tool count" in said


@pytest.mark.parametrize(("begin", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_an_environment_knows_whether_the_template_began_a_thought(tmp_path: Path, begin: str, thinking: bool) -> None:
    save_tokenizer(tmp_path, CHATML.replace("assistant\n{% endif", f"assistant\n{begin}{{% endif"))
    asked: list[Any] = []
    rewards = SimpleNamespace(environments=SimpleNamespace(ask=lambda *args, **flags: asked.append(flags)))
    checked_run = SimpleNamespace(
        options=SimpleNamespace(data=DataOptions(max_turns=2)), stop_ids=(0,), codec=TextCodec(tmp_path)
    )
    owner: Any = SimpleNamespace(checked_run=checked_run, rewards=rewards)
    tokens = checked_run.codec.chat([{"role": "user", "content": "use <think>"}], None)
    prompt = Prompt(tokens, {}, 1)
    episode = Episode(prompt, 7, Recorder(prompt, checked_run.codec, 999), Call(tokens))
    episode.recorder.record(episode.call, Part([5, 0], {}))
    EnvironmentAnswers(owner, [episode]).step(episode)
    assert asked == [{"last": False, "thinking": thinking}]


def run(model: Path, folder: Path, *given: str, **options: Any) -> list[dict[str, Any]]:
    """Run `rl-train train` with conversations, and return its metrics."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": letter, "turns": 3}) + "\n" for letter in "cdef"))
    known = {"model": model, "prompts": file, "environment": "talks:Talk", "out": folder / "run", "device": "cpu"}
    known |= {"prompts-per-step": 4, "samples": 2, "max-new-tokens": 24, "steps": 2, "eval-prompts": file}
    known |= {"stop-ids": "2,4,5,6,7,8,9,10,11,12,13,14,15", "learning-rate": 1e-3} | options
    result = CliRunner().invoke(app, ["train", *(f"--{name}={value}" for name, value in known.items()), *given])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if "second" not in name} for record in records]


def test_a_run_learns_from_conversations_and_goes_on_where_it_stopped(chat_model: Path, tmp_path: Path) -> None:
    flags = ["--sampling.keep-sampling-mask", "--reward=environment", "--reward=length=rewards:constant@0.5"]
    options = {"top-k": 20, "staleness": 1, "save-every": 1, "steps": 2, "eval-every": 2}
    whole = run(chat_model, tmp_path, *flags, **options)
    for record in whole[1:]:
        assert record["rollout_difference"] < 1e-4 or record["staleness"]
        assert 1 < record["turns"] <= 3
        assert record["prompt_tokens_computed"] > 0
        assert record["reward"] == pytest.approx(record["reward/environment"] + 0.5)
    assert whole[1]["rollout_difference"] < 1e-5
    assert whole[0]["eval/turns"] > 1
    latest = tmp_path / "run" / "training" / "actor" / "latest"
    latest.write_text(latest.read_text().replace("2", "1"))
    assert timeless(run(chat_model, tmp_path, *flags, **options)) == timeless(whole)
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert "ab</s>" in sample["response"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--dims=dp=2,tp=2"], ["--dims=pp=2,cp=2"], ["--ray"]])
def test_all_ranks_see_the_same_turns(
    chat_model: Path, tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ADDRESS": "local", "ENABLE_UV_RUN_RUNTIME_ENV": "0", "AUTH_MODE": "disabled"}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    records = run(chat_model, tmp_path, *given)
    assert all(record["rollout_difference"] < 1e-5 and record["turns"] > 1 for record in records[1:])


@pytest.mark.vllm
def test_vllm_draws_the_turns(chat_model: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_model, tmp_path / "model")
    # The smallest heads that vLLM's attention on a CPU takes.
    LlamaForCausalLM(LlamaConfig(**MODEL | {"head_dim": 32})).save_pretrained(tmp_path / "model")
    records = run(tmp_path / "model", tmp_path, "--rollouts=vllm")
    assert all(record["rollout_difference"] < 1e-4 and record["turns"] > 1 for record in records[1:])
