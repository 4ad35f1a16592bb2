"""Divide a decoder of parallel-layers by FSDP2 as well: dp 2 x tp 2 on four ranks, in a plain torch program.

    torchrun --nproc-per-node 4 examples/fully_shard.py

This program needs torch and parallel-layers only. The task: token t + 1 follows token t.
"""

import torch
import torch.distributed as dist
from parallel_layers_alone import VOCAB, Model
from torch.distributed.fsdp import fully_shard

from parallel_layers import PackedSequence, ParallelDims, clip_grad_norm_, initialize_


def main(steps: int = 30) -> None:
    # --8<-- [start:shard]
    mesh = ParallelDims(dp=2, tp=dist.get_world_size() // 2).build_mesh("cpu")
    group = mesh.get_group("tp")
    model = Model(group)
    initialize_(model, seed=0, std=0.1)  # before fully_shard
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])  # embedding, norm and head
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # --8<-- [end:shard]
    generator = torch.Generator().manual_seed(0)
    # --8<-- [start:step]
    for step in range(steps):
        starts = torch.randint(VOCAB, (8,), generator=generator).tolist()
        rows = [(start + torch.arange(length)) % VOCAB for start, length in zip(starts, range(5, 13), strict=True)]
        tokens = sum(len(row) - 1 for row in rows)
        # Each rank of dp has its own half of the rows; the ranks of one tp group have the same half.
        packed = PackedSequence.from_sequences(rows[mesh.get_local_rank("dp") :: 2], multiple_of=group.size())
        loss = -model(packed).sum() / tokens  # this rank's part of the mean
        (2 * loss).backward()  # FSDP2 averages the gradients over the two ranks of dp
        clip_grad_norm_(model, 1.0, groups=[group])
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [end:step]
        total = loss.detach()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
