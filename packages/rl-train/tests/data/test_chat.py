"""Chats are rendered by the tokenizer's own template; texts end at the tokenizer's and the model's tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl_train.data.codec import TextCodec
from rl_train.data.prompts import read_prompts

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}tool {{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role }} {{ message.content }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["<s>", "</s>", "user", "assistant", "system", "tool", "add", "hello", "be", "brief"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that begins each text with `<s>`, and a config."""
    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(WORDS)}))
    return folder


def read(folder: Path, model: Path, row: dict[str, Any], **options: Any) -> str:
    """Return the words of the prompt that a row gives."""
    file = folder / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (prompt,) = read_prompts(file, model, 50, **options)
    assert prompt.row == row
    return " ".join(WORDS[token] for token in prompt.tokens)


HELLO = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_a_chat_has_one_beginning_and_ends_where_the_answer_begins(model: Path, tmp_path: Path) -> None:
    assert read(tmp_path, model, {"messages": HELLO}) == "<s> user hello </s> assistant"
    assert read(tmp_path, model, {"messages": HELLO, "tools": [TOOL]}) == "<s> tool add user hello </s> assistant"


def test_a_text_of_messages_is_one_message_of_the_user(model: Path, tmp_path: Path) -> None:
    assert read(tmp_path, model, {"messages": "hello"}) == "<s> user hello </s> assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(HELLO), "<s> user hello </s> assistant"),
        ("[hello]", "<s> user </s> </s> assistant"),
        ("{hello be}", "<s> user </s> </s> </s> assistant"),
    ],
)
def test_a_chat_as_json_text_is_a_chat(model: Path, tmp_path: Path, text: str, expected: str) -> None:
    (prompt,) = read_prompts(tmp_path / "rows", model, 50, rows=[{"messages": text}])
    assert " ".join(WORDS[token] for token in prompt.tokens) == expected


def test_tools_as_json_text_are_tools(model: Path, tmp_path: Path) -> None:
    row = {"messages": HELLO, "tools": json.dumps([TOOL])}
    (prompt,) = read_prompts(tmp_path / "rows", model, 50, rows=[row])
    assert " ".join(WORDS[token] for token in prompt.tokens) == "<s> tool add user hello </s> assistant"
    assert prompt.row == {"messages": HELLO, "tools": [TOOL]}


def test_nulls_of_arrow_are_no_entries(model: Path, tmp_path: Path) -> None:
    """Arrow gives each mapping the keys of all, and a table all columns; in JSON a null is a value."""
    tool = {**TOOL, "strict": None, "function": {**TOOL["function"], "parameters": {"a": {"type": "x", "enum": None}}}}
    message = {**HELLO[0], "tool_calls": None, "name": None}
    row = {"messages": [message], "tools": [tool], "text": None, "tokens": None, "answer": None}
    plain = {**TOOL, "function": {**TOOL["function"], "parameters": {"a": {"type": "x"}}}}
    (prompt,) = read_prompts(tmp_path / "rows", model, 50, rows=[row])
    assert prompt.row == {"messages": HELLO, "tools": [plain], "answer": None}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    (line,) = read_prompts(file, model, 50)
    assert line.tokens == prompt.tokens
    assert line.row == {"messages": [message], "tools": [tool], "answer": None}


def test_tools_and_results_that_a_template_leaves_out_are_refused(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").write_text(
        "{% for message in messages if message.role != 'tool' %}{{ message.content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [TOOL]}
    for row, what in [
        ({"messages": HELLO, "tools": [TOOL]}, "the name of the tool add"),
        ({"messages": [*HELLO, call, *HELLO]}, "the call of the tool add"),
        ({"messages": [*HELLO, {"role": "tool", "content": "hello"}]}, 'the text of a message of the role "tool"'),
    ]:
        with pytest.raises(ValueError, match=f"prompts.jsonl, line 1: the chat template leaves out {what}, so the"):
            read(tmp_path, bare, row)


def test_the_system_prompt_begins_chats_without_one(model: Path, tmp_path: Path) -> None:
    found = read(tmp_path, model, {"messages": HELLO}, system_prompt="be brief")
    assert found == "<s> system be brief </s> user hello </s> assistant"
    own = [{"role": "system", "content": "hello"}, *HELLO]
    assert read(tmp_path, model, {"messages": own}, system_prompt="be brief").count("system") == 1


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": []}, '"messages" must be a list of objects'),
        ({"messages": 5}, '"messages" must be a list of objects'),
        ({"messages": [{"role": "robot", "content": "hello"}]}, "the chat template refuses the messages: .*no robots"),
        (
            {"messages": [{"role": "system", "content": "be"}, {"role": "robot", "content": "hello"}]},
            ".*no robots; if it knows no system message, leave it and --data.system-prompt out",
        ),
        ({"messages": HELLO, "text": "hello"}, 'expected an object with one of "tokens"'),
        ({"messages": "[{'role': 'user', 'content': 'hello'}]"}, '"messages" is a text that begins like JSON, but not'),
        ({"messages": json.dumps(HELLO[0])}, '"messages" must be a list of objects'),
        ({"messages": HELLO, "tools": "add"}, '"tools" is a text that begins like JSON, but not valid JSON'),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, '"tools" must be a list of JSON schemas'),
        ({"messages": [*HELLO, {"role": "assistant", "content": "hello"}]}, 'the last message is of the role "assist'),
        ({"messages": "a\ud800"}, r"\"messages\": character 1 of the text, '\\ud800', is half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, r"\"messages\": character 0 of the text"),
        ({"messages": HELLO, "answer": {"\ud800": 1}}, r"\"answer\": character 0 of the text"),
        ({"text": "a\ud800"}, r"\"text\": character 1 of the text"),
    ],
)
def test_a_wrong_chat_is_named_with_its_line(model: Path, tmp_path: Path, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 1: {error}"):
        read(tmp_path, model, row)


def test_a_model_without_a_template_is_named(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match=r'"messages" needs .*tokenizer.json, which does not exist'):
        read(tmp_path, bare, {"messages": HELLO})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_text((model / name).read_text())
    with pytest.raises(
        ValueError, match=r'"messages" need a chat template, which the tokenizer of .*bare has not; write one into'
    ):
        read(tmp_path, bare, {"messages": HELLO})


def test_a_text_ends_at_the_tokenizers_end(model: Path, tmp_path: Path) -> None:
    assert TextCodec(model).end == 1
    assert TextCodec(tmp_path).end is None
