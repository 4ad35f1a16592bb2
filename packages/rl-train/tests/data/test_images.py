"""Chats with images go through the model's own processor, from every place that a row may have its images in."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import IMAGE, WORDS, question, save_model, save_pictures
from PIL import Image

from rl_train.data import prompts as prompts_module
from rl_train.data.images import load_images
from rl_train.data.mixture import read_sources
from rl_train.data.prompts import Prompt, PromptReader, read_prompts
from rl_train.data.sources import is_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeing"))


def read(folder: Path, model: Path, *rows: Any, **options: Any) -> list[Prompt]:
    return read_prompts(folder / "prompts.jsonl", model, 50, rows=rows, **options)


def test_every_source_gives_the_tokens_and_pixels_of_the_image(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    red = save_pictures(tmp_path / "pictures")["red"]
    code = base64.b64encode(red.read_bytes()).decode()
    rows = [
        {"messages": question(path="pictures/red.png")},
        {"messages": question(image=str(red))},
        {"messages": question(image=Image.open(red))},
        {"messages": question(url=f"data:image/png;base64,{code}")},
        {"messages": question(), "images": ["pictures/red.png"]},
        # As `datasets` has images in Parquet, where every part has every column.
        {"messages": question(text=None), "images": [{"bytes": red.read_bytes(), "path": None}]},
    ]
    prompts = read(tmp_path, model, *rows)
    for prompt in prompts:
        assert " ".join(WORDS[token] for token in prompt.tokens) == f"user {IMAGE} which colour assistant"
    found = load_images([prompt.chat for prompt in prompts])
    for one in found:
        assert one is not None
        assert one.image_grid_thw.tolist() == [[1, 2, 2]]
        assert one.mm_token_type_ids.tolist() == [0, 1, 0, 0, 0]
        assert torch.equal(one.pixel_values, found[0].pixel_values)
        assert [image.size for image in one.images] == [(8, 8)]


def test_images_at_urls_are_relative_to_the_rows(
    model: Path, tmp_path: Path, upload: Callable[[Path, str], None]
) -> None:
    (tmp_path / "pictures").mkdir()
    red = save_pictures(tmp_path / "pictures")["red"]
    code = base64.b64encode(red.read_bytes()).decode()
    sources = [{"path": "pictures/red.png"}, {"path": str(red)}, {"image": "memory://seen/pictures/red.png"}]
    sources += [{"url": f"data:image/png;base64,{code}"}, {"base64": code}]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": question(**source)}) + "\n" for source in sources)
    )
    upload(tmp_path, "memory://seen")
    prompts = read_prompts(Path("memory://seen/prompts.jsonl"), model, 50)
    assert prompts[0].chat is not None
    assert prompts[0].chat.messages[0]["content"][0] == {"type": "image", "image": "memory://seen/pictures/red.png"}
    found = load_images([prompt.chat for prompt in prompts])
    assert len(found) == 5
    for one in found:
        assert one is not None
        assert found[0] is not None
        assert torch.equal(one.pixel_values, found[0].pixel_values)
    missing = [{"messages": question(path="pictures/none.png")}]
    with pytest.raises(ValueError, match=r"row 1: the image 'pictures/none.png' cannot be read|line 1: the image"):
        read_prompts(Path("memory://seen/prompts.jsonl"), model, 50, rows=missing)


@pytest.mark.parametrize("at", ["a folder", "a URL"])
def test_images_of_a_saved_dataset_are_relative_to_its_folder(
    model: Path, tmp_path: Path, upload: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    (tmp_path / "saved").mkdir()
    save_pictures(tmp_path / "saved")
    upload(tmp_path, "memory://seen")
    source, asked = tmp_path / "saved" if at == "a folder" else Path("memory://seen/saved"), list[Path]()
    monkeypatch.setattr(prompts_module, "is_folder", lambda path: asked.append(path) or is_folder(path))
    rows = [{"text": "which"}, *[{"messages": question(path="red.png")}] * 3]
    prompts = read_prompts(source, model, 50, rows=rows)
    assert sum(images is not None for images in load_images([prompt.chat for prompt in prompts])) == 3
    assert asked == [source], "a store is asked once for each source, and only for images"
    asked.clear()
    read_prompts(source, model, 50, rows=rows[:1])
    assert asked == []


@pytest.mark.parametrize("base", ["memory://seen", None])
def test_images_of_a_pattern_are_relative_to_their_own_file(
    model: Path, tmp_path: Path, upload: Callable[[Path, str], None], base: str | None
) -> None:
    """Also where rows are read in another order than their files are opened, and where a file has no rows."""
    for folder, colour, count in (("a", "red", 2), ("b", "red", 0), ("c", "blue", 3)):
        (tmp_path / folder).mkdir()
        save_pictures(tmp_path / folder)[colour].rename(tmp_path / folder / "one.png")
        row = json.dumps({"messages": question(path="one.png")})
        (tmp_path / folder / "rows.jsonl").write_text(f"{row}\n" * count)
    upload(tmp_path, "memory://seen")
    source, reader = Path(f"{base or tmp_path}/*/rows.jsonl"), PromptReader(model)
    chats = [prompt.chat for prompt in read_sources(reader, [source])[0]]
    red, _, blue, *_ = images = load_images(chats)
    assert red is not None
    assert blue is not None
    assert [one is not None and one.digest for one in images] == [red.digest] * 2 + [blue.digest] * 3
    assert red.digest != blue.digest
    rows = [next(reader.rows(source, start=3)), next(reader.rows(source, start=1)), *islice(reader.rows(source), 5)]
    digests = [blue.digest, *[red.digest] * 3, *[blue.digest] * 3]
    for row, digest in zip(rows, digests, strict=True):
        (one,) = load_images([reader.read(source, *row).chat])
        assert one is not None
        assert one.digest == digest


def test_lines_of_a_file_and_the_system_prompt(model: Path, tmp_path: Path) -> None:
    save_pictures(tmp_path, size=(16, 8))
    file = tmp_path / "prompts.jsonl"
    rows = [{"messages": question(path="blue.png")}, {"messages": "which colour"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen, text = read_prompts(file, model, 50, system_prompt="blue")
    assert " ".join(WORDS[token] for token in seen.tokens) == f"system blue user {IMAGE} {IMAGE} which colour assistant"
    assert text.chat is None
    assert load_images([text.chat]) == ()
    assert [one is not None for one in load_images([text.chat, seen.chat])] == [False, True]


def test_mistakes_name_the_row(model: Path, tmp_path: Path) -> None:
    save_pictures(tmp_path)
    for row, message in [
        ({"messages": question()}, r"line 2: \"messages\" has more parts .* than \"images\" has entries, 0"),
        ({"messages": question(path="red.png"), "images": ["red.png"]}, r"line 2: \"images\" has more entries than"),
        (
            {"messages": question(path="pink.png")},
            r"line 2: the image 'pink.png' cannot be read \(ValueError\); give a",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            read(tmp_path, model, {"messages": "which"}, row)
    # The template of this model has no tools, as those of many models that see.
    tool = {"type": "function", "function": {"name": "zoom", "parameters": {}}}
    answer = {"role": "assistant", "content": "blue"}
    for row, message in [
        ({"messages": question(path="red.png"), "tools": [tool]}, "leaves out the name of the tool zoom, so the model"),
        ({"messages": [*question(path="red.png"), answer]}, 'the last message is of the role "assistant"'),
    ]:
        with pytest.raises(ValueError, match=f"line 1: .*{message}"):
            read(tmp_path, model, row)
    (tmp_path / "blind").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "blind" / name).write_bytes((model / name).read_bytes())
    (tmp_path / "blind" / "config.json").write_text(json.dumps({"vocab_size": len(WORDS), "model_type": "llama"}))
    with pytest.raises(ValueError, match=r"line 1: messages with images need the processor of .*torchvision|has none"):
        read(tmp_path, tmp_path / "blind", {"messages": question(path="red.png")})
