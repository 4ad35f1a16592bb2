"""The root README's examples run as printed."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

README = Path(__file__).resolve().parent.parent / "README.md"


def test_examples_run_as_printed(tmp_path: Path) -> None:
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

    def run(number: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / f"example_{number}.py").write_text(examples[number])
        command = [sys.executable, f"example_{number}.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    # Two at a time: most of what they do is import.
    with ThreadPoolExecutor(2) as pool:
        for example, result in zip(examples, pool.map(run, range(len(examples))), strict=True):
            assert result.returncode == 0, example + result.stderr
