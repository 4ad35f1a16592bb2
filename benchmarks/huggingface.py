"""A Llama-shaped Hugging Face model, forward and backward of the tokens' log-probabilities: patched beside unpatched.

    python benchmarks/huggingface.py [--sequences N] [--layers N] [--json FILE] [--trace FILE] [--rounds N] [--tiny]
    torchrun --nproc-per-node SP benchmarks/huggingface.py --tokens 65536 [...]

Layers of Llama 3 8B (eight, or `--layers`) with its vocabulary, bf16, random weights.

The first form takes a batch of 16 ragged sequences on one device (40 % of its rectangle is padding), or every so many
of them (`--sequences 4`: a size that plain transformers fits, too): padded as transformers takes it, with and without
Liger's kernels, packed by position ids as transformers' flash-attention takes it, and packed by `hf_patches.patch`:
with its kernels; with the probabilities kept for the backward of the head; and without kernels.

The second form takes one sequence, spread over all ranks by the patch (Ulysses); the unpatched model runs on each rank
by itself where it fits.

Attention is flash-attn 2 where it is installed, in the patched models too, else transformers' sdpa; where flash-attn-4
is installed, another row has the patch with it. Tokens are real ones, not padding. Peak memory is above the weights,
with their gradients. Models are made one after another, since not all of them fit, and then once more in the opposite
order: a GPU that grows slower is so for all. --trace profiles one step of each and writes which kernels took the time.
"""

import argparse
import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernel_times import kernel_times
from measure import CUDA, DEVICE, Timing, ceilings, join_ranks, machine, peak_gib, side_by_side, table, write_json
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import patch
from parallel_layers import PackedSequence
from parallel_layers.attention import available_backends

LENGTHS = [4096, 3840, 3584, 3328, 3072, 2816, 2560, 2304, 2304, 2048, 2048, 1792, 1792, 1536, 1280, 1024]
SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY = SIZES | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 515
}  # fmt: skip
HAS_FLASH = CUDA and importlib.util.find_spec("flash_attn_2_cuda") is not None
Step = Callable[[], None]


def new_model(sizes: dict[str, object], *, liger: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(**sizes, attn_implementation="flash_attention_2" if HAS_FLASH else "sdpa", use_cache=False)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    return model


def chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probabilities of labels, as plain torch computes them."""
    return -torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")


def padded_step(model: LlamaForCausalLM, rows: list[Tensor]) -> Step:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)

    def step() -> None:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        (chosen(logits, ids[:, 1:]) * mask[:, 1:].flatten()).sum().backward()

    return step


def position_ids_step(model: LlamaForCausalLM, packed: PackedSequence) -> Step:
    labels = packed.input_ids.roll(-1)
    inside = packed.position_ids.roll(-1) != 0

    def step() -> None:
        logits = model(input_ids=packed.input_ids[None], position_ids=packed.position_ids[None]).logits
        (chosen(logits, labels) * inside).sum().backward()

    return step


def patched_step(
    model: LlamaForCausalLM, packed: PackedSequence, group: dist.ProcessGroup | None, **options: Any
) -> Step:
    patch(model, sequence_parallel_group=group, **{"attention": "flash-attn" if HAS_FLASH else "auto", **options})

    def step() -> None:
        model(packed=packed, entropy=False).log_probs.sum().backward()

    return step


def ragged(sizes: dict[str, object], lengths: list[int]) -> dict[str, Callable[[], tuple[LlamaForCausalLM, Step]]]:
    rows = [torch.randint(int(str(sizes["vocab_size"])), (length,), device=DEVICE) for length in lengths]
    packed = PackedSequence.from_sequences(rows)

    def build(make: Callable[[LlamaForCausalLM], Step], **options: bool) -> tuple[LlamaForCausalLM, Step]:
        model = new_model(sizes, **options)
        return model, make(model)

    def patched(**options: Any) -> Callable[[], tuple[LlamaForCausalLM, Step]]:
        return lambda: build(lambda model: patched_step(model, packed, None, **options))

    variants = {
        "hf_patches: packed": patched(),
        "hf_patches: packed, probabilities kept": patched(keep_probabilities=True),
        "hf_patches: packed, kernels=False": patched(kernels=False),
        "transformers: padded": lambda: build(lambda model: padded_step(model, rows)),
    }
    if HAS_FLASH and "flash-attn-4" in available_backends():
        variants["hf_patches: packed, probabilities kept, flash-attn-4"] = patched(
            keep_probabilities=True, attention="flash-attn-4"
        )
    if HAS_FLASH:
        variants["transformers: packed by position ids"] = lambda: build(lambda m: position_ids_step(m, packed))
    if CUDA and importlib.util.find_spec("liger_kernel"):
        variants["transformers + Liger: padded"] = lambda: build(lambda m: padded_step(m, rows), liger=True)
        if HAS_FLASH:
            variants["transformers + Liger: packed by position ids"] = lambda: build(
                lambda model: position_ids_step(model, packed), liger=True
            )
    return variants


def long(
    sizes: dict[str, object], tokens: int, group: dist.ProcessGroup | None
) -> dict[str, Callable[[], tuple[LlamaForCausalLM, Step]]]:
    generator = torch.Generator().manual_seed(0)  # all ranks take the same tokens
    row = torch.randint(int(str(sizes["vocab_size"])), (tokens,), generator=generator).to(DEVICE)
    packed = PackedSequence.from_sequences([row])

    def patched() -> tuple[LlamaForCausalLM, Step]:
        model = new_model(sizes)
        return model, patched_step(model, packed, group)

    def unpatched() -> tuple[LlamaForCausalLM, Step]:
        model = new_model(sizes)
        return model, padded_step(model, [row])

    return {"hf_patches: Ulysses": patched, "transformers: each rank by itself": unpatched}


@dataclass
class Result:
    """The figures of one model: times, GiB above the weights, and kernels by time."""

    timing: Timing
    gib: float = float("nan")
    kernels: str = ""


def measure(build: Callable[[], tuple[LlamaForCausalLM, Step]], name: str, rounds: int, trace: bool) -> Result:
    """The model is made for this, then dropped."""
    try:
        return measure_model(*build(), name, rounds, trace)
    except torch.cuda.OutOfMemoryError:
        return Result(Timing(name, failed="does not fit"))
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure_model(model: LlamaForCausalLM, backward: Step, name: str, rounds: int, trace: bool) -> Result:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        backward()

    step()
    model.zero_grad(set_to_none=True)
    gib = peak_gib(step)
    timing = side_by_side({name: step}, rounds=rounds, warm_up=2)[name]
    return Result(timing, gib, f"## {name}\n\n{kernel_times(step)}\n" if trace else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="one sequence of so many tokens, over all ranks")
    parser.add_argument("--sequences", type=int, help="so many of the 16 sequences, from long to short")
    parser.add_argument("--layers", type=int, help="of so many layers")
    parser.add_argument("--trace", help="write each model's kernels, by time and stream, to this file")
    parser.add_argument("--json", help="also write every figure to this file")
    parser.add_argument("--rounds", type=int, default=5, help="of each model, twice")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    rank, world = join_ranks()
    if world > 1 and options.tokens is None:
        parser.error("several ranks need --tokens: the ragged batch is for one device")
    if options.sequences is not None and options.sequences not in (1, 2, 4, 8, 16):
        parser.error(f"--sequences {options.sequences}: take 1, 2, 4, 8 or 16")
    measured = ceilings()
    sizes: dict[str, object] = dict(TINY if options.tiny else SIZES)
    sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    lengths = LENGTHS[:: len(LENGTHS) // options.sequences] if options.sequences else LENGTHS
    lengths = [max(1, length // 64) for length in lengths] if options.tiny else lengths
    if options.tokens is None:
        variants, tokens = ragged(sizes, lengths), sum(lengths)
    else:
        variants, tokens = long(sizes, options.tokens, dist.group.WORLD if world > 1 else None), options.tokens
    results: dict[str, Result] = {}
    for name, build in variants.items():
        results[name] = measure(build, name, options.rounds, options.trace is not None)
    for name, build in reversed(variants.items()):
        if not results[name].timing.failed:
            results[name].timing.times += measure(build, name, options.rounds, trace=False).timing.times
    rows: list[list[object]] = []
    for name, result in results.items():
        time = result.timing.median
        rows.append([name, world, time, tokens / time * 1e3, result.gib, result.timing.failed])
    if rank == 0:
        print(machine(), measured)
        flash = "is" if HAS_FLASH else "is not"
        print(f"{tokens} tokens, {sizes['num_hidden_layers']} layers; flash-attention {flash} installed")
        print(table(["model", "sp", "fwd+bwd ms", "tokens/s", "peak GiB above the weights", "note"], rows))
        if options.trace:
            Path(options.trace).write_text("\n".join(result.kernels for result in results.values()))
        write_json(options.json, ceilings=measured, tokens=tokens, sp=world, rows=rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
