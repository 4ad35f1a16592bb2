"""Generate responses: `Actor.generate` beside transformers' continuous batching and vLLM, and the roofline.

    python benchmarks/rollouts.py                                  # 1B shape, 256 and 512 sequences
    python benchmarks/rollouts.py --peers transformers vllm --json rollouts.json
    python benchmarks/rollouts.py --step                           # a PPO step of an actor and a critic around it
    python benchmarks/rollouts.py --difference                     # the sampler's log-probs against `log_probs`
    python benchmarks/rollouts.py --tiny                           # to see that it works, on a CPU too

The model has the shape of Llama 3.2 1B and random weights. 64 prompts of 96 to 160 tokens have `sequences / 64`
responses of exactly 256 tokens each. Every engine returns the log-prob of each token. Times are medians after one call
that is not counted; "ready" is the time from nothing to the end of the first call of a few tokens. The roofline reads
all weights and the keys and values so far at the rate of a device-to-device copy.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, DEVICE, ceilings, machine, synchronize, table, write_json
from transformers import LlamaConfig, LlamaForCausalLM

Generate = Callable[[Sequence[Sequence[int]], int, int], Any]

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 16}


def ours(folder: Path, most: int) -> Generate:
    """Return `Actor.generate`."""
    from rl_models import Actor

    actor = Actor.from_pretrained(folder, device=DEVICE)

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        return actor.generate(prompts, max_new_tokens=tokens, n=n, max_sequences=most)

    return generate


def transformers(folder: Path, largest: int) -> Generate:
    """Return `generate_batch`, transformers' continuous batching."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
    ).to(DEVICE)

    most = 0

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        nonlocal most
        grown = n * len(prompts) > most
        if grown:  # a manager has the size of its first call
            model.destroy_cached_continuous_batching_manager()
            most = n * len(prompts)
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, eos_token_id=-1, pad_token_id=0, num_return_sequences=1
        )
        batching = ContinuousBatchingConfig(return_logprobs=True)
        inputs = [list(prompt) for prompt in prompts for _ in range(n)]
        # The manager stays, so that later calls are warm.
        return model.generate_batch(
            inputs,
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
            warmup=grown,
            progress_bar=False,
        )

    return generate


def vllm(folder: Path, most: int) -> Generate:
    """Return vLLM's offline engine, in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
        gpu_memory_utilization=0.6, max_num_seqs=most,
    )  # fmt: skip

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        params = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)

    return generate


ENGINES = {"ours": ours, "transformers": transformers, "vllm": vllm}


def roofline(shape: dict[str, Any], sequences: int, prompt: float, tokens: int, bytes_per_second: float) -> float:
    """Return tokens/s if a step reads the weights and the keys and values once, in bf16, and does nothing else."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = (
        hidden * shape["head_dim"] * (heads + shape["num_attention_heads"]) + 3 * hidden * shape["intermediate_size"]
    )
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    step = 2 * (weights + sequences * token * (prompt + tokens / 2))
    return sequences * bytes_per_second / step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512], help="Responses of a call.")
    parser.add_argument("--tokens", type=int, default=256, help="New tokens of each response.")
    parser.add_argument("--peers", nargs="*", default=[], choices=["transformers", "vllm"], help="Measure these, too.")
    parser.add_argument("--rounds", type=int, default=3, help="Calls that are counted.")
    parser.add_argument("--step", action="store_true", help="Measure a whole PPO step, too.")
    parser.add_argument("--difference", action="store_true", help="Compare the sampler's log-probs with training's.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model and few sequences.")
    parser.add_argument("--trace", help="Write a profile of one call to this folder.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    shape = {**SHAPE, **TINY} if args.tiny else SHAPE
    sequences, tokens, lengths = args.sequences, args.tokens, torch.linspace(96, 160, 64).int().tolist()
    if args.tiny:
        sequences, tokens, lengths = [8], 20, [5, 9, 13, 30]
    torch.manual_seed(0)
    prompts = [torch.randint(1, shape["vocab_size"], (length,)).tolist() for length in lengths]
    rate = ceilings().get("copy_tb_per_s", 0.01) * 1e12
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
        model.save_pretrained(name)
        del model
        for engine in ["ours", *args.peers]:
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            generate: Any = ENGINES[engine](Path(name), max(sequences))
            loaded = time.perf_counter() - begun
            generate(prompts[:2], 1, 4)
            synchronize()
            report[engine] = {"loaded": loaded, "ready": time.perf_counter() - begun}
            for number in sequences:
                seconds = []
                for _ in range(1 + args.rounds):
                    synchronize()
                    begun = time.perf_counter()
                    generate(prompts, number // len(prompts), tokens)
                    synchronize()
                    seconds.append(time.perf_counter() - begun)
                report[engine][str(number)] = number * tokens / statistics.median(seconds[1:])
                report[engine][f"{number} first"] = number * tokens / seconds[0]
            report[engine]["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
            print(engine, json.dumps(report[engine]), flush=True)
            if args.trace and engine == "ours":
                trace(partial(generate, prompts, sequences[0] // len(prompts), tokens), args.trace)
            generate = None
            if args.difference and engine == "ours":
                report["difference"] = differences(Path(name), prompts, tokens)
                print("difference:", json.dumps(report["difference"]), flush=True)
            if args.step and engine == "ours":
                report["step"] = ppo_step(Path(name), prompts, sequences[0] // len(prompts), tokens, args.rounds)
                print("step, seconds:", json.dumps(report["step"]), flush=True)
    mean = sum(lengths) / len(lengths)
    limits = {number: roofline(shape, number, mean, tokens, rate) for number in sequences}
    print(json.dumps(machine()))
    rows = [
        (
            engine,
            f"{found['ready']:.1f}",
            *(f"{found[str(n)] / 1e3:.1f}" for n in sequences),
            f"{found['peak GiB']:.1f}",
        )
        for engine, found in report.items()
        if engine in ENGINES
    ]
    rows.append(("roofline", "", *(f"{limits[n] / 1e3:.1f}" for n in sequences), ""))
    print(table(("", "ready s", *(f"{n} sequences, k tokens/s" for n in sequences), "peak GiB"), rows))
    write_json(args.json, tokens_per_second=report, roofline=limits)


def differences(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, dict[str, float]]:
    """Return how far the sampler's log-probs are from those of `log_probs`, by dtype and by `exact`."""
    from rl_models import Actor

    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        actor = Actor.from_pretrained(folder, device=DEVICE, dtype=dtype)
        for exact in (False, True):
            batch = actor.generate(prompts, max_new_tokens=tokens, exact=exact)
            apart = (batch["log_probs"] - actor.log_probs(batch).log_probs)[batch.mask].double().abs()
            ratio = apart.exp().mean()
            name = f"{str(dtype).removeprefix('torch.')}, {'exact' if exact else 'fast'}"
            found[name] = {"mean": float(apart.mean()), "max": float(apart.max()), "mean ratio": float(ratio)}
    return found


def ppo_step(folder: Path, prompts: Sequence[Sequence[int]], n: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each part of a PPO step, in bf16 with fp32 master weights, on one GPU."""
    from rl_models import Actor, Critic, OptimizerOptions, losses

    optimizer = OptimizerOptions(learning_rate=1e-6)
    actor = Actor.from_pretrained(folder, device=DEVICE, optimizer=optimizer)
    critic = Critic.from_pretrained(folder, device=DEVICE, optimizer=optimizer)

    def policy_loss(log_probs: Any, entropy: Any, part: Any) -> Any:
        return losses.ppo_clip(log_probs, part["old_log_probs"], part["advantages"])

    def value_loss(values: Any, part: Any) -> Any:
        return losses.LossTerms((values - part["returns"]) ** 2)

    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        synchronize()
        begun = time.perf_counter()
        result = call()
        synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    def step() -> None:
        batch = timed("generate", lambda: actor.generate(prompts, max_new_tokens=tokens, n=n))
        old = timed("log_probs", lambda: actor.log_probs(batch)).log_probs
        values = timed("values", lambda: critic.values(batch))
        scored = batch.with_fields(old_log_probs=old, advantages=torch.randn_like(old), returns=values)
        timed("actor update", lambda: actor.update(scored, policy_loss))
        timed("critic update", lambda: critic.update(scored, value_loss))

    for _ in range(1 + rounds):
        timed("whole", step)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def trace(call: Callable[[], Any], folder: str) -> None:
    """Write a table of the kernels and of the host's functions of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]) as found:
        call()
        synchronize()
    Path(folder).mkdir(parents=True, exist_ok=True)
    averages = found.key_averages()
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        text = averages.table(sort_by=key, row_limit=40, max_name_column_width=90)
        (Path(folder) / f"{key}.txt").write_text(text)


if __name__ == "__main__":
    main()
