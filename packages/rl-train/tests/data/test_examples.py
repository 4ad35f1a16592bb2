"""The rows of recipes that learn from files: what is learned of chats, completions, pairs and labelled steps."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from chat_families import CHATML, COHERE, GPT_OSS, OF_PARTS, THINKING, installed_templates, save_tokenizer
from hypothesis import strategies as st

from rl_train.data.codec import TextCodec
from rl_train.data.examples import FIELDS, NONE, Example, ExampleReader, Reader, judged, labelled, pair, steps, whole
from rl_train.data.mixture import read_sources
from rl_train.data.prompts import PromptReader, read_prompts

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "One.", "reasoning_content": "hm"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "so"},
]


def learned(codec: TextCodec, example: Example, number: int = 0) -> list[str]:
    tokens, labels = example.sequences[number]
    return runs(codec, tokens, [label != NONE for label in labels])


def runs(codec: TextCodec, tokens: list[int], marks: list[bool]) -> list[str]:
    """Return the texts of the runs of marked tokens."""
    groups = itertools.groupby(zip(tokens, marks, strict=True), lambda entry: entry[1])
    return [codec.decode([token for token, _ in run], special=True) for marked, run in groups if marked]


def read(folder: Path, reader: Reader, *rows: Any, **options: Any) -> list[Example]:
    return read_sources(ExampleReader(folder, reader=reader, **options), [folder / "rows.jsonl"], rows)[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["One.<|im_end|>\n", "Two.<|im_end|>\n"]),
        # Thoughts of earlier answers are dropped: the text before an answer is not that of the answer's own prompt.
        (THINKING, ["One.<|im_end|>\n", "<think>\nso\n</think>\n\nTwo.<|im_end|>\n"]),
        # The last answer ends differently, and the role comes from the prompt.
        (GPT_OSS, ["<|message|>One.<|end|>", "<|message|>Two.<|return|>"]),
        (COHERE, ["One.<|END_RESPONSE|><|END_OF_TURN|>", "Two.<|END_RESPONSE|><|END_OF_TURN|>"]),
        (
            CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
            ["Hi", "One.", "And?", "Two."],
        ),
    ],
    ids=["chatml", "thinking", "gpt-oss", "cohere", "marked"],
)
def test_the_answers_of_a_chat_are_learned(tmp_path: Path, template: str, expected: list[str]) -> None:
    save_tokenizer(tmp_path, template)
    codec = TextCodec(tmp_path)
    chat, completed = read(tmp_path, whole, {"messages": CHAT}, {"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert learned(codec, chat) == expected
    assert learned(codec, completed) == expected[-1:]
    assert chat.tokens[0].tokens == codec._ids(codec._template._text(CHAT, None, answer=False))
    (begun,) = read(tmp_path, whole, {"messages": CHAT[:2]}, system_prompt="Be kind.")
    assert "Be kind." in codec.decode(begun.tokens[0].tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in installed_templates() if getattr(file, "id", None) and "_training" in file.id] or [None]
)
def test_masks_are_those_of_trl(tmp_path: Path, file: Path | None) -> None:
    """TRL marks what is learned in templates of its own; without marks, the template gives the same mask.

    TRL also learns beginnings of answers that the prompt has already, such as `<think>` or `<|start|>assistant`.
    """
    if file is None:
        pytest.skip("needs TRL's templates: pip install --no-deps trl")
    marked = file.read_text()
    mark = re.compile(r"(\{%-?)\s*(end)?generation\s*(-?%\})")
    plain = mark.sub(lambda found: f"{found[1]} {'endif' if found[2] else 'if true'} {found[3]}", marked)
    texts = [("Hi", "Hello 42."), ("And é?", "<think>\nso\n</think>\n\nNo 😀")]
    chat: list[dict[str, Any]] = []
    for text, answer in texts:
        chat += {"role": "user", "content": text}, {"role": "assistant", "content": answer}
    if file.stem in OF_PARTS:
        chat = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in chat]
    masks = []
    for name, template in (("marked", marked), ("plain", plain)):
        save_tokenizer(tmp_path / name, template)
        codec = TextCodec(tmp_path / name)
        masks.append(codec.conversation(chat, None))
    (ids, of_trl), (ids_of_plain, mask) = masks
    assert ids == ids_of_plain
    asked = codec._template._text(chat[:1], None).rpartition("Hi")[2]
    of_prompts = runs(codec, ids, [trl and not ours for trl, ours in zip(of_trl, mask, strict=True)])
    assert all(text in asked for text in of_prompts)
    of_ours = runs(codec, ids, [ours and not trl for trl, ours in zip(of_trl, mask, strict=True)])
    # LLaVA-NeXT writes a space behind the end of an answer.
    assert of_ours == ([" ", " "] if file.stem == "llava_next_training" else [])
    assert len(runs(codec, ids, of_trl)) == len(runs(codec, ids, mask)) == 2


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    save_tokenizer(tmp_path, CHATML, merges=[("a", "b")])
    return TextCodec(tmp_path)


def test_texts_and_tokens(tmp_path: Path, codec: TextCodec) -> None:
    rows = [{"prompt": "ca", "completion": "cb"}, {"prompt": "ca", "completion": "bc"}, {"text": "cab"}]
    rows += [{"tokens": [5, 6, 7]}, {"prompt": [5, 6], "completion": [7]}]
    examples = read(tmp_path, whole, *rows)
    # "ab" is a token, which no model draws behind a prompt that ends with "a".
    assert [learned(codec, example) for example in examples[:3]] == [["cb</s>"], ["bc</s>"], ["ab</s>"]]
    assert [example.sequences[0] for example in examples[3:]] == [
        ([5, 6, 7], [NONE, 1, 1]),
        ([5, 6, 7], [NONE, NONE, 1]),
    ]


def test_pairs_share_a_prompt(tmp_path: Path, codec: TextCodec) -> None:
    other = [*CHAT[:3], {"role": "assistant", "content": "Three."}]
    rows = [{"prompt": "c", "chosen": "a", "rejected": "b"}, {"chosen": CHAT, "rejected": other}]
    rows += [{"prompt": CHAT[:3], "chosen": "Two.", "rejected": "Three."}]
    examples = read(tmp_path, pair, *rows)
    assert [learned(codec, examples[0], number) for number in (0, 1)] == [["a</s>"], ["b</s>"]]
    for example in examples[1:]:
        assert [learned(codec, example, number) for number in (0, 1)] == [["Two.<|im_end|>\n"], ["Three.<|im_end|>\n"]]


def test_labels_stand_at_the_ends_of_texts_and_steps(tmp_path: Path, codec: TextCodec) -> None:
    (text,) = read(tmp_path, labelled, {"text": "cab", "label": 2})
    assert text.sequences[0].labels == [NONE, NONE, 2]  # c, ab, </s>
    (solution,) = read(tmp_path, steps, {"prompt": "c", "completions": ["ab", "c"], "labels": [True, False]})
    assert solution.sequences[0].labels == [NONE, NONE, 1, NONE, 0]
    assert codec.decode(solution.sequences[0].tokens) == "cab\nc\n"


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        (
            whole,
            {"prompt": "a"},
            "line 1: there is no \"completion\"; the fields are 'prompt', and --data.columns comp",
        ),
        (whole, {"messages": CHAT[:1]}, "no token of the row is learned; give an answer of the assistant"),
        (whole, {"prompt": "a", "completion": [1]}, "must both be texts, messages or token ids, got 'a' and"),
        (whole, {"tokens": [5, 999]}, "token ids .999. are outside the vocabulary"),
        (whole, {"tokens": [5]}, '"tokens" must be a list of at least two integers'),
        (pair, {"chosen": "a", "rejected": "b"}, 'without a "prompt" must be whole chats'),
        (pair, {"prompt": "c", "chosen": "a", "rejected": "a"}, "are the same, so nothing is preferred"),
        (judged, {"prompt": "c", "completion": "a", "label": "yes"}, "\"label\" must be true .* or false, got 'yes'"),
        (labelled, {"text": "c", "label": -1}, "must be an integer from 0 on, got -1"),
        (steps, {"prompt": "c", "completions": ["a"], "labels": []}, "a list with a label for each of them"),
        (whole, {"question": "a"}, "expected .*, got the fields 'question'; --data.columns prompt=question,"),
        (whole, {"prompt": "a", "completion": " "}, "the answer to 'a' is empty; leave the row out"),
        (pair, {"prompt": "a", "chosen": [], "rejected": "b"}, "the answer to 'a' is empty"),
        (
            whole,
            {"messages": [*CHAT[:1], {"role": "assistant", "content": ""}]},
            "an answer .* is empty; leave",
        ),
        (
            whole,
            {"messages": [{"from": "human", "value": "a"}]},
            "a message has 'from', 'value' and no \"role\"",
        ),
        (steps, {"prompt": "c", "completions": ["a"], "labels": ["+"]}, "must be true or false, .* got '.'"),
        (whole, {"messages": [{"role": "user", "content": [{"type": "image", "path": "a"}]}]}, "have images"),
    ],
)
def test_mistakes_in_rows_are_named(
    tmp_path: Path, codec: TextCodec, reader: Reader, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, reader, row)


def test_columns_of_trl_and_verl_are_prompts(tmp_path: Path, codec: TextCodec) -> None:
    verl = {"prompt": CHAT[:1], "reward_model": {"style": "rule", "ground_truth": "4"}, "extra": {"index": 7}}
    lines = [verl, {"prompt": "ab"}, {"prompt": json.dumps(CHAT[:1])}, {"prompt": [5, 6]}]
    options: dict[str, Any] = {"rows": lines, "columns": ""}
    first, text, chat, ids = read_prompts(tmp_path / "rows.jsonl", tmp_path, None, **options)
    assert first.tokens == chat.tokens == codec.chat(CHAT[:1], None)
    assert first.row["answer"] == "4"
    assert (text.tokens, ids.tokens) == (codec.encode("ab"), [5, 6])
    options["columns"] = "answer=extra.index"
    assert read_prompts(tmp_path / "rows.jsonl", tmp_path, None, **options | {"rows": lines[:1]})[0].row["answer"] == 7
    with pytest.raises(ValueError, match=r"there is no column 'extra\.place'"):
        read_prompts(tmp_path / "rows.jsonl", tmp_path, None, **options | {"columns": "answer=extra.place"})


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatml")
    save_tokenizer(folder, CHATML)
    return folder


TEXTS, KEYS = ["", "ab", "user", "\ud800"], ["role", "content", "type", "text", "function", "name", "tool_calls"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(width=16) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
NAMES = (*FIELDS, "mask", "label", "labels", "completions", "tools", "images", "reward_model")


def refusal(reader: Any, row: Any) -> str:
    try:
        for number, entry in reader.rows(Path("rows"), [row]):
            reader.read(Path("rows"), number, entry)
    except ValueError as error:
        return str(error)
    return ""


@hypothesis.given(row=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | VALUES)
@hypothesis.example(row={"prompt": 5})
@hypothesis.example(row={"prompt": {"a": 1}})
@hypothesis.example(row={"tokens": [1, 2], "mask": [[0], [1]]})
def test_a_row_is_read_or_refused_by_name(chatml: Path, row: Any) -> None:
    """No row ends in another exception than the ValueError that names it."""
    readers = [PromptReader(chatml), *(ExampleReader(chatml, reader=r) for r in (whole, pair, judged, labelled, steps))]
    for reader in readers:
        assert re.match("rows, line 1: |$", refusal(reader, row))
