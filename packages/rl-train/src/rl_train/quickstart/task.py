"""The task of the quickstart, its tokenizer, and the checkpoint that it starts from.

The task: continue the alphabet. The prompt is one letter; every letter of the response that follows its
predecessor (z is followed by a) earns an equal part of a reward of 1. An untrained model earns about 1/26.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LETTERS = string.ascii_lowercase
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = (*SPECIALS, *LETTERS)
SUCCESSORS = dict(zip(LETTERS, LETTERS[1:] + LETTERS[0], strict=True))
RESPONSE_LENGTH = 8

# A Llama of 2 layers; 4 query heads share 2 key-value heads, so that tp 2 divides both.
MODEL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": VOCABULARY.index("<pad>"),
    "bos_token_id": VOCABULARY.index("<s>"),
    "eos_token_id": VOCABULARY.index("</s>"),
    "tie_word_embeddings": False,
}


def make_checkpoint(path: Path, seed: int) -> None:
    """Save a Llama with random weights, and a tokenizer with one token a letter, as transformers does."""
    # torch and transformers take seconds to import, and the process of the reward needs neither.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    torch.set_rng_state(state)
    logging.disable_progress_bar()
    # In a process group transformers saves on rank 0 alone; here every rank may have a separate folder.
    model.__dict__["should_save_on_this_rank"] = lambda is_main_process: True
    model.save_pretrained(path)
    _save_tokenizer(path)


def _save_tokenizer(path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    tokens = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(path)


def write_prompts(path: Path) -> None:
    """Write one prompt for each letter, as JSON lines."""
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in LETTERS), encoding="utf-8")


def reward(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """Return the number of letters that follow their predecessor, divided by `RESPONSE_LENGTH`."""
    pairs = itertools.pairwise(prompt[-1:] + response)
    return sum(SUCCESSORS.get(before) == letter for before, letter in pairs) / RESPONSE_LENGTH
