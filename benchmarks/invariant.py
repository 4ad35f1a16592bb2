"""The cost of bitwise-equal results: log-probs and a step, ordinary beside tensor-parallel invariant and deterministic.

    torchrun --nproc-per-node TP benchmarks/invariant.py [--model dense|mixture] [--json FILE] [--rounds N] [--tiny]

The model, the tokens and the loss are those of `step.py`: eight layers of Llama 3 8B with its vocabulary, 16384 tokens
as 4 x 4096, bf16, tensor parallel over all ranks, sequence parallel when there are several. "mixture" is four layers of
Qwen3-30B-A3B. Sums over the ranks are in fp32, the default. "invariant" is `tp_invariant` (log-probs whose bits depend
neither on the ranks nor on the batch),
"deterministic" torch's deterministic algorithms and flash attention's deterministic backward (the same bits at every
run), which costs the forward nothing. Each ratio is to the ordinary model in the same rounds. The products alone, one
rank's at this tp, are compared to cuBLAS. The log-probs of all ranks and of a sequence alone are checked to be the same
bits.
"""

import argparse
import os

import torch
import torch.distributed as dist
from measure import CUDA, DEVICE, Call, ceilings, join_ranks, machine, side_by_side, synchronize, table, write_json
from rollouts import LARGE
from step import LLAMA_3_8B, TINY, Task, peak, randomise
from torch import Tensor

from parallel_layers import ModelConfig, PackedSequence
from parallel_layers.invariant import BLOCKS, tp_invariant
from parallel_layers.linear import InvariantProduct
from rl_models import CausalLM

MIXTURE = LARGE["30b-a3b"] | {"num_hidden_layers": 4, "rms_norm_eps": 1e-6}
TINY_MIXTURE = MIXTURE | TINY | {"architectures": MIXTURE["architectures"], "model_type": MIXTURE["model_type"]}
TINY_MIXTURE |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def build(task: Task) -> dict[str, CausalLM]:
    """The ordinary model and its invariant view, with the same parameters."""
    model = CausalLM(
        ModelConfig.from_hf(task.hf),
        group=task.group,
        sequence_parallel=task.group is not None,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    randomise(model)
    view = tp_invariant(model)
    view.tp_invariant = True  # the head, too
    return {"ordinary": model, "invariant": view}


@torch.no_grad()
def log_probs(model: CausalLM, packed: PackedSequence) -> Tensor:
    return model.log_probs(packed, entropy=False).log_probs


def step_of(model: CausalLM, packed: PackedSequence, *, deterministic: bool = False) -> Call:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(deterministic)
        try:
            model.log_probs(packed, entropy=False).log_probs.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)

    return step


def check(model: CausalLM, packed: PackedSequence, multiple_of: int) -> bool:
    """Whether the log-probs of all ranks, and of the first sequence alone, are the same bits."""
    found = log_probs(model, packed)
    alone = PackedSequence.from_sequences([packed.split(packed.input_ids)[0]], multiple_of=multiple_of)
    first = alone.split(log_probs(model, alone))[0]
    same = torch.equal(first, found[: len(first)])
    if dist.is_initialized():
        everywhere = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, found)
        same = same and all(torch.equal(other, found) for other in everywhere)
    return same


def products(task: Task) -> dict[str, dict[str, Call]]:
    """By name of the layer: this rank's product, by cuBLAS and by ours (fp32 parts of a tree for row-parallel ones)."""
    hf = task.hf
    tp = 1 if task.group is None else task.group.size()
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"] * hf["head_dim"]
    qkv = heads + 2 * hf["num_key_value_heads"] * hf["head_dim"]
    shapes = {
        "qkv_proj": (hidden, qkv // tp, False),
        "o_proj": (heads // tp, hidden, True),
    }
    if "num_experts" not in hf:
        shapes["gate_up_proj"] = hidden, 2 * hf["intermediate_size"] // tp, False
        shapes["down_proj"] = hf["intermediate_size"] // tp, hidden, True
    calls: dict[str, dict[str, Call]] = {}
    for name, (size, columns, row) in shapes.items():
        x = torch.randn(task.packed.num_tokens, size, device=DEVICE, dtype=torch.bfloat16)
        w = torch.randn(columns, size, device=DEVICE, dtype=torch.bfloat16)
        dtype = torch.float32 if row and tp > 1 else torch.bfloat16
        multiply = InvariantProduct(BLOCKS // tp if row else None)
        calls[name] = {
            "ordinary": lambda x=x, w=w, dtype=dtype: (
                torch.mm(x, w.T, out_dtype=dtype) if CUDA and dtype != x.dtype else (x @ w.T).to(dtype)
            ),
            "invariant": lambda x=x, w=w, dtype=dtype, multiply=multiply: multiply(x, w, None, dtype),
        }
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", choices=["dense", "mixture"], default="dense", help="the model")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    # As `rl_models.api.worker.be_deterministic`: what deterministic GEMMs need, and fresh memory as it is.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    rank, world = join_ranks()
    measured = ceilings()
    hf, tiny = (LLAMA_3_8B, TINY) if options.model == "dense" else (MIXTURE, TINY_MIXTURE)
    hf, lengths = (tiny, [32] * 2) if options.tiny else (hf, [4096] * 4)
    task = Task.random(hf, lengths, dist.group.WORLD if world > 1 else None)
    packed = task.packed

    heads = ["product", "tp", "cuBLAS ms", "invariant ms", "ratio"]
    rows: list[list[object]] = []
    product_times = {}
    for name, calls in products(task).items():
        ordinary, ours = (timing.median for timing in side_by_side(calls, rounds=options.rounds).values())
        rows.append([name, world, ordinary, ours, ours / ordinary])
        product_times[name] = {"ordinary": ordinary, "invariant": ours}

    models = build(task)
    same = check(models["invariant"], packed, world)
    forwards: dict[str, Call] = {name: lambda model=model: log_probs(model, packed) for name, model in models.items()}
    steps: dict[str, Call] = {name: step_of(model, packed) for name, model in models.items()}
    steps["deterministic"] = step_of(models["ordinary"], packed, deterministic=True)
    steps["invariant and deterministic"] = step_of(models["invariant"], packed, deterministic=True)
    synchronize()
    found = {
        "log-probs": side_by_side(forwards, rounds=options.rounds),
        "forward and backward": side_by_side(steps, rounds=options.rounds),
    }
    peaks = {name: peak(models["ordinary"], step) for name, step in steps.items()}
    more: list[list[object]] = []
    for what, timings in found.items():
        for name, timing in timings.items():
            held = peaks[name] if what != "log-probs" else float("nan")
            more.append([what, name, world, timing.median, timing.median / timings["ordinary"].median, held])
    if rank == 0:
        print(machine(), measured)
        print(table(heads, rows))
        print()
        print(table(["what", "model", "tp", "ms", "ratio to ordinary", "peak GiB per GPU"], more))
        print(f"log-probs of all ranks, and of a sequence alone, are {'' if same else 'NOT '}the same bits")
        write_json(
            options.json,
            ceilings=measured,
            model=options.model,
            tp=world,
            same_bits=same,
            products=product_times,
            timings={what: list(timings.values()) for what, timings in found.items()},
            peaks=peaks,
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    if not same:
        raise SystemExit("the invariant model's log-probs differ")


if __name__ == "__main__":
    main()
