"""Rollouts of vLLM with FP8 weights that an actor sends: log-probs before and after updates, and the time of each.

    python benchmarks/fp8_rollouts.py llama            # on a GPU, with vLLM; or qwen3_moe
    python benchmarks/fp8_rollouts.py llama --plain    # the same without FP8, also on a CPU

The first columns compare the engine's log-probs of the tokens that it drew with transformers, which computes in bf16
with the same weights, dequantized: what quantising the activations changes. The last ones compare them with the
actor's own: what importance sampling corrects. Equal rows before and after updates show that weights and scales arrive.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from block_fp8 import MODELS, make
from measure import DEVICE, machine, table, write_json
from transformers import AutoModelForCausalLM

import ckpt

PROMPTS = torch.randint(3, 4000, (16, 32), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def by_transformers(folder: Path, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs `[T]` of each row's tokens, aligned with the tokens; the first is 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).to(DEVICE)
    found = []
    for row in rows:
        tokens = row.to(DEVICE)
        log_probs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(torch.cat([log_probs.new_zeros(1), log_probs]).cpu())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--plain", action="store_true", help="Send plain weights.")
    parser.add_argument("--apart", action="store_true", help="Start the engine in a process of its own.")
    parser.add_argument("--updates", type=int, default=2, help="Number of updates.")
    parser.add_argument("--tokens", type=int, default=64, help="Tokens of a response.")
    parser.add_argument("--json", help="Write the figures to this file.")
    args = parser.parse_args()
    from weight_sync import PLACES, seconds

    from parallel_models import SamplingOptions
    from rl_models import Actor
    from rl_train.engines import VllmEngine

    kind, values = MODELS[args.model]
    quantization = None if args.plain else "fp8"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "source")
        make(kind(**values), source)
        actor = Actor.from_pretrained(source, device=DEVICE)
        devices = PLACES["another process"] if args.apart else None
        settings = {"max_model_len": 256, "max_num_seqs": 64, "memory": 0.2, "enforce_eager": True}
        engine = VllmEngine(actor, source, devices=devices, quantization=quantization, **settings)
        sync_seconds = float("nan")
        for version in range(1 + args.updates):
            batch = engine.generate(PROMPTS, SamplingOptions(args.tokens, n=2, seed=version))
            plain, fp8, back = (Path(name, f"{version}-{part}") for part in ("plain", "fp8", "back"))
            actor.save_pretrained(plain)
            if quantization is not None:
                ckpt.merge(plain, fp8, format="fp8")
                ckpt.merge(fp8, back, dtype=torch.bfloat16)
            reference = torch.cat(by_transformers(back if quantization else plain, batch.split()))
            own = actor.log_probs(batch).log_probs.cpu()
            away = [(batch["log_probs"] - other).abs()[batch.mask] for other in (reference, own)]
            rows.append((version, sync_seconds, *(x for one in away for x in (one.mean().item(), one.max().item()))))
            print(rows[-1], flush=True)
            for parameter in actor.engine.module.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
            sync_seconds = seconds(lambda to=version + 1: engine.update_weights(actor, to))
        engine.close()
    print(machine(), args.model, quantization or "plain weights")
    heads = ("updates", "weight sync s", "from transformers: mean", "largest", "from the actor: mean", "largest")
    print(table(heads, rows))
    write_json(args.json, model=args.model, quantization=quantization, rows=rows)


if __name__ == "__main__":
    main()
