"""Source code names the type of GPU in kernels and in one place of each package; prose and docstrings may name CUDA."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The place of each package; the stand-ins of megatron-utils replace torch's functions by name.
PLACES = {
    "ckpt": ("ckpt/device.py",),
    "megatron-utils": ("megatron_utils/random_streams.py", "megatron_utils/testing/cpu.py"),
    "parallel-layers": ("parallel_layers/device/", "parallel_layers/kernels/"),
}
FOREIGN = {"flash_attn_2_cuda"}  # a module of flash-attn
PACKAGES = sorted(folder.name for folder in (ROOT / "packages").iterdir())


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each name, attribute, parameter and string that is no prose."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                yield line, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield line, text
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((line, f"{getattr(node, 'module', '')}.{name.name}.{name.asname}") for name in names)
            case ast.Constant(value=str(text)) if " " not in text.strip():
                yield line, text


def test_a_name_of_each_kind_is_seen() -> None:
    text = '"""CUDA in prose."""\nimport torch.cuda\nx.is_cuda\ncuda\nf(cuda=1)\ndef on_cuda(cuda): "cuda:0"\n'
    assert [line for line, word in words(ast.parse(text)) if "cuda" in word.lower()] == [2, 6, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("package", PACKAGES)
def test_only_its_place_names_the_type_of_gpu(package: str) -> None:
    source = ROOT / "packages" / package / "src"
    places = PLACES.get(package, ())
    for place in places:
        assert (source / place).exists(), place
    hits = [
        f"{file.relative_to(source)}:{line}: {word}"
        for file in sorted(source.rglob("*.py"))
        if not file.relative_to(source).as_posix().startswith(places or ("-",))
        for line, word in words(ast.parse(file.read_text()))
        if "cuda" in word.lower() and word not in FOREIGN
    ]
    assert not hits, "use parallel_layers.device, or a function of the package's place: " + ", ".join(hits)
