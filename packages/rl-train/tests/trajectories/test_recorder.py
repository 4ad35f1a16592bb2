"""Chats through the recorder: ids are the template's, a drawn token is in one mask, other histories begin anew."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
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
    installed_templates,
    save_tokenizer,
)
from hypothesis import given, settings, strategies as st

from rl_models import Actor
from rl_models.calls import ROUTING
from rl_train.data.chat import plain
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import Response
from rl_train.trajectories.episodes import batch_of_episodes, totals
from rl_train.trajectories.recorder import Call, Recorder
from rl_train.trajectories.samples import Part, batch_of, part_of, parts_of

from ..loop.test_environment_turns import TEMPLATE as TEMPLATE

FAMILIES = {"CHATML": CHATML, "COHERE": COHERE, "GLM": GLM, "GPT_OSS": GPT_OSS, "MISTRAL": MISTRAL}
FAMILIES["THINKING"] = THINKING
# Templates that show calls of tools.
CALLS = (GPT_OSS, MISTRAL, THINKING)
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# Tokens that end an answer. Templates may end the last answer otherwise than the answers before it.
ENDS = re.compile(
    r"<\|im_end\|>|<\|END_OF_TURN(_TOKEN)?\|>|<\|call\|>|<\|return\|>|</s>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|<turn\|>"
)
SLOW = "--slow" in sys.argv
ROLES = ("<|observation|>", "<|user|>", "<|assistant|>")
Codecs = Callable[[str], TextCodec]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    @cache
    def codec(template: str) -> TextCodec:
        folder = tmp_path_factory.mktemp("model")
        save_tokenizer(folder, template, *ROLES, merges=[("a", "b"), ("Ċ", "Ċ")])
        return TextCodec(folder)

    return codec


class Client:
    """The client of an episode. Its model draws the template's text of an answer, as ids without merged tokens."""

    def __init__(self, codec: TextCodec, tools: Any = None) -> None:
        self.codec, self.tools = codec, tools
        self.recorder = Recorder(Prompt([1], {}, 1), codec, 10**6)
        self.histories, self.draws, self.texts = list[list[dict[str, Any]]](), list[list[int]](), list[str]()
        self.ids = codec.vocabulary
        self.letters = {number: token for token, number in self.ids.items()}

    def ask(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> Call:
        """Call the model, which sees the template's text, and take its answer into the history."""
        call = self.recorder.chat(messages, self.tools)
        form = [plain(message) for message in [*messages, answer]]
        expected = self.codec.decode(self.codec.chat(form[:-1], self.tools), special=True)
        assert self.text(call.tokens) == ENDS.sub("", expected)
        answered = ""
        with suppress(ValueError):
            answered = self.codec.decode(self.codec.answered(form, self.tools), special=True)
        shown = answered.removeprefix(expected) if answered.startswith(expected) else ""
        drawn = self.draw(shown or json.dumps(answer))  # a text that the template never writes
        self.draws.append(drawn)
        self.histories.append([*messages, answer])
        self.texts.append(self.text(call.tokens + drawn))
        part = Part(drawn, {"log_probs": -torch.arange(1.0, 1 + len(drawn)) - 1000 * len(self.draws)})
        recorded = self.recorder.record(call, part, answer)
        assert recorded.tokens == call.tokens + drawn
        return call

    def draw(self, text: str) -> list[int]:
        """Return the ids of a text, letter by letter, up to the first token that ends an answer."""
        ids: list[int] = []
        for token in self.codec.encode(text):
            letters = [token] if token in self.codec.special else [self.ids[letter] for letter in self.letters[token]]
            ids += letters
            if ENDS.fullmatch(self.letters[token]):
                return ids
        return [*ids, self.ids["</s>"]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids without the ends of answers."""
        return ENDS.sub("", self.codec.decode(ids, special=True))

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
        history[-1] |= {"content": f"{history[-1]['content']} more"} if history[-1]["content"] else {}
    if kind == "forget":
        for message in history:
            message.pop("reasoning_content", None)
    if "tool_calls" in history[-1]:
        return [*history, {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": text}]
    return [*history, {"role": "user", "content": text}]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60 if SLOW else 4, derandomize=not SLOW, deadline=None, database=None)
@given(steps=STEPS)
def test_chats_have_the_ids_of_their_template(codecs: Codecs, name: str, steps: list[Any]) -> None:
    """Calls of a client: each has the template's text, and continues the histories that begin it."""
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


CALL = answer_of(THINKING, "five", calls=True, thinks=False)
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "seven"}
ASK, MORE = ({"role": "user", "content": text} for text in ("first question", "second question"))
SAY, END = ({"role": "assistant", "content": text} for text in ("the first answer", "the last answer"))
SCRIPTS = {
    "plain": [(ASK, SAY), (MORE, SAY), (ASK, END)],
    "tools": [(ASK, CALL), (RESULT, SAY), (MORE, END)],
    "thoughts": [
        (ASK, CALL | {"reasoning_content": "the first thought"}),
        (RESULT, SAY | {"reasoning_content": "the second thought"}),
        (MORE, END),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("file", installed_templates())
def test_templates_of_installed_packages(tmp_path: Path, file: Path, script: str) -> None:
    """Every prompt has the template's text, and continues where this text shows what was drawn before."""
    save_tokenizer(tmp_path, file.read_text(), *ROLES, "<|eot_id|>", "<end_of_turn>")
    codec, messages = TextCodec(tmp_path), list[Any]()
    client = Client(codec, None if script == "plain" else [ADD])
    for message, answer in SCRIPTS[script]:
        try:
            codec.chat([*map(plain, messages), message], client.tools)
        except ValueError as error:
            assert re.search("leaves out|refuses", str(error))  # noqa: PT017
            break
        call = client.ask([*messages, message], answer)
        shown = ENDS.sub("", codec.decode(codec.chat([*map(plain, messages), message], client.tools), special=True))
        assert (call.parent is not None) == any(shown.startswith(text) for text in client.texts[:-1])
        messages += [message, answer]
    if client.draws:
        client.check()


def test_a_template_whose_text_depends_on_the_place_of_a_message_begins_anew(codecs: Codecs) -> None:
    client = Client(codecs(CHATML.replace("{{ m.role }}\n", "{{ m.role }}{{ loop.index }}\n").replace(
        "assistant\n{% endif", "assistant{{ messages | length + 1 }}\n{% endif"
    )))  # fmt: skip
    calls = [client.ask([ASK, SAY, MORE, SAY, ASK][:end], SAY) for end in (1, 3, 5)]
    first = client.recorder.calls[0]
    assert [call.parent for call in calls] == [None, first, first]  # the second call has another text after it
    client.check()


def test_a_chat_continues_what_was_drawn_where_the_last_answer_is_shown_otherwise(codecs: Codecs) -> None:
    """Qwen 3 writes an empty thought before the last answer alone, which a model without thoughts does not draw."""
    empty = "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    codec = codecs(CHATML.replace("{{ m.content }}", empty))
    recorder = Recorder(Prompt([1], {}, 1), codec, 10**6)
    call = recorder.chat([ASK])
    first = recorder.record(call, Part(codec.encode(f"{SAY['content']}<|im_end|>"), {}), SAY)
    assert recorder.chat([ASK, SAY, MORE]).parent is first


def test_an_answer_to_which_the_client_adds_begins_anew(codecs: Codecs) -> None:
    """Also where special tokens alone end an answer."""
    for template in (MISTRAL, COHERE):
        client = Client(codecs(template))
        client.ask([ASK], SAY)
        longer = SAY | {"content": SAY["content"] + " and more"}
        assert client.ask([ASK, longer, MORE], END).parent is None
        assert client.ask([ASK | {"content": "FIRST question"}, SAY, MORE], END).parent is None
        assert client.ask([ASK, SAY, MORE], END).parent is client.recorder.calls[0]
        client.check()


def test_a_client_may_write_arguments_and_contents_in_other_forms(codecs: Codecs) -> None:
    """Chats are equal where the template shows the same: white space in JSON, content None or "", further fields."""
    client = Client(codecs(THINKING), [ADD])
    client.ask([ASK], CALL)
    other = json.loads(json.dumps(CALL))
    other["tool_calls"][0]["function"]["arguments"] = '{"a" : "five"}'
    other |= {"content": "", "refusal": None}
    call = client.recorder.chat([ASK, other, RESULT], client.tools)
    assert call.parent is client.recorder.calls[0]
    assert client.recorder.chat([ASK, CALL, RESULT], [ADD, ADD]).parent is None  # other tools, another prompt


def test_calls_may_be_in_progress_at_the_same_time(codecs: Codecs) -> None:
    """Two calls continue one call: the first to end makes its sample longer, the other begins a sample."""
    recorder = Recorder(Prompt([1], {}, 1), codecs(CHATML), 10**6)
    first = recorder.record(recorder.chat([ASK]), Part([5, 6], {}), SAY)
    calls = [recorder.chat([ASK, SAY, message]) for message in (ASK, MORE)]
    assert [call.parent for call in calls] == [first, first]
    late, early = (recorder.record(call, Part([7], {}), END) for call in reversed(calls))
    assert [sample.tokens for sample in recorder.samples] == [late.tokens, early.tokens]
    assert late.sample is first.sample
    assert [len(sample.parts) for sample in recorder.samples] == [2, 1]
    batch = batch_of_episodes([recorder.samples])
    assert batch.masked_counts.tolist() == [3, 1]
    assert totals(batch)["turns"].tolist() == [3]


def test_prompts_of_ids_continue_the_longest_call_that_begins_them(codecs: Codecs) -> None:
    recorder = Recorder(Prompt([1, 2], {}, 1), codecs(CHATML), 8)
    assert [sample.tokens for sample in recorder.samples] == [[1, 2]]
    first = recorder.record(recorder.ids([3, 4]), Part([5], {}))
    second = recorder.record(recorder.ids([3, 4, 5, 6]), Part([7, 8], {}), truncated=True)
    assert second.sample is first.sample
    assert recorder.ids([3, 4, 5, 6, 7, 8, 9]).parent is second
    assert recorder.ids([3, 4, 5, 6, 7]).parent is first
    assert recorder.ids([3, 4]).parent is None
    recorder.record(recorder.ids([3, 4, 5, 6, 7, 8, 9]), Part([1, 2, 3, 4], {}))
    assert first.sample.tokens == [3, 4, 5, 6, 7, 8, 9, 1]
    assert [(begin, end) for begin, end, _ in first.sample.parts] == [(2, 3), (4, 6), (7, 8)]
    assert totals(batch_of_episodes([recorder.samples]))["truncated"].tolist() == [1]


def test_a_sample_has_all_that_its_calls_report(codecs: Codecs) -> None:
    """Log-probs, versions and sampling masks of drawn tokens, and each token's experts by the first call with it."""
    recorder = Recorder(Prompt([1], {}, 1), codecs(CHATML), 99)
    routing = torch.arange(12, dtype=torch.int16).view(6, 2, 1)
    responses = [
        Response([5, 6], [-1.0, -2.0], [[5, 9], [6]], [3, 4], 1, routing[:3] + 100),
        Response([7], [-3.0], [[7, 8, 9]], [4], 1, routing),
    ]
    first = recorder.record(recorder.ids([2, 3]), part_of(responses[0]))
    recorder.record(recorder.ids([*first.tokens, 4]), part_of(responses[1]))
    batch = batch_of(recorder.samples)
    assert batch.tokens.tolist() == [2, 3, 5, 6, 4, 7]
    assert batch.mask.tolist() == [False, False, True, True, False, True]
    assert batch["log_probs"].tolist() == [0, 0, -1, -2, 0, -3]
    assert batch["version"].tolist() == [-1, -1, 3, 4, -1, 4]
    assert batch.sampling_mask is not None
    assert batch.sampling_mask.tolist() == [[], [], [5, 9], [6], [], [7, 8, 9]]
    assert torch.equal(batch[ROUTING], torch.cat([routing[:3] + 100, routing[3:]]))
    (part,) = parts_of(batch, [2])
    assert (part.tokens, part.fields["log_probs"].tolist()) == ([5, 6, 4, 7], [-1, -2, 0, -3])  # type: ignore[union-attr]
    assert torch.equal(part.routing, batch[ROUTING])  # type: ignore[arg-type]
    first_call = Recorder(Prompt([1], {}, 1), codecs(CHATML), 99)
    first_call.record(first_call.ids([2, 3]), part_of(responses[0]))
    assert batch_of(first_call.samples)[ROUTING][:, 0, 0].tolist() == [100, 102, 104, -1]
    # A call that reports no experts, or those of fewer tokens, takes none away.
    for reported in (None, routing[:2], torch.arange(18, dtype=torch.int16).view(9, 2, 1)):
        first_call.record(first_call.ids([*first_call.samples[0].tokens, 4]), Part([9], {}, reported))
        known = batch_of(first_call.samples)[ROUTING][:, 0, 0].tolist()
        further = [-1] * len(known[3:]) if reported is None or len(reported) == 2 else [*range(6, 18, 2), -1]
        assert known == [100, 102, 104, *further]


def test_log_probs_of_all_samples_are_those_of_the_model(chat_model: Path) -> None:
    """A chat of three turns, a branch and an edited history: each draw has the log-probs that training gives it."""
    actor, codec = Actor.from_pretrained(chat_model, device="cpu"), TextCodec(chat_model)
    recorder, answers = Recorder(Prompt([1], {}, 1), codec, 63), list[dict[str, Any]]()

    def ask(*messages: dict[str, Any]) -> Call:
        call = recorder.chat(messages)
        batch = actor.generate([call.tokens], max_new_tokens=6, stop_ids=(codec.end or 0,), seed=len(answers))
        (part,) = parts_of(batch, [len(call.tokens)])
        answers.append({"role": "assistant", "content": codec.decode(part.tokens)})
        recorder.record(call, part, answers[-1])
        return call

    first, second, third = ({"role": "user", "content": text} for text in ("ab", "c", "dea"))
    ask(first)
    ask(first, answers[0], second)
    ask(first, answers[0], second, answers[1], third)
    assert len(recorder.samples) == 1
    assert ask(first, answers[0], third).parent is recorder.calls[0]
    assert ask(second, answers[0], second).parent is None
    batch = batch_of_episodes([recorder.samples])
    assert len(batch) == 3
    expected = torch.where(batch.mask, actor.log_probs(batch).log_probs, 0)
    torch.testing.assert_close(batch["log_probs"], expected, rtol=0, atol=1e-5)
