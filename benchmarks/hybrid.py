"""Layers of hybrid models beside transformers and vLLM: training steps, one long sequence, and drawing.

    python benchmarks/hybrid.py [--models NAME ...] [--measure steps long draw draw-vllm] [--rounds N] [--json FILE]
    python benchmarks/hybrid.py --models nemotron_h --engines ours Megatron-Core    # steps of these alone

Ten layers of Nemotron-H 8B (five of Mamba-2, one of attention, four MLPs) and four of Qwen3-Next 80B-A3B (three gated
delta networks, one of attention, 512 experts each), with their vocabularies, bf16, random weights.

    steps       forward and backward of the log-probabilities of 16384 tokens: packed sequences of ours; for
                transformers, which does not pack these layers right, as many rows of one length, which need no mask.
                transformers takes the kernels of fla, causal-conv1d and mamba-ssm where they are installed; its head
                computes all logits in fp32; ours keeps probabilities in bf16 where they fit, as an `Actor` does.
                Nemotron-H also as Megatron-Core's HybridModel, where Megatron-Core 0.18 is installed: packed, with
                Transformer Engine's layers where it is there, the kernels of mamba-ssm and causal-conv1d, and our head
                without kept probabilities.
    long        the same for one sequence of 262144 tokens, ours alone, with every layer recomputed in the backward
    draw        128 prompts of 256 tokens are continued by 256 tokens, by our engine
    draw-vllm   the same by vLLM, on weights that it makes itself

Peak memory is above the weights and their gradients.
"""

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from measure import CUDA, DEVICE, kernel_packages, machine, milliseconds, peak_gib, synchronize, table, write_json
from rollouts import random_engine, vllm
from step import randomise
from torch import nn

from parallel_layers import PackedSequence, ParallelDims, linear_log_probs, next_token_labels
from parallel_models import GenerationOptions, generate

MAMBA, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [MAMBA, MLP] * 3 + [MAMBA, ATTENTION, MLP, MAMBA],
    },
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4},
}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TINY: dict[str, dict[str, Any]] = {
    "nemotron_h": COMMON | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6},
    "qwen3_next": COMMON
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
PACKS = {"16 x 1024": [1024] * 16, "1 x 16384": [16384]}
TINY_PACKS = {"2 x 16": [16] * 2}
LONG = {"1 x 262144": [262144]}
TINY_LONG = {"1 x 64": [64]}
Step = Callable[[], None]
Draw = Callable[[Sequence[Sequence[int]], int], Any]


def our_step(config: Any, lengths: list[int], **how: Any) -> Step:
    """Return a step of our model on a packed batch; `how`: `EngineOptions`."""
    model = random_engine(config.to_dict(), ParallelDims(), **how).model
    packed = PackedSequence.from_sequences([torch.randint(config.vocab_size, (n,), device=DEVICE) for n in lengths])
    labels = next_token_labels(packed)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        how: dict[str, Any] = {"entropy": False, "vocab_size": config.vocab_size, "keep_probabilities": "auto"}
        linear_log_probs(model(packed), model.head_weight, labels, **how).log_probs.sum().backward()

    return step


def their_step(config: Any, lengths: list[int]) -> Step:
    """Return a step of transformers' model on rows of equal lengths."""
    config = type(config).from_dict(config.to_dict() | {"use_cache": False})
    with torch.device(DEVICE):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise(model)
    ids = torch.randint(config.vocab_size, (len(lengths), lengths[0]), device=DEVICE)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids).logits[:, :-1].float()
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()

    return step


@cache
def megatron_groups() -> Any:
    """Return Megatron-Core's grid of this process, which stays to its end."""
    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    stack = contextlib.ExitStack()
    if not CUDA:
        stack.enter_context(cpu_stand_in())
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return stack.enter_context(megatron_grid(ParallelDims(), seed=0)), stack


def megatron_step(config: Any, lengths: list[int]) -> Step:
    """Return a step of Megatron-Core's model on a packed batch."""
    from megatron_utils.hybrid import build_hybrid

    grid, _ = megatron_groups()
    hf = config.to_dict() | {"time_step_min": 1e-9}  # Megatron-Core has no limit of the steps
    layer_spec: Any = "transformer_engine" if find_spec("transformer_engine") else "local"
    (model,) = build_hybrid(hf, None, grid, dtype=torch.bfloat16, layer_spec=layer_spec)
    randomise(model.to(DEVICE))
    packed = PackedSequence.from_sequences([torch.randint(config.vocab_size, (n,), device=DEVICE) for n in lengths])
    labels = next_token_labels(packed)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(packed, labels, entropy=False).log_probs.sum().backward()

    return step


def long_step(config: Any, lengths: list[int]) -> Step:
    """Return a step of our model that computes every layer again in its backward."""
    return our_step(config, lengths, recompute="full")


def our_draw(config: Any, most: int) -> Draw:
    """Return our engine's way to continue prompts."""
    engine = random_engine(config.to_dict(), ParallelDims())

    def draw(prompts: Sequence[Sequence[int]], tokens: int) -> Any:
        return generate(engine, prompts, GenerationOptions(max_new_tokens=tokens, max_sequences=most, keep_cache=True))

    return draw


def their_draw(config: Any, most: int) -> Draw:
    """Return vLLM's way to continue prompts; it reads the config alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config.to_dict() | {"dtype": "bfloat16"}))
        # FlashInfer's kernel for prompts would be compiled for minutes.
        engine = vllm(Path(folder), most, ParallelDims(), additional_config={"gdn_prefill_backend": "triton"})
    return lambda prompts, tokens: engine(prompts, 1, tokens)


def drawn_per_second(draw: Draw, vocab_size: int, prompts: int, tokens: int, rounds: int) -> float:
    """Return the tokens drawn in a second, the median of calls after one that captures graphs."""
    seconds = []
    for _ in range(1 + rounds):
        rows = [torch.randint(1, vocab_size, (tokens,)).tolist() for _ in range(prompts)]
        synchronize()
        begun = time.perf_counter()
        draw(rows, tokens)
        synchronize()
        seconds.append(time.perf_counter() - begun)
    return prompts * tokens / statistics.median(seconds[1:])


STEPS: dict[str, dict[str, Any]] = {
    "steps": {"ours": our_step, "transformers": their_step},
    "long": {"ours": long_step},
}
MEGATRON = "Megatron-Core"
if all(map(find_spec, ("megatron", "mamba_ssm"))) and find_spec("megatron.core.models.hybrid"):
    STEPS["steps"][MEGATRON] = megatron_step
DRAWS = {"draw": our_draw, "draw-vllm": their_draw}


def measure_step(build: Callable[[Any, list[int]], Step], config: Any, lengths: list[int], rounds: int) -> list[float]:
    """Return the median milliseconds and the GiB of steps after a first one; NaN where they do not fit."""
    times: list[float] = []
    try:
        step = build(config, lengths)
        milliseconds(step)  # compiles kernels
        gib = peak_gib(lambda: times.append(milliseconds(step)))
        for _ in range(rounds - 1):
            times.append(milliseconds(step))
    except torch.cuda.OutOfMemoryError:
        return [float("nan"), float("nan")]
    return [statistics.median(times), gib]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS, help="Measure these.")
    parser.add_argument("--measure", nargs="+", default=["steps"], choices=[*STEPS, *DRAWS], help="Measure this.")
    engines = [*STEPS["steps"]]
    parser.add_argument("--engines", nargs="+", default=engines, choices=engines, help="Whose steps (default: all).")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that are counted.")
    parser.add_argument("--json", help="Write the figures to this file.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    args = parser.parse_args()
    packages = kernel_packages()
    packs = {"steps": TINY_PACKS, "long": TINY_LONG} if args.tiny else {"steps": PACKS, "long": LONG}
    rows, draws, rounds = [], [], 1 if args.tiny else args.rounds
    for name in args.models:
        config = transformers.AutoConfig.for_model(name, **MODELS[name], **(TINY[name] if args.tiny else {}))
        for kind in args.measure:
            for pack, lengths in packs.get(kind, {}).items():
                for engine, build in STEPS[kind].items():
                    # Qwen3-Next's layers are two mixers each, which Megatron-Core's are not.
                    if engine not in args.engines or (engine == MEGATRON and name != "nemotron_h"):
                        continue
                    rows.append((name, pack, engine, *measure_step(build, config, lengths, rounds)))
                    print(*rows[-1], flush=True)
                    free()
            if kind in DRAWS:
                sizes = (2, 8) if args.tiny else (128, 256)
                rate = drawn_per_second(DRAWS[kind](config, sizes[0]), config.vocab_size, *sizes, rounds)
                draws.append((name, kind, rate))
                print(*draws[-1], flush=True)
                free()
    print(machine(), "on a GPU" if CUDA else "on a CPU: no figures", packages)
    print(table(("model", "pack", "", "ms", "extra GiB"), rows))
    print(table(("model", "", "tokens drawn a second"), draws))
    write_json(args.json, rows=rows, draws=draws, packages=packages)


def free() -> None:
    """Give back the memory of what is not referenced."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
