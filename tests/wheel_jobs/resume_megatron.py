"""Train a model and save it; a second run, on any number of ranks, goes on where the first one stopped.

torchrun --nproc-per-node 2 resume_megatron.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_utils import megatron_grid
from megatron_utils.dist_checkpointing import latest_step, load_checkpoint, save_checkpoint
from megatron_utils.gpt import build_gpt
from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
from megatron_utils.pipeline_parallel import run_schedule
from megatron_utils.testing import cpu_stand_in, tiny_config
from parallel_layers import PackedSequence, ParallelDims, next_token_labels


def main(folder: Path) -> None:
    """Compare the losses after the resume with those of the run that went on."""
    dims = ParallelDims(tp=dist.get_world_size())
    with cpu_stand_in(), megatron_grid(dims, seed=0) as grid:
        chunks = build_gpt(tiny_config("llama"), grid)
        for parameter in (p for chunk in chunks for p in chunk.parameters() if p.dim() == 2):
            torch.nn.init.normal_(parameter, std=0.1)
        model = wrap_data_parallel(chunks, grid)
        optimizer = Optimizer(model, grid, OptimizerConfig(lr=1e-2))
        batch = PackedSequence.from_sequences([torch.arange(12), torch.arange(4)])
        labels = [next_token_labels(batch)]

        def step() -> float:
            optimizer.zero_grad()
            outputs = run_schedule(model, [batch], grid, labels=labels, loss=lambda output, _: -output.log_probs.sum())
            optimizer.step()
            return -outputs[0].log_probs.sum().item()

        resumed, expected = latest_step(folder) is not None, folder.with_suffix(".expected")
        dist.barrier()
        if resumed:
            load_checkpoint(folder, optimizer, grid)
        else:
            step()
            save_checkpoint(folder, 1, optimizer, grid)
        losses = [step() for _ in range(2)]
        if resumed:
            torch.testing.assert_close(losses, [float(loss) for loss in expected.read_text().split()])
        elif dist.get_rank() == 0:
            expected.write_text(" ".join(map(str, losses)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
