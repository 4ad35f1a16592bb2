from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt.files.header import build_header, parse_header, read_header

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, entries: Any, data: int = 24, length: int | None = None) -> Path:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data))
    return path


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.tensor(2.0),
        "d": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert header.metadata == {"format": "pt"}


def test_the_library_reads_what_is_built(tmp_path: Path) -> None:
    layout = {"odd": (torch.bfloat16, (3,)), "wide": (torch.float64, (2,)), "scalar": (torch.float32, ())}
    prefix, infos, size = build_header(layout, {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(prefix + bytes(size - len(prefix)))
    assert all(info.offset % info.dtype.itemsize == 0 for info in infos.values())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {name: tuple(file.get_tensor(name).shape) for name in layout} == {k: v[1] for k, v in layout.items()}
    assert read_header(tmp_path / "x.safetensors").tensors == infos


LIES: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "not valid JSON"),
    "an array": ([], "not a JSON object"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "duplicate key": (b'{"a": {"dtype": "F32"}, "a": {}}', "'a' appears twice"),
    "metadata": ({"__metadata__": {"a": 1}}, "__metadata__"),
    "fields": ({"a": {"dtype": "F32", "shape": [2, 3]}}, "'a' must have"),
    "dtype": ({"a": {**GOOD["a"], "dtype": "F31"}}, "'F31'"),
    "negative size": ({"a": {**GOOD["a"], "shape": [-2, -3]}}, "shape"),
    "boolean size": ({"a": {**GOOD["a"], "shape": [True, 6]}}, "shape"),
    "overflow": ({"a": {**GOOD["a"], "shape": [2**40, 2**40]}}, "more elements"),
    "huge number": (b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 24]}}', "a"),
    "wrong length": ({"a": {**GOOD["a"], "data_offsets": [0, 20]}}, "needs 24 bytes"),
    "backwards": ({"a": {**GOOD["a"], "data_offsets": [24, 0]}}, "needs 24 bytes"),
    "out of range": ({"a": {**GOOD["a"], "data_offsets": [8, 32]}}, "hole"),
    "overlap": (
        {**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}},
        "'b' overlaps the tensor before it",
    ),
    "too much data": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "longer than its header says"),
    "truncated": ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, "truncated"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    entries, message = LIES[lie]
    path = write(tmp_path / "bad.safetensors", entries)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [0, 3, 2**63, 10**9])
def test_a_wrong_header_length_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        read_header(write(tmp_path / "bad.safetensors", GOOD, length=length))


def test_missing_and_tiny_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "tiny.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match="truncated: 4 bytes"):
        read_header(tmp_path / "tiny.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**65), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-8, 64) | st.integers(), min_size=1, max_size=3) | json_values,
    }
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=5), entries | json_values, max_size=4), st.integers(0, 200))
def test_any_json_is_accepted_consistently_or_refused(header: dict[str, Any], data: int) -> None:
    raw = json.dumps(header).encode()
    check(raw, data)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 64))
def test_any_bytes_are_accepted_consistently_or_refused(raw: bytes, data: int) -> None:
    check(raw, data)


@settings(max_examples=300)
@given(st.data())
def test_a_good_header_with_some_bytes_changed_is_accepted_consistently_or_refused(data: st.DataObject) -> None:
    raw = bytearray(json.dumps({**GOOD, "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]}}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(raw), 32)


def check(raw: bytes, data: int) -> None:
    """Either a ValueError, or tensors that tile the data exactly."""
    start = time.monotonic()
    size = 8 + len(raw) + data
    try:
        header = parse_header(raw, size, "file", 0)
    except ValueError:
        return
    finally:
        assert time.monotonic() - start < 5
    assert sum(info.nbytes for info in header.tensors.values()) == data
    assert all(8 + len(raw) <= info.offset <= info.offset + info.nbytes <= size for info in header.tensors.values())
