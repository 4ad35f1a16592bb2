"""GRPO without `rl_models.Actor`: the native model, ckpt for the weights, and torch's optimizer.

    torchrun --nproc-per-node 4 examples/grpo_from_the_pieces.py CHECKPOINT OUT

CHECKPOINT is a folder of any family of the native backend (default: a new small random model). Tensor parallelism
shards the model over the ranks. The task: generate the token 7.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ckpt
from parallel_layers import PackedSequence, ParallelDims, clip_grad_norm_
from rl_models import CausalLM, ModelConfig, losses
from rl_train.quickstart import make_checkpoint

GROUPS, SAMPLES, LENGTH, STEPS = 8, 8, 8, 20


# --8<-- [start:load]
def load(path: Path, group: dist.ProcessGroup) -> tuple[CausalLM, ckpt.Layout, ckpt.Place]:
    """This rank's shards of the checkpoint; each rank reads its own slices."""
    config = ModelConfig.from_hf(path)
    model = CausalLM(config, group=group, sequence_parallel=True)
    layout, place = ckpt.layout_for(path), ckpt.Place(tp=(group.rank(), group.size()))
    ckpt.load_hf(path, layout, place, into=model.state_dict(), group=group)
    return model, layout, place


# --8<-- [end:load]


# --8<-- [start:generate]
@torch.no_grad()
def generate(model: CausalLM, prompts: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Continue prompts of one length by `LENGTH` tokens, with a KV cache."""
    cache = model.new_cache(len(prompts), len(prompts[0]) + LENGTH)
    rows, new = prompts, prompts
    for _ in range(LENGTH):
        packed = PackedSequence.from_sequences(new, multiple_of=model.tokens_multiple_of)
        # Positions continue after the tokens in the cache.
        packed = dataclasses.replace(packed, position_ids=packed.position_ids + len(rows[0]) - len(new[0]))
        logits = model.next_logits(packed, cache=cache)[: len(rows)]
        new = list(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        rows = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
    return rows


# --8<-- [end:generate]


# --8<-- [start:log_probs]
def log_probs(model: CausalLM, rows: list[Tensor]) -> Tensor:
    """Return log-probs of the responses' tokens `[N, LENGTH]`; a position holds the number of the next token."""
    packed = PackedSequence.from_sequences(rows, multiple_of=model.tokens_multiple_of)
    flat = model.log_probs(packed, entropy=False).log_probs
    return torch.stack([part[-LENGTH - 1 : -1] for part in flat[: sum(map(len, rows))].split([len(r) for r in rows])])


# --8<-- [end:log_probs]


def main(checkpoint: Path, out: Path) -> None:
    group = ParallelDims(tp=dist.get_world_size()).build_mesh("cpu").get_group("tp")
    model, layout, place = load(checkpoint, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    # --8<-- [start:step]
    for step in range(STEPS):
        prompts = [torch.tensor([1, 4 + i]) for i in range(GROUPS) for _ in range(SAMPLES)]
        rows = generate(model, prompts, generator)
        scores = torch.stack([(row[-LENGTH:] == 7).float().mean() for row in rows])
        groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
        advantages = losses.grpo_advantages(scores, groups)[:, None].expand(-1, LENGTH)
        with torch.no_grad():
            old = log_probs(model, rows)
        for _ in range(2):
            new = log_probs(model, rows)
            loss = losses.ppo_clip(new.flatten(), old.flatten(), advantages.flatten()).loss.mean()
            loss.backward()
            clip_grad_norm_(model, 1.0, groups=[group])
            optimizer.step()
            optimizer.zero_grad()
        # --8<-- [end:step]
        if dist.get_rank() == 0:
            print(f"step {step}: reward {scores.mean():.3f}", flush=True)
    # --8<-- [start:save]
    ckpt.save_hf(out, model.state_dict(), layout, place, group=group, copy_from=checkpoint)
    # --8<-- [end:save]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            # Every rank makes the same small model in its own folder; the result goes to the first rank's folder.
            make_checkpoint(Path(folder) / "start", seed=0)
            folders: list[str] = [folder] * dist.get_world_size()
            dist.all_gather_object(folders, folder)
            main(Path(folder) / "start", Path(folders[0]) / "learned")
            dist.barrier()
    dist.destroy_process_group()
