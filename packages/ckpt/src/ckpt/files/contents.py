"""The names of a checkpoint's files: those that saves write, and those that saves copy from another checkpoint.

A save never replaces a folder that holds any other file."""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A folder with this file is a sharded checkpoint (`ckpt.transfer.shards`).
LAYOUT = "layout.json"
# A training checkpoint's files (`ckpt.training.checkpoint`): the run's state, and where each box of a tensor lies.
STATE = "state.json"
METADATA = "metadata.json"

# A folder with this file is a LoRA adapter of peft.
ADAPTER = "adapter_config.json"

# Files beside the weights, of the tokenizer, the processor or generation; one pattern names a folder.
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
    """A kind of checkpoint folder: it has a file of `marks`, and may have files of `others`."""

    marks: tuple[str, ...]
    others: tuple[str, ...]


# The kinds in the order in which they are tried: a Hugging Face checkpoint, a sharded one, a training checkpoint, and a
# folder that has a configuration but no weights yet.
KINDS = (
    Kind((SINGLE, "model-*-of-*.safetensors"), (CONFIG, INDEX, *COMPANIONS)),
    Kind(("shard-*-of-*.safetensors",), (CONFIG, LAYOUT, *COMPANIONS)),
    Kind(("rank-*.safetensors",), (CONFIG, STATE, METADATA)),
    Kind((CONFIG,), COMPANIONS),
)
_KNOWN = tuple(pattern for kind in KINDS for pattern in (*kind.marks, *kind.others))


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder that is a LoRA adapter, or has an adapter beside its weights, which transformers would apply.

    Raises:
        ValueError: Names the file and how to merge the adapter into its model.
    """
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder / ADAPTER} says that {folder} is a LoRA adapter or has one beside its weights; merge it once, "
            "PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(OUT), and pass OUT; or move "
            "the adapter's files elsewhere to use the weights without it"
        )


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse a git-lfs pointer that stands in place of a file, given the first bytes.

    Raises:
        ValueError: Says how to get the file.
    """
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
        )


def matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Return the files in a folder, and those in its folders that a pattern names, that match one of the patterns."""
    return [name for name in _names(folder, patterns) if _matches(name, patterns)]


def kind_of(folder: Path) -> Kind | None:
    """Return a folder's kind; None where the folder is no checkpoint."""
    names = list(_names(folder, ()))
    return next((kind for kind in KINDS if any(_matches(name, kind.marks) for name in names)), None)


def foreign(folder: Path, kind: Kind) -> list[str]:
    """Return the entries of a folder that no checkpoint of this kind has; folders end in a slash."""
    patterns = (*kind.marks, *kind.others)
    return [name for name in _names(folder, patterns) if not _matches(name, patterns)]


def entries(folder: Path) -> list[str]:
    """Return a folder's files, the entries of folders that checkpoints have, and other folders with a slash."""
    return list(_names(folder, _KNOWN))


def is_known(name: str) -> bool:
    """Return whether an entry has the name of a file that some kind of checkpoint has."""
    return _matches(name, _KNOWN)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # A wildcard does not match a slash.
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _names(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield the entries of a folder in order; a folder that a pattern names is replaced by its entries."""
    known = {pattern.partition("/")[0] for pattern in patterns if "/" in pattern}
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            yield entry.name
        elif entry.name in known:
            yield from (f"{entry.name}/{inner.name}{'/' * inner.is_dir()}" for inner in sorted(entry.iterdir()))
        else:
            yield f"{entry.name}/"
