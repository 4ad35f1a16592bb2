"""Chats through the recorder: ids are the template's, a drawn token is in one mask, other histories begin anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from chat_families import (
    CHATML,
    COHERE,
    GLM,
    GPT_OSS,
    MISTRAL,
    THINKING,
    save_tokenizer,
)
from hypothesis import given, settings, strategies as st

from rl_train.data.chat import plain
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.trajectories.recorder import RecordedCall, Recorder
from rl_train.trajectories.samples import Part, batch_of

FAMILIES = {"CHATML": CHATML, "COHERE": COHERE, "GLM": GLM, "GPT_OSS": GPT_OSS, "MISTRAL": MISTRAL}
FAMILIES["THINKING"] = THINKING
# Templates that show calls of tools.
CALLS = (GPT_OSS, MISTRAL, THINKING)
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ENDS = ("<|im_end|>", "<|END_OF_TURN|>", "<|call|>", "<|return|>", "</s>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
Codecs = Callable[[str], TextCodec]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    @cache
    def codec(template: str) -> TextCodec:
        folder = tmp_path_factory.mktemp("model")
        more = ("<|observation|>", "<|user|>", "<|assistant|>")
        save_tokenizer(folder, template, *more, merges=[("a", "b"), ("Ċ", "Ċ")])
        return TextCodec(folder)

    return codec


class Client:
    """The client of an episode. Its model draws the template's text of an answer, as ids without merged tokens."""

    def __init__(self, codec: TextCodec, tools: Any = None) -> None:
        self.codec, self.tools = codec, tools
        self.recorder = Recorder(Prompt([1], {}, 1), codec, 10**6)
        self.histories, self.draws = list[list[dict[str, Any]]](), list[list[int]]()
        self.ids = codec.vocabulary
        self.letters = {number: token for token, number in self.ids.items()}

    def ask(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> RecordedCall:
        """Call the model, which sees the template's text, and take its answer into the history."""
        call = self.recorder.chat(messages, self.tools)
        form = [plain(message) for message in [*messages, answer]]
        expected = self.text(self.codec.chat(form[:-1], self.tools))
        assert self.text(call.tokens) == expected
        answered = self.text(self.codec.answered(form, self.tools))
        assert answered.startswith(expected)
        drawn = self.draw(answered.removeprefix(expected))
        self.draws.append(drawn)
        self.histories.append([*messages, answer])
        part = Part(drawn, {"log_probs": -torch.arange(1.0, 1 + len(drawn)) - 1000 * len(self.draws)})
        recorded = self.recorder.record(call, part, answer)
        assert recorded.tokens == call.tokens + drawn
        return recorded

    def draw(self, text: str) -> list[int]:
        """Return the ids of a text, letter by letter, up to the first token that ends an answer."""
        ids: list[int] = []
        for token in self.codec.encode(text):
            letters = [token] if token in self.codec.special else [self.ids[letter] for letter in self.letters[token]]
            ids += letters
            if self.letters[token] in ENDS:
                return ids
        return [*ids, self.ids["</s>"]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text that a reader of any template sees: the ends of answers may differ."""
        text = self.codec.decode(ids, special=True).replace("<|return|>", "<|end|>")
        return text if "</s>" in (self.codec._chat.chat_template or "") else text.replace("</s>", "")

    def parents(self, messages: list[dict[str, Any]], *, thoughts: bool) -> set[int]:
        """Return the numbers of the calls that messages may continue: the longest histories that begin them.

        With `thoughts` the template drops the thoughts of answers before the last message of the user. A call whose
        thoughts it drops is not continued.
        """
        last = last_of_user(messages)
        begin = {
            number: len(history)
            for number, history in enumerate(self.histories)
            if messages[: len(history)] == history
            and not (thoughts and any("reasoning_content" in x for x in history[last_of_user(history) : last]))
        }
        return {number for number, length in begin.items() if length == max(begin.values())}

    def check(self) -> None:
        """Check that every draw is in the mask of one sample, with its own numbers."""
        batch = batch_of(self.recorder.samples)
        assert int(batch.mask.sum()) == sum(map(len, self.draws))
        parts = [
            (sample.tokens[begin:end], fields)
            for sample in self.recorder.samples
            for begin, end, fields in sample.parts
        ]
        drawn = {int(-fields["log_probs"][0]) // 1000: tokens for tokens, fields in parts}
        assert [drawn[number] for number in range(1, 1 + len(self.draws))] == self.draws
        assert batch.tokens[batch.mask].tolist() == [token for tokens, _ in parts for token in tokens]
        torch.testing.assert_close(
            batch["log_probs"][batch.mask], torch.cat([fields["log_probs"] for _, fields in parts])
        )
        assert (batch["log_probs"][~batch.mask] == 0).all()


def last_of_user(messages: list[dict[str, Any]]) -> int:
    return max(place for place, message in enumerate(messages) if message["role"] == "user")


TEXTS = st.text("ab\n \"'é", min_size=1, max_size=6).map(lambda text: f"t{text}t")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["extend", "extend", "extend", "branch", "edit", "edit the answer", "compact", "forget", "again"]
        ),
        st.integers(0, 5),
        TEXTS,
        TEXTS,
        st.booleans(),
        st.booleans(),
    ),
    min_size=3,
    max_size=8,
)


def answer_of(template: str, text: str, *, calls: bool, thinks: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if calls and template in CALLS:
        function = {"name": "add", "arguments": json.dumps({"a": text})}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "type": "function"}]}
        answer["tool_calls"][0]["function"] = function
    if thinks and template == THINKING:
        answer["reasoning_content"] = text
    return answer


def next_messages(client: Client, kind: str, number: int, text: str) -> list[dict[str, Any]]:
    """Return the messages of the next call, by the kind of a step."""
    if not client.histories or kind == "compact":
        return [{"role": "user", "content": text}]
    history = client.histories[-1 if kind == "extend" else number % len(client.histories)]
    if kind == "again":
        return history[:-1]
    history = [dict(message) for message in history]
    if kind == "edit":
        message = history[number % len(history) // 2 * 2]
        message["content"] = f"{message['content']}!"
    if kind == "edit the answer":
        history[-1] |= {"content": "changed"} if history[-1]["content"] else {}
    if kind == "forget":
        for message in history:
            message.pop("reasoning_content", None)
    if "tool_calls" in history[-1]:
        return [*history, {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": text}]
    return [*history, {"role": "user", "content": text}]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(steps=STEPS)
def test_chats_have_the_ids_of_their_template(codecs: Codecs, name: str, steps: list[Any]) -> None:
    template = FAMILIES[name]
    client = Client(codecs(template), [ADD] if template in CALLS else None)
    for kind, number, text, answer, calls, thinks in steps:
        messages = next_messages(client, kind, number, text)
        parents = client.parents(messages, thoughts=template == THINKING)
        recorded = client.recorder.calls.copy()
        call = client.recorder.chat(messages, client.tools)
        assert ({recorded.index(call.parent)} if call.parent else set()) <= parents
        assert (call.parent is None) == (not parents)
        client.ask(messages, answer_of(template, answer, calls=calls, thinks=thinks))
    client.check()
