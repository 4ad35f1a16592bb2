from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt.files.header import build_header, read_header

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


def test_metadata_may_be_null(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "x.safetensors", {"__metadata__": None, **GOOD}))
    assert ([*header.tensors], header.checksums) == (["a"], {})


def test_the_library_reads_what_is_built(tmp_path: Path) -> None:
    layout = {"odd": (torch.bfloat16, (3,)), "wide": (torch.float64, (2,)), "scalar": (torch.float32, ())}
    prefix, infos, size = build_header(layout)
    (tmp_path / "x.safetensors").write_bytes(prefix + bytes(size - len(prefix)))
    assert all(info.offset % info.dtype.itemsize == 0 for info in infos.values())
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {name: tuple(file.get_tensor(name).shape) for name in layout} == {k: v[1] for k, v in layout.items()}
    assert read_header(tmp_path / "x.safetensors").tensors == infos


LIES: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "invalid JSON"),
    "not utf-8": (b'{"\xff": 1}', "invalid UTF-8"),
    "an array": ([], "invalid type: sequence"),
    "deep": (b"[" * 100_000, "invalid JSON"),
    "duplicate key": (
        json.dumps(GOOD)[:-1].encode() + b', "a": ' + json.dumps(GOOD["a"]).encode() + b"}",
        "'a' appears",
    ),
    "metadata": ({"__metadata__": {"a": 1}}, "expected a string"),
    "fields": ({"a": {"dtype": "F32", "shape": [2, 3]}}, "missing field `data_offsets`"),
    "dtype": ({"a": {**GOOD["a"], "dtype": "F31"}}, "F31"),
    "a dtype that torch lacks": ({"a": {"dtype": "F4", "shape": [48], "data_offsets": [0, 24]}}, "'a' has dtype 'F4'"),
    "negative size": ({"a": {**GOOD["a"], "shape": [-2, -3]}}, "integer `-2`"),
    "boolean size": ({"a": {**GOOD["a"], "shape": [True, 6]}}, "boolean `true`"),
    "overflow": ({"a": {**GOOD["a"], "shape": [2**40, 2**40]}}, "overflow"),
    "huge number": (
        b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 24]}}',
        "out of range",
    ),
    "wrong length": ({"a": {**GOOD["a"], "data_offsets": [0, 20]}}, "invalid shape, data type, or offset"),
    "backwards": ({"a": {**GOOD["a"], "data_offsets": [24, 0]}}, "invalid offset for tensor `a`"),
    "out of range": ({"a": {**GOOD["a"], "data_offsets": [8, 32]}}, "invalid offset for tensor `a`"),
    "overlap": ({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}}, "tensor `b`"),
    "too much data": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "not fully covered"),
    "truncated": ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, "is damaged or truncated"),
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
    with pytest.raises(ValueError, match="truncated"):
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


JSON = st.dictionaries(st.text(max_size=5), entries | json_values, max_size=4).map(
    lambda value: json.dumps(value).encode()
)


@st.composite
def changed_headers(draw: st.DrawFn) -> bytes:
    """A good header of 32 bytes of data with some bytes changed."""
    raw = bytearray(json.dumps({**GOOD, "b": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]}}).encode())
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@settings(max_examples=300 if "--slow" in sys.argv else 100)
@given(JSON | st.binary(max_size=200) | changed_headers(), st.integers(0, 64) | st.just(32))
def test_any_header_is_accepted_consistently_or_refused(raw: bytes, data: int) -> None:
    """Either a ValueError, or tensors that tile the data exactly."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            header = read_header(write(Path(folder) / "x.safetensors", raw, data))
        except ValueError:
            return
        finally:
            assert time.monotonic() - start < 5
    assert sum(info.nbytes for info in header.tensors.values()) == data
    end = 8 + len(raw)
    for info in header.tensors.values():
        assert info.offset == end
        end += info.nbytes
