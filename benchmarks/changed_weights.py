"""The share of bf16 weights that an AdamW step changes: what a transfer of changed values alone would send.

    python benchmarks/changed_weights.py [--steps 50] [--hidden 512] [--layers 8] [--mb 512]

A random Llama learns by REINFORCE on its own samples with random advantages. The masters are fp32, the weights that an
engine gets are their bf16 roundings. Printed for each learning rate: the share of changed values, and of blocks of 64
and 4096 values with a change, in the last step; and the bytes of values with 4-byte indices, relative to a full copy.

Then the seconds of a weight sync in which a rank sends `--mb` of its own shard, whole or as changed values with 4-byte
indices in a bucket (`--rollouts.changed-weights`). The rank compares each bucket with the last version in (page-locked)
host memory, and brings that up to date; the receiver writes into its parameters in place. Both are measured here, on
the GPU where there is one; the time of the network is bytes over its speed, and nothing overlaps. `pays below` is the
speed of a network at which both weight syncs take equally long.
"""

import argparse
import time
from collections.abc import Callable

import torch
from measure import CUDA, DEVICE, machine, synchronize, table
from transformers import LlamaConfig, LlamaForCausalLM

from rl_train.weight_sync import BUCKET_BYTES, changes_since


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


def seconds(function: Callable[[], object]) -> float:
    """Return the least of three times, after a first call."""
    times = []
    for _ in range(4):
        synchronize()
        began = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def transfers(share: float, megabytes: int) -> tuple[float, float, float]:
    """Return the seconds to pack a whole shard, to find its changed values, and to write these at the receiver."""
    new = torch.randn(megabytes * 2**19, device=DEVICE).bfloat16()
    bucket = BUCKET_BYTES // 2 if DEVICE.type == "cpu" else 2**27
    sent = torch.where(torch.rand(len(new), device=DEVICE) < share, new + 1, new).cpu()
    sent = sent.pin_memory() if CUDA else sent
    before, ring, received = sent.clone(), torch.empty_like(new[:bucket]), torch.empty_like(new)
    changes: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def pack() -> None:
        for part in new.split(bucket):
            ring[: len(part)].copy_(part)

    def find() -> None:
        changes.clear()
        changes.extend(
            changes_since(last, part) for part, last in zip(new.split(bucket), sent.split(bucket), strict=True)
        )

    def write() -> None:
        for part, (places, values) in zip(received.split(bucket), changes, strict=True):
            if places is None:
                part.copy_(values)
            else:
                part.index_put_((places.long(),), values)

    finding = []
    for _ in range(3):
        sent.copy_(before)  # the next step's changes
        synchronize()
        began = time.perf_counter()
        find()
        synchronize()
        finding.append(time.perf_counter() - began)
    return seconds(pack), min(finding), seconds(write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 50), ("hidden", 512), ("layers", 8), ("mb", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("learning rate   values   blocks of 64   blocks of 4096   values and indices / full copy")
    found = []
    for rate in (1e-7, 1e-6, 1e-5, 1e-4):
        values, few, many = shares(rate, options.steps, options.hidden, options.layers)
        found.append((rate, values))
        print(f"{rate:13.0e}{values:9.2%}{few:15.2%}{many:17.2%}{3 * values:33.3f}", flush=True)
    speeds = (1, 2, 5, 10, 25, 50)
    rows = []
    for rate, share in found:
        pack, find, write = transfers(share, options.mb)
        size, longer, part = options.mb * 2**20 / 1e9, find + write - pack, min(1.0, 3 * share)
        totals = [f"{pack + size / speed:.2f} / {find + part * size / speed + write:.2f}" for speed in speeds]
        pays = size * (1 - part) / longer if longer > 0 else float("inf")
        rows.append((f"{rate:.0e}", pack, find, write, *totals, pays))
    print(machine(), f"{options.mb} MB; seconds, whole / changed at a network's GB/s")
    print(table(("learning rate", "pack", "find", "write", *(f"{speed} GB/s" for speed in speeds), "pays below"), rows))


if __name__ == "__main__":
    main()
