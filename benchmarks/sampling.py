"""Draw a token of each sequence: `parallel_layers.inference.sampling.sample` with and without truncation, beside torch.

    python benchmarks/sampling.py                  # 256 and 512 rows of 128256 fp32 logits
    python benchmarks/sampling.py --tiny           # to see that it works, on a CPU too

torch's form sorts the logits for top-p and takes `topk` for top-k. The floor reads the logits once at the rate of a
device-to-device copy.
"""

import argparse
from functools import partial

import torch
from measure import DEVICE, ceilings, machine, side_by_side, table, write_json

from parallel_layers.inference import sample, truncate

TRUNCATIONS = {
    "all tokens": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}


def with_torch(logits: torch.Tensor, uniforms: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw with torch's functions alone."""
    log_probs = logits.log_softmax(dim=-1)
    passed = truncate(log_probs, **options).exp().cumsum(dim=-1)
    tokens = torch.searchsorted(passed, uniforms[:, None] * passed[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="Few rows and a small vocabulary.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    if args.tiny:
        args.rows, args.vocab = [8], 4096
    rate = ceilings().get("copy_tb_per_s", 0.01) * 1e12
    torch.manual_seed(0)
    rows, report = [], {}
    for number in args.rows:
        logits = 3 * torch.randn(number, args.vocab, device=DEVICE)
        uniforms = torch.rand(number, device=DEVICE)
        for name, options in TRUNCATIONS.items():
            calls = {
                "ours": partial(sample, logits, uniforms, **options),
                "torch": partial(with_torch, logits, uniforms, **options),
            }
            times = {key: timing.median for key, timing in side_by_side(calls, rounds=args.rounds).items()}
            report[f"{number} rows, {name}"] = times
            rows.append((number, name, times["ours"], times["torch"], logits.nbytes / rate * 1e3))
    print(machine())
    print(table(("rows", "tokens kept", "ours ms", "torch ms", "floor ms"), rows))
    write_json(args.json, milliseconds=report)


if __name__ == "__main__":
    main()
