"""Draw a token of each sequence: `parallel_layers.inference.sampling.sample` with and without truncation, beside torch.

    python benchmarks/sampling.py                  # 256 and 512 rows of 128256 fp32 logits
    torchrun --nproc-per-node 2 benchmarks/sampling.py --rows 128    # each rank holds a part of the vocabulary
    python benchmarks/sampling.py --tiny           # to see that it works, on a CPU too

torch's form sorts the logits for top-p and takes `topk` for top-k. The floor reads the logits once at the rate of a
device-to-device copy. Over ranks "gathered" gathers the logits and draws from the whole vocabulary on each rank; both
forms are times of one draw in a CUDA graph of 64.
"""

import argparse
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from few_tokens import in_graph
from measure import DEVICE, ceilings, join_ranks, machine, side_by_side, table, write_json
from torch.distributed import ProcessGroup

from parallel_layers.inference import sample, sample_with_mask

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}


def sorted_truncation(
    logits: torch.Tensor, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Return the logits with -inf for tokens that may not be drawn, by torch's functions alone."""
    least = logits.amax(-1, keepdim=True) + (math.log(min_p) if min_p else -math.inf)
    if top_k is not None:
        least = torch.maximum(least, logits.topk(top_k, -1).values[:, -1:])
    if top_p < 1:
        ordered = logits.masked_fill(logits < least, -torch.inf).sort(dim=-1, descending=True).values
        probability = ordered.softmax(dim=-1)
        last = (probability.cumsum(dim=-1) - probability < top_p).sum(dim=-1, keepdim=True) - 1
        least = ordered.gather(-1, last)
    return logits.masked_fill(logits < least, -torch.inf)


def with_torch(logits: torch.Tensor, uniforms: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw with torch's functions alone."""
    log_probs = logits.log_softmax(dim=-1)
    passed = sorted_truncation(log_probs, **options).exp().cumsum(dim=-1)
    tokens = torch.searchsorted(passed, uniforms[:, None] * passed[:, -1:], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def gathered(draw: Any, part: torch.Tensor, uniforms: torch.Tensor, group: ProcessGroup, options: Any) -> Any:
    """Draw from the logits of all ranks."""
    parts = part.new_empty(group.size() * len(part), part.shape[1])
    dist.all_gather_into_tensor(parts, part, group=group)
    return draw(torch.cat(parts.chunk(group.size()), 1), uniforms, **options)


def over_ranks(number: int, vocab: int, rounds: int, group: ProcessGroup) -> list[tuple[object, ...]]:
    """Return the rows of a table of the draws of `number` rows by ranks that hold parts of the vocabulary."""
    logits = 3 * torch.randn(number, vocab, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    uniforms = torch.rand(number, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    part = logits.chunk(group.size(), 1)[group.rank()].contiguous()
    rows: list[tuple[object, ...]] = []
    draws = {"": sample, ", masks": sample_with_mask}
    for name, options in TRUNCATIONS.items():
        for kind, draw in draws.items():
            if kind and not options:
                continue
            ours: Any = partial(draw, part, uniforms, **options, group=group)
            whole = partial(gathered, draw, part, uniforms, group, options)
            same = torch.equal(ours()[0], draw(logits, uniforms, **options)[0])
            rows.append((number, name + kind, in_graph(ours, rounds), in_graph(whole, rounds), same))
    return rows


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
    rank, world = join_ranks()
    if world > 1:
        assert dist.group.WORLD is not None
        rows = [row for rows in args.rows for row in over_ranks(rows, args.vocab, args.rounds, dist.group.WORLD)]
        if rank == 0:
            print(machine())
            print(table(("rows", "tokens kept", "ours us", "gathered us", "equal tokens"), rows))
            write_json(args.json, rows=rows)
        dist.destroy_process_group()
        return
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
