"""The share of bf16 weights that an AdamW step changes: what a transfer of changed values alone would send.

    python benchmarks/changed_weights.py [--steps 50] [--hidden 512] [--layers 8] [--mb 512]

A random Llama learns by REINFORCE on its own samples with random advantages. The masters are fp32, the weights that an
engine gets are their bf16 roundings. Printed for each learning rate: the share of changed values, and of blocks of 64
and 4096 values with a change, in the last step; and the bytes of values with 4-byte indices, relative to a full copy.

Then the seconds of two weight syncs of `--mb` of bf16 values between processes of this host, on the CPU: whole tensors,
as `rl_train.engines` copies them to buckets, and changed values; the network's own time is left out. A sender of
changed values compares with a copy of the last version, and the receiver writes into a copy of its own, whose whole
tensors the engine loads. With checksums both sides read the whole version once more. `pays below` is the speed of a
network at which both weight syncs take equally long.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_train.weight_sync import BUCKET_BYTES, checksum, in_buckets, unpack


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
    times = []
    for _ in range(4):  # the first call warms up
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def transfers(share: float, megabytes: int) -> list[float]:
    """Return the seconds of whole tensors and of changed values, without and with checksums, and the network's GB/s."""
    version = torch.randn(megabytes * 2**19).bfloat16()
    new = torch.where(torch.rand(len(version)) < share, version + 1, version)
    sender, receiver = version.clone(), version.clone()

    def whole(check: bool) -> None:
        parts = ((str(n), part) for n, part in enumerate(new.split(2**22)))
        for _ in unpack(in_buckets(parts, BUCKET_BYTES, check=check)):
            pass

    def changed(check: bool) -> None:
        indices = (new != sender).nonzero()[:, 0]
        where, values = indices.int(), new[indices]
        sender.index_copy_(0, indices, values)
        receiver.index_copy_(0, where.long(), values)
        if check and checksum(receiver) != checksum(new):
            raise ValueError("the receiver has other values")
        # Back to the last version, in place of the next step's changes; this takes as long as one of the two copies.
        sender.index_copy_(0, indices, version[indices])

    times = [seconds(partial(function, check)) for check in (False, True) for function in (whole, changed)]
    # A changed value takes 2 bytes and its index 4.
    saved, longer = new.nbytes * (1 - 3 * share), times[1] - times[0]
    return [*times, max(0.0, saved) / longer / 1e9 if longer > 0 else float("inf")]


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
    print(f"learning rate   seconds of {options.mb} MB: whole   changed   with checksums: whole   changed   pays below")
    for rate, values in found:
        whole, changed, checked, changed_checked, speed = transfers(values, options.mb)
        print(
            f"{rate:13.0e}{whole:32.3f}{changed:10.3f}{checked:24.3f}{changed_checked:10.3f}{speed:8.1f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
