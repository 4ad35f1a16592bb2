"""A tiny model that sees, with a processor that needs no torchvision, and pictures of one colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration as Qwen2VL,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
WORDS = ["<pad>", IMAGE, VIDEO, "<end>", "user", "assistant", "system", "which", "colour", *COLOURS]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image_pad|> {% else %}{{ part.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
_TEXT: dict[str, Any] = {
    **{"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
_TOWER = {
    **{"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    **{"patch_size": 4, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2},
}


class PictureProcessor(ProcessorMixin):
    """The processor of Qwen2-VL without videos, whose processor needs torchvision."""

    return_mm_token_type_ids = True

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **more: Any
    ) -> None:
        self.image_token, self.video_token = IMAGE, VIDEO
        self.image_token_id, self.video_token_id = WORDS.index(IMAGE), WORDS.index(VIDEO)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **more: Any) -> str:
        number = int(image_inputs["image_grid_thw"][image_idx].prod()) // self.image_processor.merge_size**2
        return " ".join([IMAGE] * number)


def save_model(folder: Path) -> Path:
    """Save the model with its processor."""
    AutoProcessor.register(Qwen2VLConfig, PictureProcessor, exist_ok=True)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([IMAGE, VIDEO, "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 256}
    processor = PictureProcessor(Qwen2VLImageProcessorPil(**patches), tokenizer, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    tokens = {"image_token_id": WORDS.index(IMAGE), "video_token_id": WORDS.index(VIDEO)}
    ends = {"bos_token_id": None, "eos_token_id": WORDS.index("<end>"), "pad_token_id": 0}
    config = Qwen2VLConfig(text_config=_TEXT | ends, vision_config=_TOWER, **tokens, **ends)
    Qwen2VL(config).save_pretrained(folder)
    return folder


def save_pictures(folder: Path, size: tuple[int, int] = (8, 8)) -> dict[str, Path]:
    """Save a picture of each colour, and return their files."""
    files = {colour: folder / f"{colour}.png" for colour in COLOURS}
    for colour, file in files.items():
        Image.new("RGB", size, COLOURS[colour]).save(file)
    return files


def question(**source: Any) -> list[dict[str, Any]]:
    """Return the messages that ask for the colour of an image."""
    return [{"role": "user", "content": [{"type": "image", **source}, {"type": "text", "text": "which colour"}]}]
