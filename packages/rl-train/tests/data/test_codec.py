"""Chats go on after an answer as their templates write it: no end is there twice, and nothing is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import (
    CHATML,
    COHERE,
    GLM,
    GPT_OSS,
    MISTRAL,
    NEMOTRON,
    NO_RESULTS,
    NO_TOOLS,
    OF_PARTS,
    installed_templates,
    save_tokenizer,
)

from rl_train.data.codec import TextCodec

HELLO = {"role": "user", "content": "hello"}
FAREWELL = {"role": "user", "content": "farewell"}
RESULT = {"role": "tool", "name": "add", "content": "five"}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("template", "message", "last", "expected"),
    [
        (CHATML, HELLO, "<|im_end|>", "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        # Another end than the template's, and a token of --stop-ids, which is no end of a message.
        (CHATML, HELLO, "</s>", "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, HELLO, "b", "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        (GPT_OSS, HELLO, "<|return|>", "<|start|>user<|message|>hello<|end|><|start|>assistant"),
        (GPT_OSS, HELLO, "<|end|>", "<|start|>user<|message|>hello<|end|><|start|>assistant"),
        (GPT_OSS, RESULT, "<|call|>", '<|start|>functions.add<|message|>"five"<|end|><|start|>assistant'),
        (COHERE, HELLO, "<|END_OF_TURN|>", "<|START|><|USER|>hello<|END_OF_TURN|><|START|><|BOT|><|START_RESPONSE|>"),
        (GLM, HELLO, "<|user|>", "\nhello<|assistant|>"),
        (GLM, HELLO, "</s>", "<|user|>\nhello<|assistant|>"),
        (GLM, RESULT, "<|observation|>", "\nfive<|assistant|>"),
        (GLM, RESULT, "<|user|>", "<|observation|>\nfive<|assistant|>"),
        (NEMOTRON, HELLO, "<end>", "\n<user>\nhello<bot>\n"),
        (MISTRAL, HELLO, "</s>", "[INST]hello[/INST]"),
        (MISTRAL, RESULT, "</s>", "[TOOL_RESULTS]five[/TOOL_RESULTS]"),
    ],
)
def test_an_answer_has_one_end(
    tmp_path: Path, template: str, message: dict[str, Any], last: str, expected: str
) -> None:
    save_tokenizer(tmp_path, template, "<|observation|>", "<|user|>", "<|assistant|>")
    codec = TextCodec(tmp_path, tools=[ADD] if message is RESULT else [])
    (token,) = codec.encode(last)
    assert codec.decode(codec.continuation([message], token), special=True) == expected


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (NO_TOOLS, "the chat template leaves out the name of the tool add, so the model would never see it"),
        (NO_RESULTS, 'the chat template leaves out the text of a message of the role "tool", so the model would never'),
    ],
)
def test_a_template_that_leaves_out_tools_is_refused(tmp_path: Path, template: str, error: str) -> None:
    save_tokenizer(tmp_path, template)
    codec = TextCodec(tmp_path, tools=[ADD])
    with pytest.raises(ValueError, match=error):
        codec.continuation([RESULT], 0)
    with pytest.raises(ValueError, match=error):
        codec.chat([HELLO, {"role": "assistant", "content": "so"}, RESULT], None)
    assert TextCodec(tmp_path).chat([HELLO], None)
    assert TextCodec(tmp_path).continuation([HELLO], 0)


def test_a_tool_without_the_form_of_the_template_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, CHATML.replace("tool | tojson", "(tool.get('function') or {}).get('name')"))
    assert "add" in TextCodec(tmp_path).decode(TextCodec(tmp_path).chat([HELLO], [ADD]))
    with pytest.raises(ValueError, match="leaves out the name of the tool add"):
        TextCodec(tmp_path).chat([HELLO], [ADD["function"]])  # type: ignore[list-item]


def test_a_chat_that_ends_with_an_answer_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, CHATML)
    codec, messages = TextCodec(tmp_path), [HELLO, {"role": "assistant", "content": "so"}]
    error = 'the last message is of the role "assistant", and the model would answer its own answer'
    with pytest.raises(ValueError, match=error):
        codec.chat(messages, None)
    with pytest.raises(ValueError, match=error):
        codec.continuation(messages, 0)


@pytest.mark.parametrize("value", ["</s>", {"content": "</s>"}])
def test_the_end_of_a_text_may_be_in_the_map_of_special_tokens(tmp_path: Path, value: Any) -> None:
    save_tokenizer(tmp_path, CHATML)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert TextCodec(tmp_path).end is None
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": value}))
    (end,) = TextCodec(tmp_path).encode("</s>")
    assert TextCodec(tmp_path).end == end


@pytest.mark.slow
@pytest.mark.parametrize("file", installed_templates(), ids=str)
def test_templates_of_installed_packages(tmp_path: Path, file: Path) -> None:
    """An answer has one end with every template, and each shows tools and their results, or is refused."""
    save_tokenizer(tmp_path, file.read_text())
    codec, answer = TextCodec(tmp_path), {"role": "assistant", "content": "fourty-two"}
    if file.stem in OF_PARTS:
        with pytest.raises(ValueError, match="leaves out the text of a message"):
            codec.chat([HELLO], None)
        return
    codec.chat([HELLO], None)
    rendered = codec._template._text([HELLO, answer, FAREWELL], None)
    after = rendered.rpartition("fourty-two")[2]
    closed = codec._template._text([HELLO, answer], None, answer=False).rpartition("fourty-two")[2]
    ends = [next((token for token in codec._ids(text) if token in codec.special), None) for text in (closed, after)]
    for end in filter(None, ends):
        text, end_text = (codec.decode(ids, special=True) for ids in (codec.continuation([FAREWELL], end), [end]))
        head = after.partition("farewell")[0]
        assert after.endswith(end_text + text if end_text in head else text)
        assert not text.lstrip().startswith((end_text, codec.decode([ends[0] or end], special=True)))
    shown = [(ADD["function"]["name"], lambda: codec.chat([HELLO], [ADD]))]
    shown.append((RESULT["content"], lambda: TextCodec(tmp_path, tools=[ADD]).continuation([RESULT], ends[0] or 0)))
    for word, render in shown:
        try:
            text = codec.decode(render(), special=True)
        except ValueError as error:
            text = f"{word}: {error}"
            shown_errors = "leaves out|refuses|shows no end"
            if not re.search(shown_errors, text):
                raise
        assert word in text
