"""Generate responses: `Actor.generate` beside transformers' continuous batching and vLLM, and the roofline.

    python benchmarks/rollouts.py                                  # 1B shape, 256 and 512 sequences
    python benchmarks/rollouts.py --engines ours transformers vllm --json rollouts.json
    python benchmarks/rollouts.py --step                           # a PPO step of an actor and a critic around it
    python benchmarks/rollouts.py --difference                     # the sampler's log-probs against `log_probs`
    python benchmarks/rollouts.py --difference --folder MODEL      # the same for a real model, on a CPU too
    python benchmarks/rollouts.py --shape 8b --engines ours vllm   # one response to each of 128 prompts
    torchrun --nproc-per-node 2 benchmarks/rollouts.py --shape 30b-a3b --dims dp=2,ep=2 --trace
    torchrun --nproc-per-node 2 benchmarks/rollouts.py --shape 8b --dims pp=2 --sequences 128 256
    python benchmarks/rollouts.py --shape 8b --engines vllm --dims tp=2
    python benchmarks/rollouts.py --engines ours ours-tp_invariant # the cost of the bits of `log_probs`
    python benchmarks/rollouts.py --tiny                           # to see that it works, on a CPU too

The shape of Llama 3.2 1B, whose random weights are read from files, has 64 prompts of 96 to 160 tokens with `sequences
/ 64` responses of exactly 256 tokens each. Larger shapes have prompts of 128 to 384 tokens with one response each, and
their random weights are made on the device. Every engine returns the log-prob of each token. Times are medians after
one call that is not counted, each with prompts of its own: no engine can reuse what it has computed. "ready" is the
time from nothing to the end of the first call of a few tokens. The roofline reads all weights and the keys and values
so far at the rate of a copy, divided over the ranks.
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
import torch.distributed as dist
from kernel_times import kernel_times
from measure import CUDA, DEVICE, ceilings, join_ranks, machine, synchronize, table, write_json
from step import LLAMA_3_8B, randomise
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ckpt
from parallel_layers import ModelConfig, ParallelDims
from parallel_models import CausalLM, EngineOptions, Grid
from parallel_models.model import Chunk
from parallel_models.training import ParallelEngine
from rl_models import LossInputs

Generate = Callable[[Sequence[Sequence[int]], int, int], Any]

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
LARGE: dict[str, dict[str, Any]] = {
    "8b": LLAMA_3_8B | {"num_hidden_layers": 32},
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
}


def ours(folder: Path, most: int, dims: ParallelDims, *, tp_invariant: bool = False, **how: Any) -> Generate:
    """Return `Actor.generate`, or without weights in files `generate` of an engine with random weights."""
    from parallel_models import GenerationOptions, generate as draw
    from rl_models import Actor

    if list(folder.glob("*.safetensors")):
        actor = Actor.from_pretrained(folder, device=DEVICE, dims=dims, tp_invariant=tp_invariant)
        return lambda prompts, n, tokens: actor.generate(prompts, max_new_tokens=tokens, n=n, max_sequences=most, **how)
    engine = random_engine(json.loads((folder / "config.json").read_text()), dims, tp_invariant=tp_invariant)

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        own = prompts[engine.grid.rank("dp") :: dims.dp]
        return draw(engine, own, GenerationOptions(max_new_tokens=tokens, n=n, max_sequences=most, **how))

    return generate


def random_engine(hf: dict[str, Any], dims: ParallelDims, **how: Any) -> ParallelEngine:
    """Return an engine in bf16 with random weights, which are made on the device; `how`: further `EngineOptions`."""
    grid, options = Grid.build(dims, device=DEVICE), EngineOptions(dtype=torch.bfloat16, **how)
    axes: dict[str, Any] = {axis: (grid.rank(axis), getattr(dims, axis)) for axis in ("tp", "pp", "ep")}
    place, layout = ckpt.Place(**axes), ckpt.layout_for(hf, target="parallel")
    chunks = layout.chunk_layers(place.grid)
    chunk = Chunk(chunks[place.chunk], first=place.chunk == 0, last=place.chunk == len(chunks) - 1)
    model = CausalLM(
        ModelConfig.from_hf(hf), group=grid.group("tp"), sequence_parallel=dims.tp > 1, chunks=[chunk],
        expert_group=grid.group("ep"), expert_tensor_parallel=dims.expert_tensor_parallel,
        dtype=options.dtype, device="meta", recompute=options.recompute, tp_invariant=options.tp_invariant,
    ).to_empty(device=DEVICE)  # fmt: skip
    randomise(model)
    return ParallelEngine(model, layout, [place], grid, options)


def transformers(folder: Path, most: int, dims: ParallelDims) -> Generate:
    """Return `generate_batch`, transformers' continuous batching."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
    ).to(DEVICE)

    held = 0

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        nonlocal held
        grown = n * len(prompts) > held
        if grown:  # a manager has the size of its first call
            model.destroy_cached_continuous_batching_manager()
            held = n * len(prompts)
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


def vllm(folder: Path, most: int, dims: ParallelDims, **options: Any) -> Generate:
    """Return vLLM's offline engine; its processes hold the ranks of tp, pp and ep, without dp. `options`: of `LLM`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
        gpu_memory_utilization=0.6 if dims.world_size == 1 else 0.85, max_num_seqs=most,
        load_format="auto" if list(folder.glob("*.safetensors")) else "dummy",
        tensor_parallel_size=dims.tp, pipeline_parallel_size=dims.pp, enable_expert_parallel=dims.ep > 1,
        **options,
    )  # fmt: skip

    def generate(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> Any:
        params = SamplingParams(n=n, temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)

    return generate


FLOAT8 = ("float8", "float8_cache")
ENGINES = {"ours": ours, "transformers": transformers, "vllm": vllm} | {
    f"ours-{name}": partial(ours, **{name: True}) for name in (*FLOAT8, "tp_invariant")
}
# Experts that ranks divide: their weights are gathered once a call, or tokens are exchanged in each layer.
ENGINES |= {f"ours-{experts}": partial(ours, experts=experts) for experts in ("gather", "exchange")}


def roofline(
    config: ModelConfig, sequences: int, prompt: float, tokens: int, bytes_per_second: float, dims: ParallelDims
) -> float:
    """Return tokens/s if a step reads the weights and the keys and values once, in bf16, and does nothing else.

    All experts are read. Ranks of tp and ep divide the weights; ranks of dp have copies of all other weights. Each
    stage of pp reads its weights once for each group of sequences.
    """
    with torch.device("meta"):
        model = CausalLM(config)
    weights = {name: weight.numel() for name, weight in model.named_parameters() if "embed_tokens" not in name}
    head = config.vocab_size * config.decoder.hidden_size if config.tie_word_embeddings else 0
    experts = sum(count for name, count in weights.items() if ".experts." in name)
    shapes = [config.layer(number) for number in range(config.num_layers)]
    token = sum(2 * shape.num_kv_heads * (shape.head_dim or 0) for shape in shapes)
    shared = (sum(weights.values()) - experts + head) / dims.tp
    cache = sequences * token * (prompt + tokens / 2) / (dims.tp * dims.dp * dims.pp)
    return sequences * bytes_per_second / (2 * (shared + experts * dims.pp / dims.world_size + cache))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["1b", *LARGE], default="1b", help="The model.")
    parser.add_argument("--layers", type=int, help="Layers of the model (default: all).")
    parser.add_argument("--sequences", type=int, nargs="+", help="Responses of a call (default: 256 512, or 128).")
    parser.add_argument("--tokens", type=int, help="New tokens of each response (default: 256, or 512).")
    parser.add_argument("--dims", default="", help="The grid, such as tp=2 or dp=2,ep=2; for ours under torchrun.")
    parser.add_argument("--engines", nargs="+", default=["ours"], choices=ENGINES, help="Measure these.")
    parser.add_argument("--files", action="store_true", help="Load a large shape's weights from files; on one rank.")
    parser.add_argument("--rounds", type=int, default=3, help="Calls that are counted.")
    parser.add_argument("--step", action="store_true", help="Measure a whole PPO step of the 1B shape, too.")
    parser.add_argument("--difference", action="store_true", help="Compare the sampler's log-probs with training's.")
    parser.add_argument("--folder", type=Path, help="With --difference: measure this checkpoint, and nothing else.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model and few sequences.")
    parser.add_argument("--trace", action="store_true", help="Print the kernels of one call of ours.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    if args.folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.folder, trust_remote_code=False)
        questions = [tokenizer.encode(f"Question: What is {n} plus {97 - n}? Explain.\nAnswer:") for n in range(16)]
        found = differences(args.folder, questions, args.tokens or 256)
        print(json.dumps(machine()))
        columns = list(next(iter(found.values())))
        print(
            table(
                ("", *columns), [(name, *(f"{row[column]:.3g}" for column in columns)) for name, row in found.items()]
            )
        )
        write_json(args.json, differences=found)
        return
    rank, _ = join_ranks()
    dims = ParallelDims.parse(args.dims)
    large = args.shape in LARGE
    shape = LARGE[args.shape] if large else SHAPE
    if args.layers:
        shape |= {"num_hidden_layers": args.layers}
    sequences, tokens = args.sequences or ([128] if large else [256, 512]), args.tokens or (512 if large else 256)
    count = sequences[0] if large else 64
    lengths = torch.linspace(*((128, 384) if large else (96, 160)), count).int().tolist()
    if args.tiny:
        small = (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "num_experts" in shape else {}
        )
        shape, sequences, tokens, lengths = {**shape, **TINY, **small}, [8], args.tokens or 20, [5, 9, 13, 30]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)

    def new_prompts() -> list[list[int]]:
        return [torch.randint(1, shape["vocab_size"], (length,), generator=generator).tolist() for length in lengths]

    prompts = new_prompts()
    rate = ceilings().get("copy_tb_per_s", 0.01) * 1e12
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        if dist.is_initialized():  # all ranks read the first one's files
            names = [name]
            dist.broadcast_object_list(names, device=DEVICE)
            name = names[0]
        if rank == 0:
            write_model(Path(name), shape, weights=args.files or not (large or dist.is_initialized()))
        synchronize()
        config = ModelConfig.from_hf(json.loads((Path(name) / "config.json").read_text()))
        for engine in args.engines:
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            generate: Any = ENGINES[engine](Path(name), max(sequences), dims)
            loaded = time.perf_counter() - begun
            generate(prompts[:4], 1, 4)
            synchronize()
            report[engine] = {"loaded": loaded, "ready": time.perf_counter() - begun}
            for number in sequences:
                seconds = []
                for _ in range(1 + args.rounds):
                    prompts = new_prompts()
                    synchronize()
                    begun = time.perf_counter()
                    generate(prompts, number // len(prompts), tokens)
                    synchronize()
                    seconds.append(time.perf_counter() - begun)
                report[engine][str(number)] = number * tokens / statistics.median(seconds[1:])
                report[engine][f"{number} first"] = number * tokens / seconds[0]
            report[engine]["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
            if rank == 0:
                print(engine, json.dumps(report[engine]), flush=True)
            if args.trace and engine.startswith("ours"):
                few = min(48, tokens)
                found = kernel_times(partial(generate, prompts, sequences[0] // len(prompts), few))
                if rank == 0:
                    print(f"one call of {few} new tokens\n{found}", flush=True)
            generate = None
            if args.difference and engine == "ours":
                report["difference"] = differences(Path(name), prompts, tokens)
                print("difference:", json.dumps(report["difference"]), flush=True)
            if args.step and engine == "ours":
                report["step"] = ppo_step(Path(name), prompts, sequences[0] // len(prompts), tokens, args.rounds)
                print("step, seconds:", json.dumps(report["step"]), flush=True)
    if rank == 0:
        mean = sum(lengths) / len(lengths)
        limits = {number: roofline(config, number, mean, tokens, rate, dims) for number in sequences}
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
    if dist.is_initialized():
        dist.destroy_process_group()


def write_model(folder: Path, shape: dict[str, Any], *, weights: bool) -> None:
    """Write a checkpoint with random weights, or its config alone."""
    config = AutoConfig.for_model(**shape)
    config.architectures = shape["architectures"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    if weights:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
        model.save_pretrained(folder)


def differences(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, dict[str, float]]:
    """Return how far the sampler's log-probs are from those of `log_probs`, by dtype, `exact` and `float8`.

    The mean and the largest absolute difference, and the mean of exp(difference).
    """
    from rl_models import Actor

    found = {}
    for dtype in (torch.bfloat16, torch.float32) if CUDA else (torch.float32,):
        actor = Actor.from_pretrained(folder, device=DEVICE, dtype=dtype)
        for how in ("fast", "exact", *FLOAT8):
            options = {} if how == "fast" else {how: True}
            batch = actor.generate(prompts, max_new_tokens=tokens, **options)
            apart = (batch["log_probs"] - actor.log_probs(batch).log_probs)[batch.mask].double().abs()
            ratio = apart.exp().mean()
            name = f"{str(dtype).removeprefix('torch.')}, {how}"
            found[name] = {"mean": float(apart.mean()), "max": float(apart.max()), "mean ratio": float(ratio)}
    return found


def ppo_step(folder: Path, prompts: Sequence[Sequence[int]], n: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each part of a PPO step, in bf16 with fp32 master weights, on one GPU."""
    from rl_models import Actor, Critic, OptimizerOptions, losses

    optimizer = OptimizerOptions(learning_rate=1e-6)
    actor = Actor.from_pretrained(folder, device=DEVICE, optimizer=optimizer)
    critic = Critic.from_pretrained(folder, device=DEVICE, optimizer=optimizer)

    def policy_loss(inputs: LossInputs) -> Any:
        return losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])

    def value_loss(inputs: LossInputs) -> Any:
        return losses.LossTerms((inputs.values - inputs["returns"]) ** 2)

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


if __name__ == "__main__":
    main()
