"""Chats are rendered by the tokenizer's own template; texts end at the tokenizer's and the model's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl_train.data.prompts import TextCodec, read_prompts

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


def test_a_chat_has_one_beginning_and_ends_where_the_answer_begins(model: Path, tmp_path: Path) -> None:
    assert read(tmp_path, model, {"messages": HELLO}) == "<s> user hello </s> assistant"
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert read(tmp_path, model, {"messages": HELLO, "tools": [tool]}) == "<s> tool add user hello </s> assistant"


def test_a_text_of_messages_is_one_message_of_the_user(model: Path, tmp_path: Path) -> None:
    assert read(tmp_path, model, {"messages": "hello"}) == "<s> user hello </s> assistant"


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
        ({"messages": HELLO, "text": "hello"}, 'expected an object with one of "tokens"'),
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
    with pytest.raises(ValueError, match=r'"messages" need a chat template, which the tokenizer of .*bare has not'):
        read(tmp_path, bare, {"messages": HELLO})


def test_a_text_ends_at_the_tokenizers_end(model: Path, tmp_path: Path) -> None:
    assert TextCodec(model).end == 1
    assert TextCodec(tmp_path).end is None
