"""The root README's examples run as printed."""

import re
import runpy
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rl_models.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_examples_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    for number, example in enumerate(examples):
        program = tmp_path / f"example_{number}.py"
        program.write_text(example)
        runpy.run_path(str(program), run_name="__main__")


@pytest.mark.parametrize(("language", "columns"), [("bash", 46), ("python", 80)])
def test_the_code_of_the_first_page_fits_a_phone(language: str, columns: int) -> None:
    """GitHub cuts longer lines of commands, and shows little of longer programs."""
    code = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert code
    assert [line for block in code for line in block.splitlines() if len(line) > columns] == []


def test_the_table_of_options_says_what_each_backend_lacks() -> None:
    text = (ROOT / "docs" / "rl-models.md").read_text()
    header, _, *rows = re.findall(r"^\|(.*)\|$", text.partition("### Options that save")[2], re.MULTILINE)
    backends = re.findall(r"`(\w+)`", header)
    assert sorted(backends) == sorted(BACKENDS)
    assert len(rows) >= 5
    for row in rows:
        name, *cells = (cell.strip() for cell in row.split("|"))
        for backend, cell in zip(backends, cells, strict=True):
            reason = BACKENDS[backend].lacks.get(name.strip("`"))
            assert cell == f"no: {reason}" if reason else cell.startswith("yes"), f"{name} of {backend}: {cell}"
