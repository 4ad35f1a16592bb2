"""The names of a checkpoint's files: files that saves write, and files that saves copy from another checkpoint.

A save never replaces a folder that holds any other file.
"""

import fnmatch
import os
from pathlib import Path

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The names of torch's pickled weights.
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# A folder with this file is a sharded checkpoint (`ckpt.transfer.sources`).
LAYOUT = "layout.json"
# The state of a training run, in a training checkpoint (`ckpt.training.checkpoint`).
STATE = "state.json"

# Files of Megatron-Core: the name of a run's latest step, the format of a step, and the folder of converted weights.
TRACKER, MEGATRON_FORMAT, RELEASE = "latest_checkpointed_iteration.txt", "metadata.json", "release"
# Entries of Megatron-Core's folders in the format before `torch_dist`, which cannot be read without running code.
_MEGATRON = (TRACKER, "mp_rank_*", "model_optim_rng.pt")

# A folder with this file is a LoRA adapter of peft.
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

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


# The files of a step of Megatron-Core. A save replaces a run of converted weights, and never a run with numbered steps,
# which Megatron may have trained.
_STEP = (".metadata", "__*.distcp", "common.pt", MEGATRON_FORMAT)
_RELEASE = tuple(f"{RELEASE}/{name}" for name in _STEP)
# The kinds of checkpoint folders, in the order in which they are tried: a Hugging Face checkpoint, a sharded
# checkpoint, a training checkpoint, a run of Megatron-Core, an adapter, and a configuration without weights. A folder
# of a kind has a file of the first patterns, and may have files of the other patterns.
KINDS = (
    ((SINGLE, "model-*-of-*.safetensors"), (CONFIG, INDEX, *COMPANIONS)),
    (("shard-*-of-*.safetensors",), (CONFIG, LAYOUT, *COMPANIONS)),
    (("rank-*.safetensors",), (CONFIG, STATE)),
    ((TRACKER,), (CONFIG, *_RELEASE, *COMPANIONS)),
    ((ADAPTER_WEIGHTS,), (ADAPTER, "README.md", *COMPANIONS)),
    ((CONFIG,), COMPANIONS),
)
_KNOWN = (
    *(pattern for marks, others in KINDS for pattern in (*marks, *others)),
    *(f"iter_*/{name}" for name in _STEP),
)
# The folders inside a checkpoint's folder.
_FOLDERS = tuple({pattern.partition("/")[0] for pattern in _KNOWN if "/" in pattern})


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is an adapter of PEFT, and holds no model beside it."""
    return (Path(path) / ADAPTER).is_file() and not (Path(path) / CONFIG).is_file()


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder that is a LoRA adapter, or has an adapter beside its weights, which transformers would apply."""
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{folder / ADAPTER} says that {folder} is a LoRA adapter or has one beside its weights; merge it once, "
            "`ckpt merge ADAPTER OUT --base MODEL`, and pass OUT; or move the adapter's files elsewhere to use the "
            "weights without it"
        )


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse a git-lfs pointer that stands in place of a file, given the first bytes."""
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
        )


def refuse_distributed(path: Path) -> None:
    """Refuse a run, a step or a file of Megatron-Core or of torch's DCP, with the way to a folder that ckpt reads."""
    names = os.listdir(path.parent if path.is_file() else path)
    entry = next((name for name in sorted(names) if any(fnmatch.fnmatch(name, pattern) for pattern in _MEGATRON)), None)
    if entry is not None:
        raise ValueError(
            f"{path} belongs to a checkpoint of Megatron-Core ({entry}) in the older format, which cannot be read "
            "without running code; save it with Megatron-LM's --ckpt-format torch_dist (or --ckpt-convert-format "
            "torch_dist), and pass that folder"
        )
    if "common.pt" in names:
        raise ValueError(
            f"{path} belongs to a step of Megatron-Core (common.pt) and is not complete; pass the step's folder, with "
            f"its .metadata and {MEGATRON_FORMAT}, or the run's folder"
        )
    if any(name.endswith(".distcp") for name in names):
        raise ValueError(
            f"{path} belongs to a checkpoint of torch's DCP (.distcp files), which ckpt does not read; write one file "
            "from it, torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER, 'pytorch_model.bin'), put "
            "the model's config.json beside the file, and run `ckpt convert` on that folder"
        )


def entries(folder: Path) -> list[str]:
    """Return a folder's files, the entries of folders that checkpoints have, and other folders with a slash."""
    names = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and matches(entry.name, _FOLDERS):
            names += [f"{entry.name}/{inner.name}{'/' * inner.is_dir()}" for inner in sorted(entry.iterdir())]
        else:
            names.append(entry.name + "/" * entry.is_dir())
    return names


def foreign(folder: Path) -> list[str] | None:
    """Return the entries of a folder that no checkpoint of its kind has; None where the folder is no checkpoint."""
    names = entries(folder)
    for marks, others in KINDS:
        if any(matches(name, marks) for name in names):
            return [name for name in names if not matches(name, (*marks, *others))]
    return None


def is_known(name: str) -> bool:
    """Return whether an entry has the name of a file that some kind of checkpoint has."""
    return matches(name, _KNOWN)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether an entry's name fits one of the patterns, in which a wildcard does not match a slash."""
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
