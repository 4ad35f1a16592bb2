"""Small chat templates that end answers, and show tools, as the templates of some families of models do."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}"

# Qwen: the end of an answer is followed by a line break.
CHATML = (
    _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _BEGIN
    + "<|im_start|>assistant\n{% endif %}"
)
# SmolLM2, Llama 3 and Phi-3.5: nothing of tools, or of their results.
NO_TOOLS = CHATML.removeprefix(_TOOLS)
NO_RESULTS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
# gpt-oss: the last answer of a chat ends otherwise than the answers before it; a result must follow a call.
GPT_OSS = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ m.name }}<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endif %}{% endfor %}" + _BEGIN + "<|start|>assistant{% endif %}"
)
# Cohere 2: two tokens end an answer.
COHERE = (
    "{% for m in messages %}<|START|>{% if m.role == 'assistant' %}"
    "<|BOT|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}<|USER|>{{ m.content }}{% endif %}<|END_OF_TURN|>{% endfor %}"
    + _BEGIN
    + "<|START|><|BOT|><|START_RESPONSE|>{% endif %}"
)
# GLM-4.5: no token ends an answer; the model draws the beginning of the next message.
GLM = (
    _TOOLS
    + "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Nemotron: an answer ends only where a message of a user follows.
NEMOTRON = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if not loop.first %}\n<end>\n{% endif %}<user>\n"
    "{% else %}<bot>\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<bot>\n{% endif %}"
)
# Qwen 3: the thoughts of answers before the last message of the user are dropped.
THINKING = (
    _TOOLS + "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.user %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + _BEGIN + "<|im_start|>assistant\n{% endif %}"
)
# Mistral: results have ids of nine letters and digits, and follow calls with such ids.
MISTRAL = (
    "{{ bos_token }}" + _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('id') }}"
    "{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)

_SPECIAL = re.compile(
    r"<\|\w+>|<\w+\|>|<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</?s>|<end>|<user>|<bot>|\[/?[A-Z_]{3,}\]|<\w+_of_\w+>"
)


def save_tokenizer(folder: Path, template: str, *more: str, merges: Sequence[tuple[str, str]] = ()) -> None:
    """Save a tokenizer of bytes with a chat template, and of its special tokens and `more` one id each.

    Each of `merges`, two letters, is a token as well.
    """
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(["<s>", "</s>", *more, *_SPECIAL.findall(template)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(letters) + len(special)}))


# Templates that show contents as parts alone, and are refused for texts.
OF_PARTS = {f"{name}{form}" for name in ("idefics3", "llava_next", "smolvlm") for form in ("", "_training")}


def installed_templates() -> list[Any]:
    """Return the templates of packages that ship some, where they are installed, as parameters of a test."""
    specs = map(importlib.util.find_spec, ("trl", "axolotl", "vllm", "llama_cpp"))
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.jinja"))
    return [pytest.param(file, id=f"{file.parent.parent.name}-{file.stem}") for file in files] or [
        pytest.param(Path("none"), marks=pytest.mark.skip(reason="no package has templates"))
    ]
