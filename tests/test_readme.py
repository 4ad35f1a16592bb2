"""The root README's examples run as printed."""

import re
import runpy
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

README = Path(__file__).resolve().parent.parent / "README.md"


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
