"""Images of prompts: the processor of a model's folder turns a chat with images into token ids and pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.files import Store
from rl_train.data.chat import ChatTemplate
from rl_train.data.sources import exists, opened

if TYPE_CHECKING:
    from rl_models import VisualInputs

# The kinds of parts of a message that a model sees, and the column of a row that holds those without a source.
_KINDS = {"image": "images", "video": "videos"}
_ADDRESSES, _LONGEST_NAME = ("http://", "https://", "data:"), 1024
_SOURCES = ("image", "video", "path", "url", "base64")


def is_seen(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether a chat has images or videos."""
    return any(True for _ in _parts(messages))


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from (
                block for block in message["content"] if isinstance(block, Mapping) and block.get("type") in _KINDS
            )


@dataclass(frozen=True)
class ImageChat:
    """A chat with images or videos, each with its source; `process` computes the pixels.

    Attributes:
        model: The checkpoint folder with the processor and the chat template.
        messages: The messages; a part `{"type": "image", "image": ...}` holds a path, an address or a PIL image.
        tools: The JSON schemas of functions that the template offers to the model.
    """

    model: Path
    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None

    @classmethod
    def of(
        cls, model: Path, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], base: Path, tools: Any
    ) -> ImageChat:
        """Return a chat whose images come from its parts, and for parts without a source from a column of the row.

        A part is `{"type": "image"}` with "image", "path", "url" or "base64"; videos alike. A part without one of these
        takes the next entry of the row's "images". Relative paths begin at the folder or URL `base`.
        """
        entries = {kind: list(row.get(column) or []) for kind, column in _KINDS.items()}
        num_entries = {kind: len(sources) for kind, sources in entries.items()}

        def with_source(block: Any) -> Any:
            if not isinstance(block, Mapping):
                return block
            # In Parquet each part has all keys, some null; templates test which keys exist.
            block = {name: value for name, value in block.items() if value is not None}
            if (kind := block.get("type")) not in _KINDS:
                return block
            source = next((block[name] for name in _SOURCES if name in block), None)
            if source is None:
                if not entries[kind]:
                    raise ValueError(
                        f'"messages" has more parts {{"type": "{kind}"}} than "{_KINDS[kind]}" has entries, '
                        f'{num_entries[kind]}; give each part a "path", or an entry'
                    )
                source = entries[kind].pop(0)
            return {"type": kind, kind: _opened(source, base)}

        sourced_messages = [
            dict(message) | {"content": [with_source(block) for block in message["content"]]}
            if isinstance(message.get("content"), list)
            else dict(message)
            for message in messages
        ]
        if unused_columns := [_KINDS[kind] for kind, sources in entries.items() if sources]:
            raise ValueError(f'"{unused_columns[0]}" has more entries than "messages" has parts of its kind')
        return cls(model, sourced_messages, list(tools) if tools else None)

    def check(self) -> None:
        """Raise ValueError if the processor's template leaves out a part of the chat; see `ChatTemplate.check`."""
        _template(self.model).check(self.messages, self.tools)

    @property
    def has_videos(self) -> bool:
        """Say whether a message has a video."""
        return any(block["type"] == "video" for block in _parts(self.messages))

    def process(self) -> tuple[list[int], VisualInputs]:
        """Return the token ids `[L]` of the chat and of the beginning of the answer, and the images."""
        from rl_models import VisualInputs  # imports torch

        processor = _processor(self.model)
        messages = [
            message | {"content": [_loaded(block) for block in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in self.messages
        ]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        try:
            inputs = dict(processor.apply_chat_template(messages, tools=self.tools, **options))
        except Exception as error:  # a template raises what its author chose, and a broken image what PIL raises
            raise ValueError(f"the processor refuses the messages: {type(error).__name__}: {error}") from None
        ids = inputs["input_ids"][0]
        if inputs.get("mm_token_type_ids") is None:
            image, video = (getattr(processor, f"{kind}_token_id", None) for kind in _KINDS)
            inputs["mm_token_type_ids"] = (ids == image).int() + 2 * (ids == video).int()
        visual = VisualInputs.from_processor(inputs)
        if visual is None:
            raise ValueError("the processor returned no images for messages with images")
        images = tuple(block["image"] for block in _parts(messages) if block["type"] == "image")
        return ids.tolist(), replace(visual, images=images)


def load_images(chats: Sequence[ImageChat | None]) -> tuple[VisualInputs | None, ...]:
    """Return the images of each chat, computed by several threads; empty if no chat has any."""
    if not any(chats):
        return ()
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(lambda chat: None if chat is None else chat.process()[1], chats))


def _opened(source: Any, base: Path) -> Any:
    """Return a source with its path completed by `base`; a row of `datasets` in Parquet holds bytes."""
    if isinstance(source, Mapping):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, str) and not source.startswith(_ADDRESSES):
        file = Path(source) if Store.of(source) else base / source
        if (store := Store.of(file)) is not None and len(source) <= _LONGEST_NAME:  # a longer text is base64
            return store.url if exists(file) else source
        if store is None and file.is_file():
            return str(file)
    return source


def _loaded(block: Any) -> Any:
    """Return a part with its image loaded in RGB."""
    if not isinstance(block, Mapping) or block.get("type") != "image":
        return block
    from PIL import Image  # needed for images alone
    from transformers.image_utils import load_image

    source = block["image"]
    try:
        if isinstance(source, str) and not source.startswith(_ADDRESSES) and Store.of(source):
            with opened(Path(source)) as file:
                source = file.read()
        return {**block, "image": load_image(Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source)}
    except Exception as error:  # the file, its format, the network or the address is at fault
        raise ValueError(
            f"the image {source!r:.80} cannot be read ({type(error).__name__}); give a file, whose relative path "
            "begins at the folder of the prompts, a URL of a store, an http address, base64 or a PIL image"
        ) from None


@cache
def _template(model: Path) -> ChatTemplate:
    return ChatTemplate(_processor(model))


@cache
def _processor(model: Path) -> Any:
    from transformers import AutoProcessor  # takes seconds, and only images need it

    try:
        processor = AutoProcessor.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(
            f"messages with images need the processor of {model}, which cannot be loaded: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; give the folder of a vision-language model with its "
            "preprocessor_config.json, and pip install pillow torchvision"
        ) from None
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"messages with images need an image processor, and {model} has none; take another model")
    return processor
