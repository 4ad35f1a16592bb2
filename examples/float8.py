"""Train with products in FP8, on one GPU: the time of a step, and how far log-probs are from those in bf16.

    python examples/float8.py

A model of the shape of Llama 3.2 1B with random weights takes ten steps on the same batch, in bf16 and with two
recipes of FP8. The recipes need an Ada or Hopper GPU or newer ("block": Hopper) and Transformer Engine
(`pip install './packages/parallel-layers[te]'`). Without these the program says what is missing.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from parallel_layers.linear import why_not_float8
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses

TOKENS, LENGTH, STEPS = 16384, 2048, 10


def make_model(path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.LossTerms(-inputs.log_probs)


# --8<-- [start:measure]
def learn(checkpoint: Path, batch: Batch, float8: str | None) -> tuple[Tensor, list[float], float]:
    """Return the log-probs before learning, the loss of each step, and the milliseconds of the last step."""
    optimizer = OptimizerOptions(learning_rate=1e-4)
    actor = Actor.from_pretrained(checkpoint, optimizer=optimizer, float8=float8, max_tokens_per_micro_batch=TOKENS)
    before = actor.log_probs(batch).log_probs
    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        found.append(actor.update(batch, loss)["loss"])
        torch.cuda.synchronize()
    return before, found, (time.perf_counter() - begun) * 1e3


# --8<-- [end:measure]


def main(checkpoint: Path) -> None:
    make_model(checkpoint)
    sequences = torch.randint(128256, (TOKENS // LENGTH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_sequences(list(sequences), device="cuda")
    rows = {float8 or "bf16": learn(checkpoint, batch, float8) for float8 in (None, "current", "block")}
    expected = rows["bf16"][0]
    print("            ms   loss of the first and the last step   mean difference of a log-prob from bf16")
    for name, (log_probs, found, ms) in rows.items():
        difference = (log_probs - expected).abs().mean()
        print(f"{name:8}{ms:6.0f}   {found[0]:6.3f}  {found[-1]:6.3f}   {difference:.4f}")


if __name__ == "__main__":
    # --8<-- [start:missing]
    if not torch.cuda.is_available():
        sys.exit("FP8 needs an NVIDIA GPU, and torch finds none here; nothing was run")
    for recipe in ("current", "block"):
        if (reason := why_not_float8(recipe)) is not None:
            sys.exit(f'float8="{recipe}" cannot be used here: {reason}; nothing was run')
    # --8<-- [end:missing]
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
