"""An engine trains, generates and saves on a grid as on one rank, without rl-models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import EngineOptions, GenerationOptions, Grid, MicroBatch, OptimizerOptions, Outputs, generate
from parallel_models.training.loading import load_engine

TEXTS = [[1, 5, 7, 9, 11], [3, 4, 2], [8, 8, 6, 1], [2, 60]]
COUNT = sum(len(text) - 1 for text in TEXTS)


def learn(group: ProcessGroup | None, path: Path, out: Path, dims: ParallelDims) -> tuple[float, list[list[int]]]:
    """Take two steps on the texts; return the last gradient norm and greedy responses, and save."""
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    grid = Grid.build(dims, device="cpu", mesh=mesh)
    model = load_engine(str(path), "causal_lm", grid, EngineOptions())
    optimizer = model.build_optimizer(OptimizerOptions())
    own = TEXTS[grid.rank("dp") :: dims.dp]
    parts = own if dims.pp > 1 else [own]  # a pipeline takes several micro-batches
    packs = [
        PackedSequence.from_sequences(
            [torch.tensor(text) for text in (part if dims.pp == 1 else [part])], multiple_of=model.tokens_multiple_of
        )
        for part in parts
    ]

    def loss(micro_batch: MicroBatch, outputs: Outputs) -> Tensor:
        return -outputs[0].sum() / COUNT

    norm = math.nan
    for _ in range(2):
        model.forward_backward([MicroBatch(packed) for packed in packs], loss)
        norm = optimizer.step(1e-2)
    responses = generate(model, [[1, 5], [3]], GenerationOptions(max_new_tokens=4, temperature=0))
    model.save(out)
    return norm, [response.tolist() for response in responses]


@pytest.mark.parametrize("dims", [ParallelDims(dp=2, tp=2), ParallelDims(pp=2), ParallelDims(cp=2)], ids=str)
def test_a_grid_learns_as_one_rank_does(dims: ParallelDims, ranks: RankPool, llama: Path, tmp_path: Path) -> None:
    norm, responses = learn(None, llama, tmp_path / "one", ParallelDims())
    expected = load_file(tmp_path / "one" / "model.safetensors")
    results = ranks.run(learn, llama, tmp_path / "grid", dims, world=dims.world_size)
    for norm_on_rank, responses_on_rank in results:
        assert norm_on_rank == pytest.approx(norm, rel=1e-5)
        assert responses_on_rank == responses
    learned = load_file(tmp_path / "grid" / "model.safetensors")
    assert learned.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(learned[name], tensor, rtol=1e-5, atol=2e-5, msg=name)


def test_prompts_that_are_no_tokens_are_refused(llama: Path) -> None:
    model = load_engine(str(llama), "causal_lm", Grid.build(ParallelDims()), EngineOptions())
    options = GenerationOptions(max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompts \[1\] are no rows of token ids"):
        generate(model, [[1], []], options)
    with pytest.raises(ValueError, match="61"):
        generate(model, [[61]], options)
