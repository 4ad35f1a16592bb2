"""Train a model and save it; a second run, on any number of ranks, goes on where the first one stopped.

torchrun --nproc-per-node 2 resume_layers.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parallel_layers import ColumnParallelLinear, ParallelDims, Placement, RowParallelLinear, initialize_
from parallel_layers.training import TrainingState

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
group = ParallelDims(tp=dist.get_world_size()).build_mesh("cpu").get_group("tp")
divided = {"placement": Placement(group)}
model = torch.nn.Sequential(ColumnParallelLinear(8, 16, **divided), RowParallelLinear(16, 4, **divided))
initialize_(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


def step(number: int) -> float:
    loss = (model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


state = {"app": TrainingState(model, optimizer)}
resumed = folder.exists()
dist.barrier()
if resumed:
    dcp.load(state, checkpoint_id=folder)
else:
    for number in range(3):
        step(number)
    dcp.save(state, checkpoint_id=folder)
losses = [step(number) for number in (3, 4)]
expected = folder.with_suffix(".expected")
if resumed:
    torch.testing.assert_close(losses, [float(loss) for loss in expected.read_text().split()])
elif dist.get_rank() == 0:
    expected.write_text(" ".join(map(str, losses)))
dist.destroy_process_group()
