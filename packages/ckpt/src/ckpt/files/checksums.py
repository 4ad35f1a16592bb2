"""Record the checksum, dtype and shape of every tensor in the header of its file.

The metadata entry `ckpt.checksums` is a JSON object: tensor name -> "CRC DTYPE SHAPE", such as "1c291ca3 BF16 32x48",
with the CRC-32 of the tensor's bytes in 8 hexadecimal digits. A save lays the entry out with zeros before it
writes the data, and then fills in the checksums of the bytes in the file; the entry keeps its length. `read_header`
compares names, dtypes and shapes with the entry; `ckpt.files.tensor_bytes` compares the bytes on request.
"""

import json
import re
from collections.abc import Mapping

import torch

from ckpt.files.dtypes import dtype_name
from ckpt.layout.pieces import Shape

KEY = "ckpt.checksums"
_UNKNOWN = "0" * 8
_ENTRY = re.compile(r"([0-9a-f]{8}) (.*)")


def checksum_entry(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], sums: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the metadata entry for a file's tensors; without `sums`, a placeholder of the same length."""
    texts = {name: f"{_UNKNOWN if sums is None else sums[name]} {_kind(*kind)}" for name, kind in tensors.items()}
    return {KEY: json.dumps(texts, separators=(",", ":"), sort_keys=True)}


def read_checksums(
    path: str, metadata: Mapping[str, str], tensors: Mapping[str, tuple[torch.dtype, Shape]]
) -> dict[str, str]:
    """Return the recorded checksums of a file by tensor name; an empty mapping where the file has no record.

    Raises:
        ValueError: The entry is malformed, or its tensors, dtypes or shapes are not the file's; names the first.
    """
    if KEY not in metadata:
        return {}
    try:
        entry = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {KEY} in its metadata is no map of names to checksums; restore the file from a copy")
    sums: dict[str, str] = {}
    for name in {**tensors, **entry}:
        found = _ENTRY.fullmatch(str(entry.get(name)))
        held = _kind(*tensors[name]) if name in tensors else "not there"
        if found is None or found[2] != held:
            raise ValueError(
                f"{path}: tensor {name!r} is {held}, its recorded checksum {entry.get(name, 'is missing')!r:.200}; the "
                "header is damaged: restore the file from a copy"
            )
        sums[name] = found[1]
    return sums


def _kind(dtype: torch.dtype, shape: Shape) -> str:
    return f"{dtype_name(dtype)} {'x'.join(map(str, shape))}"
