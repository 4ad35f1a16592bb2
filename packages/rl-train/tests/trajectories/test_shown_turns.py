"""The turns of `samples.jsonl`: texts and values of tokens, calls of tools, answers of environments."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_models import Batch
from rl_train.data.codec import TextCodec
from rl_train.engines.interface import VERSION
from rl_train.loop.scoring import Scorer
from rl_train.trajectories.episodes import SAMPLE
from rl_train.trajectories.shown_turns import shown_turns

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Words:
    """A tokenizer whose tokens are words."""

    def pieces(self, tokens: list[int]) -> list[str]:
        return ["prompt", "hello ", CALL, " 5 ", "bye"][slice(tokens[0], tokens[-1] + 1)]


def test_turns_of_episodes_of_several_samples() -> None:
    tokens, mask = torch.tensor([0, 1, 2, 3, 4, 0, 1]), torch.tensor([0, 1, 1, 0, 1, 0, 1]).bool()
    log_probs = torch.tensor([0, -0.123, -2.0, 0, -0.5, 0, -1.0])
    advantages = torch.tensor([0, 0.5, 0.5, 0, torch.nan, 0, 0.25])
    fields = {"log_probs": log_probs, "advantages": advantages, VERSION: torch.tensor([-1, 2, 3, -1, 3, -1, 4])}
    batch = Batch(tokens, (5, 2), mask, fields)
    first = [
        {
            "role": "policy", "texts": ["hello ", CALL], "log_probs": [-0.12, -2.0], "advantages": 0.5,
            "versions": [2, 3], "calls": [{"name": "add", "arguments": {"a": 1}}],
        },
        {"role": "environment", "text": " 5 "},
        {"role": "policy", "texts": ["bye"], "log_probs": -0.5, "advantages": None, "versions": 3},
    ]  # fmt: skip
    second = [{"role": "policy", "texts": ["hello "], "log_probs": -1.0, "advantages": 0.25, "versions": 4}]
    codec: Any = Words()
    assert list(shown_turns(batch, codec)) == [first, second]
    one_episode = batch.with_fields(**{SAMPLE: torch.tensor([0, 0, 0, 0, 0, 1, 1])})
    assert list(shown_turns(one_episode, codec)) == [first + second]


def test_pieces_join_to_the_text(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    codec = TextCodec(model)
    tokens = [*codec.encode("abc"), 2, 3]
    assert "".join(codec.pieces(tokens)) == codec.decode(tokens, special=True).replace(" ", "")
    # The bytes of one character are three tokens.
    euro = {f"<0x{byte:02X}>": number for number, byte in enumerate("€".encode())}
    tokenizer = Tokenizer(models.BPE(vocab=euro | {"x": 3}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(tmp_path).pieces([3, 0, 1, 2, 3]) == ["x", "", "", "€", "x"]
    assert TextCodec(tmp_path / "none").pieces([7, 8]) == ["7 ", "8 "]


def test_the_extremes_of_a_step_are_shown_beside_the_first_prompts() -> None:
    batch = Batch.from_sequences([[5, number] for number in range(8)], mask=[[0, 1]] * 8)
    batch = batch.with_fields(log_probs=torch.zeros(16))
    prompts: Any = [SimpleNamespace(line=number + 1, tokens=[5], row={}) for number in range(4)]
    codec = SimpleNamespace(available=False, pieces=lambda tokens: [f"{token}" for token in tokens])
    sampling = SimpleNamespace(max_new_tokens=1)
    options = SimpleNamespace(sampling=sampling, converses=False, prompts=Path("rows.jsonl"))
    checked_run: Any = SimpleNamespace(codec=codec, options=options, stop_ids=())
    scorer = Scorer(checked_run, None, lambda make: make(), lambda text: None)
    for scores, shown in (
        ([[0, 1], [0, 0], [1, 0], [0, 1]], [(1, 1), (1, 0), (2, 2)]),
        ([[0, 1], [0, 0], [3, 0], [0, -1]], [(1, 1), (1, 0), (2, 2), (3, 4), (4, 7)]),
    ):
        records = list(scorer.best_and_worst(prompts, batch, torch.tensor(scores).float(), 2))
        assert [(record["line"], record["response"][0]) for record in records] == shown
        assert [record["turns"][0]["texts"] for record in records] == [[f"{number}"] for _, number in shown]
