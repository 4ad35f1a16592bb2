"""Layers of hybrid models, forward and backward of the tokens' log-probabilities and drawing: ours beside transformers.

    python benchmarks/hybrid.py [--models NAME ...] [--draw] [--rounds N] [--json FILE] [--tiny]

Ten layers of Nemotron-H 8B (five of Mamba-2, one of attention, four MLPs) and four of Qwen3-Next 80B-A3B (three gated
delta networks, one of attention, 512 experts each), with their vocabularies, bf16, random weights. A step is the
forward and backward of 16384 tokens: packed sequences of ours; for transformers, which does not pack these layers
right, as many rows of one length, which need no mask. transformers has the kernels that are installed and says so; its
head computes all logits, ours none. Peak memory is above the weights, with their gradients.

--draw draws 256 tokens for each of 128 prompts of 256 tokens by our engine.
"""

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from measure import CUDA, DEVICE, machine, peak_gib, side_by_side, synchronize, table, write_json
from rollouts import random_engine
from step import randomise
from torch import nn

from parallel_layers import PackedSequence, ParallelDims, linear_log_probs, next_token_labels
from parallel_models import GenerationOptions, generate

MAMBA, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": [MAMBA, MLP] * 3 + [MAMBA, ATTENTION, MLP, MAMBA]},
    "qwen3_next": {"num_hidden_layers": 4},
}
COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY: dict[str, dict[str, Any]] = {
    "nemotron_h": COMMON | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 6},
    "qwen3_next": COMMON
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
PACKS = {"16 x 1024": [1024] * 16, "1 x 16384": [16384]}
TINY_PACKS = {"2 x 16": [16] * 2}
Step = Callable[[], None]


def our_step(config: Any, lengths: list[int]) -> Step:
    """Return a step of our model on a packed batch."""
    model = random_engine(config.to_dict(), ParallelDims()).model
    packed = PackedSequence.from_sequences([torch.randint(config.vocab_size, (n,), device=DEVICE) for n in lengths])
    labels = next_token_labels(packed)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        how: dict[str, Any] = {"entropy": False, "vocab_size": config.vocab_size}
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


def drawn_per_second(config: Any, prompts: int, tokens: int) -> float:
    """Return the tokens that our engine draws in a second, after a call that captures its graphs."""
    engine = random_engine(config.to_dict(), ParallelDims())
    rows = [torch.randint(1, config.vocab_size, (tokens,)).tolist() for _ in range(prompts)]
    options = GenerationOptions(max_new_tokens=tokens, max_sequences=prompts, keep_cache=True)
    seconds = []
    for _ in range(2):
        synchronize()
        begun = time.perf_counter()
        generate(engine, rows, options)
        synchronize()
        seconds.append(time.perf_counter() - begun)
    return prompts * tokens / seconds[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS, help="Measure these.")
    parser.add_argument("--draw", action="store_true", help="Draw, too.")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that are counted.")
    parser.add_argument("--json", help="Write the figures to this file.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes.")
    args = parser.parse_args()
    rows, draws, rounds = [], {}, 1 if args.tiny else args.rounds
    for name in args.models:
        small = TINY[name] | {"vocab_size": 97} if args.tiny else {}
        config = transformers.AutoConfig.for_model(name, **MODELS[name], **small)
        config.architectures = [{"nemotron_h": "NemotronHForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}[name]]
        for pack, lengths in (TINY_PACKS if args.tiny else PACKS).items():
            for engine, build in {"ours": our_step, "transformers": their_step}.items():
                try:
                    step = build(config, lengths)
                    step()
                    gib = peak_gib(step)
                    (timing,) = side_by_side({engine: step}, rounds=rounds, warm_up=1).values()
                    rows.append((name, pack, engine, timing.median, gib))
                except torch.cuda.OutOfMemoryError:
                    rows.append((name, pack, engine, float("nan"), float("nan")))
                print(*rows[-1], flush=True)
                step = None  # type: ignore[assignment]
                gc.collect()
                torch.cuda.empty_cache()
        if args.draw:
            draws[name] = drawn_per_second(config, *((2, 8) if args.tiny else (128, 256)))
            print(name, "draws", draws[name], flush=True)
    kernels = {module: importlib.util.find_spec(module) is not None for module in ("fla", "causal_conv1d", "mamba_ssm")}
    print(machine(), "on a GPU" if CUDA else "on a CPU: no figures", kernels)
    print(table(("model", "pack", "", "ms", "extra GiB"), rows))
    if draws:
        print(table(("model", "tokens drawn a second"), list(draws.items())))
    write_json(args.json, rows=rows, draws=draws, kernels=kernels)


if __name__ == "__main__":
    main()
