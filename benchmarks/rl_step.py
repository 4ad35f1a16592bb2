"""The whole step of GRPO by `rl-train`'s own loop: draw, reward, log-probs, update and hand-over of weights.

    python benchmarks/rl_step.py --shape 30b-a3b --gpus 4          # all GPUs draw and learn
    python benchmarks/rl_step.py --shape 8b --gpus 4 --modes colocated apart
    python benchmarks/rl_step.py --shape 8b --layers 8 --gpus 2 --prompts 2
    python benchmarks/rl_step.py --shape 8b --gpus 4 --modes colocated trl    # TRL with vLLM on the same GPUs
    python benchmarks/rl_step.py --tiny                            # to see that it works, on CPUs

"apart": the first half of the GPUs learns, the second half draws with updates in flight and a staleness of one step.

The sizes are those of Qwen3-30B-A3B, on policy, in the performance summary of NeMo-RL 0.6
(https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html; 32 H100s, bf16): 32 responses to a prompt, at
most 4096 tokens a sequence and 3203 on average, 64 sequences of a step a GPU, four optimizer steps a step, and a KL
penalty against a reference. Random weights draw nearly uniformly, so the lengths of responses are geometric with as
many stop ids as give that mean, cut at the longest. Rewards are random.

tokens/s/GPU are the tokens of prompts and responses that the step learns from, by the seconds of the step and by all
GPUs, as NeMo-RL counts them. The first steps are not counted. "idle": the share of the time, by nvidia-smi, in which no
kernel runs on a GPU, the mean of the GPUs that learn and of those that draw (- where there is no GPU). TRL shards by
FSDP2, draws by vLLM (where there is a GPU), and takes four sequences a pass.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from measure import CUDA, machine, table, write_json
from random_run import PHASES, run_steps, write_run
from rollouts import LARGE, TINY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

# Tokens/s/GPU of NeMo-RL 0.6 on H100s, bf16 (the page above), on policy and one step off.
NEMO_RL = {"30b-a3b": {"colocated": 1102, "apart": 1414}}
LONGEST, MEAN, PROMPT = 4096, 3203, 128  # tokens of a sequence at most and on average, and of its prompt
SAMPLES, UPDATES = 32, 4  # responses to a prompt, and optimizer steps of a step
KL, RATE = 0.01, 3e-7
TRL = "trl"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LARGE, default="8b", help="The model.")
    parser.add_argument("--layers", type=int, help="Layers of the model (default: all).")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="GPUs, or processes on CPUs.")
    parser.add_argument("--modes", nargs="+", default=["colocated", "apart"], choices=["colocated", "apart", TRL])
    parser.add_argument("--prompts", type=int, help="Prompts of a step (default: two a GPU, so 64 sequences a GPU).")
    parser.add_argument("--rounds", type=int, default=2, help="Steps that are counted.")
    parser.add_argument("--folder", type=Path, help="Keep the checkpoint here, or take it from here.")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="Further options of rl-train.")
    parser.add_argument("--tiny", action="store_true", help="A tiny model and few tokens.")
    parser.add_argument("--json", help="Write the figures to this file.")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        by_trl(args.folder, **json.loads(args.peer))
        return
    shape, longest, mean, length, samples = LARGE[args.shape], LONGEST, MEAN, PROMPT, SAMPLES
    if args.layers:
        shape |= {"num_hidden_layers": args.layers}
    if args.tiny:
        mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shape = {**shape, **TINY, **(mixture if "num_experts" in shape else {})}
        longest, mean, length, samples = 32, 24, 5, 4
    prompts = args.prompts or 2 * args.gpus
    sizes: dict[str, Any] = {
        "prompts_per_step": prompts,
        "samples": samples,
        "mini_batch": prompts * samples // UPDATES,
        "max_new_tokens": longest - length,
        "stop_ids": ",".join(map(str, range(stop_ids(mean - length, longest - length, shape["vocab_size"])))),
        "objective.kl_coefficient": KL,
        "learning_rate": RATE,
        **({} if args.tiny else {"recompute": "full"}),
        **({"optimizer.moments": "int8"} if "num_experts" in shape else {}),
        **dict(option.split("=", 1) for option in args.options),
    }
    report = {}
    with tempfile.TemporaryDirectory() as name:
        folder, work = (args.folder or Path(name) / "model").absolute(), Path(name)
        write_run(folder, work, shape, length)
        os.chdir(work)
        for mode in args.modes:
            if mode == TRL:
                report[mode] = beside(folder, work, args, sizes, shape["vocab_size"])
            else:
                grid = places(mode, args.gpus, mixture="num_experts" in shape)
                report[mode] = measure(folder, work, mode, args, sizes | grid)
            whole = not args.layers and not args.tiny
            report[mode]["NeMo-RL 0.6, H100"] = NEMO_RL.get(args.shape, {}).get(mode, math.nan) if whole else math.nan
            print(mode, json.dumps(report[mode]), flush=True)
    print(json.dumps(machine()))
    columns = list(next(iter(report.values())))
    rows = [(mode, *(figures.get(column, math.nan) for column in columns)) for mode, figures in report.items()]
    print(table(("", *columns), rows))
    write_json(args.json, modes=report, options=sizes)


def places(mode: str, gpus: int, *, mixture: bool) -> dict[str, Any]:
    """Return the options of the grids: each GPU has a share of the batch, and of the experts."""
    learners = gpus if mode == "colocated" else gpus // 2
    grid = f"dp={learners},ep={learners}" if mixture else f"dp={learners}"
    if mode == "colocated":
        return {"dims": grid}
    drawers = ",".join(map(str, range(learners, gpus))) if CUDA else "cpu"
    # The states of a whole mixture do not fit the learners' half of four GPUs.
    offload = {"optimizer.offload": True} if mixture and CUDA else {}
    return {"dims": grid, "rollouts.devices": drawers, "in_flight": True, "staleness": 1, **offload}


def stop_ids(mean: int, longest: int, vocab_size: int) -> int:
    """Return the number of stop ids with which uniform draws, cut at `longest`, have `mean` tokens or fewer."""
    count = 1
    while True:
        keep = 1 - count / vocab_size
        # The expectation of min(G, longest) for the geometric G, the draw that ends the response.
        if (1 - keep**longest) / (1 - keep) <= mean:
            return count
        count += 1


def measure(
    folder: Path, work: Path, mode: str, args: argparse.Namespace, options: Mapping[str, Any]
) -> dict[str, float]:
    """Run the steps of a mode, and return its figures."""
    warm_up = 1 + options.get("staleness", 0)
    records, idle = run_steps(folder, work, mode, warm_up=warm_up, rounds=args.rounds, options=options)
    seconds = sum(record["seconds"] for record in records)
    tokens = sum(record["tokens"] for record in records)
    learners = args.gpus if mode == "colocated" else args.gpus // 2
    apart = idle[learners : args.gpus]
    return {
        "tokens/s/GPU": tokens / seconds / args.gpus,
        "s a step": seconds / len(records),
        **{f"{phase} s": sum(record[f"seconds_{phase}"] for record in records) / len(records) for phase in PHASES},
        "MFU %": 100 * sum(record.get("mfu", math.nan) * record["seconds"] for record in records) / seconds,
        "learners idle %": sum(idle[:learners]) / learners if idle else math.nan,
        "drawers idle %": sum(apart) / len(apart) if apart else math.nan,
        "tokens a sequence": tokens / sum(record["responses"] for record in records),
    }


def beside(
    folder: Path, work: Path, args: argparse.Namespace, sizes: Mapping[str, Any], vocab_size: int
) -> dict[str, float]:
    """Run the steps by TRL, and return its figures."""
    names = Tokenizer(WordLevel({f"t{id}": id for id in range(vocab_size)}, unk_token="t0"))
    names.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=names, pad_token="t0", eos_token="t0").save_pretrained(folder)
    given = {name: sizes[name] for name in ("prompts_per_step", "samples", "max_new_tokens", "stop_ids")}
    given |= {"work": str(work), "rounds": args.rounds, "ranks": args.gpus if CUDA else 1}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given['ranks']}"]
    command = [*torchrun, __file__, "--folder", str(folder), "--peer", json.dumps(given)]
    subprocess.run(command, check=True)
    seconds, tokens = json.loads((work / "trl.json").read_text())
    return {"tokens/s/GPU": tokens / seconds / given["ranks"], "s a step": seconds / args.rounds}


def by_trl(
    folder: Path,
    *,
    work: str,
    prompts_per_step: int,
    samples: int,
    max_new_tokens: int,
    stop_ids: str,
    rounds: int,
    ranks: int,
) -> None:
    """Run the steps by GRPOTrainer on this rank, and write the seconds and tokens of those that are counted."""
    import random

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (Path(work) / "prompts.jsonl").read_text().splitlines()]
    prompts = [{"prompt": " ".join(f"t{token}" for token in row["tokens"])} for row in rows]
    batch = prompts_per_step * samples
    share = min(4, batch // ranks // UPDATES)
    passes = batch // ranks // share
    stops = [int(id) for id in stop_ids.split(",")]
    sharded: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}} if ranks > 1 else {}
    config = GRPOConfig(
        output_dir=str(Path(work) / "trl"),
        max_steps=UPDATES * (1 + rounds) + 1,
        per_device_train_batch_size=share,
        steps_per_generation=passes,
        gradient_accumulation_steps=passes // UPDATES,
        num_generations=samples,
        max_completion_length=max_new_tokens,
        beta=KL,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        bf16=CUDA,
        use_cpu=not CUDA,
        gradient_checkpointing=True,
        use_vllm=CUDA,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=CUDA,
        generation_kwargs={"stop_token_ids" if CUDA else "eos_token_id": stops},
        model_init_kwargs={"dtype": "bfloat16" if CUDA else "float32"},
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **sharded,
    )
    ends: list[tuple[float, float]] = []

    class Record(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "num_tokens" in logs:  # after the first update with new responses
                torch.cuda.synchronize() if CUDA else None
                ends.append((time.monotonic(), logs["num_tokens"]))

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    trainer = GRPOTrainer(str(folder), reward, config, Dataset.from_list(prompts), callbacks=[Record()])
    trainer.train()
    (began, before), (ended, after) = ends[1], ends[1 + rounds]
    if trainer.accelerator.is_main_process:
        (Path(work) / "trl.json").write_text(json.dumps([ended - began, after - before]))


if __name__ == "__main__":
    main()
