"""What a checkpoint's folder holds, by name: what is written here, and what is copied from another checkpoint. A folder
with anything else in it is never replaced."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What makes a folder a sharded checkpoint (`ckpt.transfer.shards`).
LAYOUT = "layout.json"
# A training checkpoint's (`ckpt.training.checkpoint`): the run's facts, and which box of which tensor lies where.
STATE = "state.json"
METADATA = "metadata.json"

# What makes a folder a LoRA adapter (peft's).
ADAPTER = "adapter_config.json"

# What stands beside the weights and belongs to the tokenizer, the processor or generation; one of them is a folder.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "normalizer.json",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True)
class Kind:
    """A kind of folder: the names of which it has at least one, and all further ones."""

    marks: tuple[str, ...]
    others: tuple[str, ...]


# In the order in which they are tried: a Hugging Face checkpoint, a sharded one, one of a training run, and what comes
# before weights.
KINDS = (
    Kind((SINGLE, "model-*-of-*.safetensors"), (CONFIG, INDEX, *COMPANIONS)),
    Kind(("shard-*-of-*.safetensors",), (CONFIG, LAYOUT, *COMPANIONS)),
    Kind(("rank-*.safetensors",), (CONFIG, STATE, METADATA)),
    Kind((CONFIG,), COMPANIONS),
)
_KNOWN = tuple(pattern for kind in KINDS for pattern in (*kind.marks, *kind.others))


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder that is a LoRA adapter, or has one beside its weights, which transformers would apply to them.

    Raises:
        ValueError: names the file and how to merge the adapter into its model.
    """
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder / ADAPTER} says that {folder} is a LoRA adapter or has one beside its weights; merge it once, "
            "PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(OUT), and pass OUT; or move "
            "the adapter's files elsewhere to use the weights without it"
        )


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse a file, given its first bytes, that git-lfs has left in place of the file itself.

    Raises:
        ValueError: says how to get the file.
    """
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a git-lfs pointer, not the file that it stands for; run `git lfs pull` in its folder, or "
            "download the file"
        )


def matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """The files in a folder, and those in its folders that a pattern names, that match one of the patterns."""
    return [name for name in _names(folder, patterns) if _matches(name, patterns)]


def kind_of(folder: Path) -> Kind | None:
    """What kind a folder is of; None where it is no checkpoint."""
    names = list(_names(folder, ()))
    return next((kind for kind in KINDS if any(_matches(name, kind.marks) for name in names)), None)


def foreign(folder: Path, kind: Kind) -> list[str]:
    """What a folder has beside a checkpoint of its kind: files, and folders with a slash."""
    patterns = (*kind.marks, *kind.others)
    return [name for name in _names(folder, patterns) if not _matches(name, patterns)]


def entries(folder: Path) -> list[str]:
    """What a folder holds: files, what is in the folders that checkpoints have, and other folders with a slash."""
    return list(_names(folder, _KNOWN))


def is_known(name: str) -> bool:
    """Return whether an entry has the name of a file that some kind of checkpoint has."""
    return _matches(name, _KNOWN)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # A wildcard stands for no slash.
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _names(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    """The entries of a folder in order; in place of a folder that a pattern names, what it holds."""
    known = {pattern.partition("/")[0] for pattern in patterns if "/" in pattern}
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            yield entry.name
        elif entry.name in known:
            yield from (f"{entry.name}/{inner.name}{'/' * inner.is_dir()}" for inner in sorted(entry.iterdir()))
        else:
            yield f"{entry.name}/"
