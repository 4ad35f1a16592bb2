"""A step of each optimizer: milliseconds, and GiB of its state beside bf16 weights.

    python benchmarks/optimizers.py [--layers N] [--only TEXT ...] [--json FILE] [--rounds N] [--tiny]

Eight layers of Llama 3 8B with its vocabulary on one device, random bf16 weights and fp32 gradients. A step is what
`Actor.update` does behind the backward: the gradient's norm and its clipping, the optimizer on fp32 master weights, and
the bf16 copies of them. The state holds the master weights, too: 4 bytes for each weight. The first row is torch's
fused AdamW on fp32 weights alone, without clipping and copies. "offload" keeps the state in pinned host memory; the
rates of the bus are printed beside the table. Muon's FLOPs are those of
its Newton-Schulz steps.
"""

import argparse
import gc
from typing import Any, get_args

import torch
from measure import CUDA, DEVICE, machine, peak_gib, side_by_side, table, write_json
from step import LLAMA_3_8B, TINY, randomise

import ckpt
from parallel_layers import ModelConfig
from parallel_models import Shards
from parallel_models.optimizers import Moments, ShardOptimizer, is_hidden_matrix
from rl_models import CausalLM, OptimizerOptions

RATE = 1e-5


def measure(hf: dict[str, Any], name: str, options: OptimizerOptions | None, rounds: int) -> list[object]:
    """Return a row of the table; `options` None is torch's own optimizer."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    model = CausalLM(ModelConfig.from_hf(hf), dtype=torch.bfloat16, device="meta").to_empty(device=DEVICE)
    randomise(model)
    parameters = list(model.parameters())
    gradients = [torch.randn(parameter.shape, device=DEVICE) for parameter in parameters]
    if options is None:
        masters = [parameter.detach().float() for parameter in parameters]
        adamw = torch.optim.AdamW(masters, RATE, fused=True)

        def step() -> None:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            adamw.step()

        def state() -> list[torch.Tensor]:
            return [*masters, *(slot for slots in adamw.state.values() for slot in slots.values())]

    else:
        shards = Shards(ckpt.layout_for(hf), [(ckpt.Place(), dict(model.state_dict(keep_vars=True)))])
        optimizer = ShardOptimizer(model, options, shards=shards)

        def step() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step(RATE)

        def state() -> list[torch.Tensor]:
            return list(optimizer.tensors())

    timing = side_by_side({name: step}, rounds=rounds, warm_up=2)[name]
    extra = peak_gib(step)
    numel = sum(parameter.numel() for parameter in parameters)
    tensors = {kind: sum(x.nbytes for x in state() if x.device.type == kind) for kind in {DEVICE.type, "cpu"}}
    nbytes, host = sum(tensors.values()), tensors["cpu"] if CUDA else 0
    return [name, timing.median, nbytes / 2**30, host / 2**30, nbytes / numel, extra, timing.failed]


def bus_rates(nbytes: int = 1 << 28) -> list[float]:
    """Return the GB/s of a copy in, a copy out, and each of both at the same time."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    host, device = ([torch.zeros(nbytes, dtype=torch.uint8, **kind) for _ in range(2)] for kind in (
        {"pin_memory": True}, {"device": DEVICE}
    ))  # fmt: skip

    def copies(into: bool, out: bool) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(8):
            for stream, wanted, (to, source) in (
                (streams[0], into, (device[0], host[0])), (streams[1], out, (host[1], device[1]))
            ):  # fmt: skip
                if wanted:
                    stream.wait_event(begin)
                    with torch.cuda.stream(stream):
                        to.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        return 8 * nbytes / begin.elapsed_time(end) / 1e6

    return [copies(*which) for _ in range(2) for which in ((True, False), (False, True), (True, True))][3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names contain one of these texts")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    hf = dict(TINY if options.tiny else LLAMA_3_8B | {"num_hidden_layers": options.layers})
    variants: dict[str, OptimizerOptions | None] = {"torch AdamW, fp32 weights": None}
    for algorithm in ("adamw", "muon"):
        for moments in get_args(Moments):
            for offload in (False, True):
                name = f"{algorithm}, {moments}" + ", offload" * offload
                variants[name] = OptimizerOptions(RATE, algorithm=algorithm, moments=moments, offload=offload)  # type: ignore[arg-type]
    rows = [
        measure(hf, name, variant, options.rounds)
        for name, variant in variants.items()
        if any(text in name for text in options.only)
    ]
    shapes = [
        entry.shape for name, entry in ckpt.layout_for(hf).canonical.items() if is_hidden_matrix(name, entry.shape)
    ]
    # Five steps: X X^T, its square, and the product with X.
    flops = sum(5 * 2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes)
    print(machine())
    print(f"{hf['num_hidden_layers']} layers; {flops / 1e12:.2f} TFLOP of Newton-Schulz steps")
    print(table(["", "ms", "GiB of state", "on the host", "bytes a weight", "GiB more in a step", "note"], rows))
    if CUDA:
        print("bus, GB/s: in {:.1f}, out {:.1f}, both at once {:.1f} each".format(*bus_rates()))
    write_json(options.json, layers=hf["num_hidden_layers"], newton_schulz_tflop=flops / 1e12, rows=rows)


if __name__ == "__main__":
    main()
