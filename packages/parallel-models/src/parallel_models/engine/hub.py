"""Repositories of a hub such as huggingface.co, by name: models and data sets, in the cache of `huggingface_hub`.

The library reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import Literal

from torch.distributed import ProcessGroup

from ckpt import agree
from ckpt.files import Store
from ckpt.transfer import agree_on_first, all_gather_json, rank_in

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

# Everything of a checkpoint in safetensors. Subfolders and `consolidated` files repeat the weights in other formats.
_CHECKPOINT = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_COPIES = ("*/*", "consolidated*")


def is_name(path: str | os.PathLike[str]) -> bool:
    """Say whether a path has the form of a name and there is no such file or folder on this machine."""
    return _NAME.fullmatch(os.fspath(path)) is not None and not os.path.exists(path)


def located(path: str | os.PathLike[str], group: ProcessGroup | None = None, *, weights: bool = True) -> str:
    """Return a path as it is, and for the name of a checkpoint its folder in the cache.

    A name is `organisation/name` or `organisation/name@revision`, and not the path of a local file or folder; or the
    URL of a folder in a store that fsspec reaches, such as s3://bucket/folder. All ranks of `group` call this. The
    first rank chooses the commit; one rank of each host downloads it, and the others wait.

    Args:
        path: The path or the name.
        group: The ranks that call this together (default: this process alone).
        weights: Whether a download includes the weights.

    Raises:
        ValueError: As for `download`, or ranks give different names; on every rank.
    """
    name = os.fspath(path)
    answers = all_gather_json([name, is_name(name) or Store.of(name) is not None], group)
    if not any(on_hub for _, on_hub in answers):
        return name
    if len(names := sorted({answer for answer, _ in answers})) > 1:
        raise ValueError(f"ranks were given the models {', '.join(map(repr, names))}; give every rank the same name")
    files = [pattern for pattern in _CHECKPOINT if weights or pattern != "*.safetensors"]
    folder = agree_on_first(lambda: download(name, files, ignore=_COPIES), group)
    if group is None:
        return str(folder)
    commit, *_ = all_gather_json(folder and os.path.basename(folder), group)
    pinned = f"{name.partition('@')[0]}@{commit}" if Store.of(name) is None else name
    hosts = all_gather_json(socket.gethostname(), group)
    first_of_host = hosts.index(hosts[rank_in(group)]) == rank_in(group)
    agree(lambda: download(pinned, files, ignore=_COPIES) if first_of_host else None, group)
    return agree(lambda: download(pinned, files, ignore=_COPIES), group)


def download(
    name: str, files: Sequence[str], *, ignore: Sequence[str] = (), kind: Literal["model", "dataset"] = "model"
) -> str:
    """Return the folder of a repository in the local cache, and download files that the cache lacks.

    Args:
        name: `organisation/name`, or `organisation/name@revision` with a branch, a tag or a commit; or a URL.
        files, ignore: Patterns of the files to download, and of the files to leave out.
        kind: The kind of the repository.

    Raises:
        ValueError: The hub has no such repository, revision or files; it cannot be reached and the cache lacks files;
            or `huggingface_hub` is not installed.
    """
    if (store := Store.of(name)) is not None:
        return store.copied(files, ignore)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} must be organisation/name or organisation/name@revision")
    try:
        from huggingface_hub import constants, snapshot_download  # imported here: only names need it
    except ImportError:
        raise ValueError(
            f"{name!r} is no local folder, and names of a hub need huggingface_hub; pip install 'huggingface-hub>=1'"
        ) from None
    try:
        return snapshot_download(
            match["repository"],
            repo_type=kind,
            revision=match["revision"],
            allow_patterns=list(files),
            ignore_patterns=list(ignore) or None,
        )
    except Exception as error:  # of the network, the hub, the disk or the cache
        if constants.HF_HUB_OFFLINE:
            how = "HF_HUB_OFFLINE forbids the download"
        else:
            how = f"{constants.ENDPOINT} does not give it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"{name!r} is no local folder, the cache {constants.HF_HUB_CACHE} does not hold it, and {how}; check the "
            f"name, or download it where there is a network and give its folder"
        ) from None
