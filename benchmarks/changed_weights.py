"""The share of bf16 weights that an AdamW step changes: what a transfer of changed values alone would send.

    python benchmarks/changed_weights.py [--steps 50] [--hidden 512] [--layers 8]

A random Llama learns by REINFORCE on its own samples with random advantages. The masters are fp32, the weights that an
engine gets are their bf16 roundings. Printed for each learning rate: the share of changed values, and of blocks of 64
and 4096 values with a change, in the last step; and the bytes of values with 4-byte indices, relative to a full copy.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def shares(rate: float, steps: int, hidden: int, layers: int) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    before: list[torch.Tensor] = []
    for _ in range(steps):
        before = [parameter.detach().bfloat16() for parameter in model.parameters()]
        tokens = torch.randint(0, 4096, (8, 48))
        log_probs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-(torch.randn(8, 1) * log_probs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = [parameter.detach().bfloat16() for parameter in model.parameters()]
    changed = torch.cat([(a != b).flatten() for a, b in zip(before, after, strict=True)])
    blocks = [float(changed[: len(changed) // n * n].view(-1, n).any(1).float().mean()) for n in (64, 4096)]
    return [float(changed.float().mean()), *blocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 50), ("hidden", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("learning rate   values   blocks of 64   blocks of 4096   values and indices / full copy")
    for rate in (1e-7, 1e-6, 1e-5, 1e-4):
        values, few, many = shares(rate, options.steps, options.hidden, options.layers)
        print(f"{rate:13.0e}{values:9.2%}{few:15.2%}{many:17.2%}{3 * values:33.3f}", flush=True)


if __name__ == "__main__":
    main()
