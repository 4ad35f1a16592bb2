"""Megatron-Core reads what `ckpt.to_megatron` writes, and `ckpt.merge` reads what Megatron-Core writes, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from tests.test_megatron_checkpoints import GRIDS, MIXTURES, MODELS, Saved, saved as saved
from torch.distributed import ProcessGroup

from ckpt import Checkpoint, Grid, Place, layout_for, load_hf, load_training, merge, save_training, to_megatron, verify
from ckpt.training import megatron_to_training, training_to_megatron
from megatron_utils import megatron_grid
from megatron_utils.dist_checkpointing import latest_step, load_checkpoint, save_checkpoint
from megatron_utils.gpt import build_gpt
from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models.engine import carry

QUICK = {("qwen3-vl-moe", "tp2 pp2")}
CASES = [
    pytest.param(name, grid, marks=() if (name, grid) in QUICK else pytest.mark.slow, id=f"{name}-{grid}")
    for name, config in MODELS.items()
    for grid in ("one", "tp2 pp2", "pp2 vpp2", "tp2 ep2", "tp2")
    if GRIDS[grid][0].ep == 1 or config["model_type"] in MIXTURES
]
# The grid whose ranks' parts the files of a conversion hold: another grid than the one that loads.
WRITTEN_FOR = {
    "one": Grid(tp=2, pp=2),
    "tp2 pp2": Grid(),
    "tp2 ep2": Grid(pp=4),
    "tp2": Grid(pp=2),
    "pp2 vpp2": Grid(tp=4),
}


def load_and_save_on(
    group: ProcessGroup, source: str, run: Path, out: Path, dims: ParallelDims, virtual_stages: int | None
) -> list[str]:
    """Load a run by Megatron-Core's own reader, and save it by its own writer in two forms; return wrong tensors."""
    with (
        cpu_stand_in(),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid,
    ):
        chunks = build_gpt(source, grid)
        layout, groups = layout_for(source, target="megatron"), grid.groups
        axes = {"tp": groups.tp, "pp": groups.pp, "ep": groups.ep, "etp": groups.expt_tp}
        place = {axis: (part.rank(), part.size()) for axis, part in axes.items()}
        places = [Place(**place, vpp=(number, len(chunks))) for number in range(len(chunks))]
        if places[0].chunk == 0:
            carry(chunks[0], layout, Checkpoint(source), "cpu")

        def state(metadata: Mapping[str, Any]) -> dict[str, Any]:
            described = {**metadata, "dp_cp_group": groups.dp_cp}
            return {
                f"model{number}": chunk.sharded_state_dict(metadata=described) for number, chunk in enumerate(chunks)
            }

        for parameter in (tensor for chunk in chunks for tensor in chunk.state_dict().values() if tensor is not None):
            parameter.zero_()
        with grid.as_world():
            metadata = dist_checkpointing.load_content_metadata(str(run / "release"))
            loaded = dist_checkpointing.load(without_extra(state(metadata)), str(run / "release"), strict="raise_all")
            for number, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[f"model{number}"], strict=False)
            for form in ("stacked", "numbered"):
                content = {"non_homogeneous_layers": form == "numbered"}
                dist_checkpointing.save(state(content), str(out / form), content_metadata=content)
        wrong = []
        for chunk, at in zip(chunks, places, strict=True):
            held = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
            expected = load_hf(source, layout, at, group=group)
            wrong += [name for name, value in expected.items() if not torch.equal(held[name], value)]
        return wrong


def without_extra(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the entries `_extra_state`, which are empty outside of FP8 training."""
    return {
        chunk: {name: value for name, value in tensors.items() if not name.endswith("_extra_state")}
        for chunk, tensors in state.items()
    }


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_megatron_core_reads_and_writes_the_same_tensors(
    ranks: RankPool, saved: Callable[[Mapping[str, Any]], Saved], tmp_path: Path, name: str, grid: str
) -> None:
    dims, virtual_stages = GRIDS[grid]
    source = saved(MODELS[name]).folder / "weights"
    to_megatron(source, tmp_path / "run", WRITTEN_FOR[grid], target="megatron", vocab_multiple=8)
    for form in ("stacked", "numbered"):
        (tmp_path / form).mkdir()
    wrong = ranks.run(
        load_and_save_on, str(source), tmp_path / "run", tmp_path, dims, virtual_stages, world=dims.world_size
    )
    assert wrong == [[]] * dims.world_size
    for form in ("stacked", "numbered"):
        merge(tmp_path / form, tmp_path / f"from-{form}", copy_from=source)
        assert verify(source, tmp_path / f"from-{form}").equal


def save_run_on(group: ProcessGroup, source: str, root: Path, dims: ParallelDims) -> None:
    """Save a training run by megatron_utils."""
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size)) as grid:
        chunks = build_gpt(source, grid)
        layout, groups = layout_for(source, target="megatron"), grid.groups
        place = Place(tp=(groups.tp.rank(), groups.tp.size()))
        held = {**{n: p.data for n, p in chunks[0].named_parameters()}, **dict(chunks[0].named_buffers())}
        load_hf(source, layout, place, into={name: held[name] for name in layout.at(place)}, group=group)
        model = wrap_data_parallel(chunks, grid)
        save_checkpoint(root, 3, Optimizer(model, grid, OptimizerConfig(lr=1e-3)), grid)


def test_a_run_of_megatron_utils_is_read(
    ranks: RankPool, saved: Callable[[Mapping[str, Any]], Saved], tmp_path: Path
) -> None:
    source = saved(MODELS["qwen3-moe"]).folder / "weights"
    ranks.run(save_run_on, str(source), tmp_path / "run", ParallelDims(tp=2), world=2)
    merge(tmp_path / "run" / f"step-{latest_step(tmp_path / 'run')}", tmp_path / "back", copy_from=source)
    assert verify(source, tmp_path / "back").equal


def load_and_save_run_on(group: ProcessGroup, source: str, run: Path, out: Path, dims: ParallelDims) -> int:
    """Load a converted training run into Megatron-Core's distributed optimizer, and save the run; return the step."""
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size)) as grid:
        chunks = build_gpt(source, grid, dtype=torch.bfloat16)
        model = wrap_data_parallel(chunks, grid, distributed=True)
        optimizer = Optimizer(model, grid, OptimizerConfig(lr=1e-3, precision="bf16", distributed=True))
        loaded = load_checkpoint(run, optimizer, grid)
        save_checkpoint(out, loaded.step, optimizer, grid)
        return optimizer.steps


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param("qwen3-moe", ParallelDims(dp=2, ep=2), id="qwen3-moe", marks=pytest.mark.slow),
        pytest.param("llama-biased", ParallelDims(tp=2, dp=2), id="llama", marks=pytest.mark.slow),
        pytest.param("qwen2-tied", ParallelDims(tp=2), id="tied", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", ParallelDims(tp=2), id="deepseek-v3", marks=pytest.mark.slow),
    ],
)
def test_optimizer_state_goes_to_the_distributed_optimizer_and_comes_back(
    ranks: RankPool, saved: Callable[[Mapping[str, Any]], Saved], tmp_path: Path, name: str, dims: ParallelDims
) -> None:
    source = saved(MODELS[name]).folder / "weights"
    layout = layout_for(source)
    weights = load_hf(source, layout, dtype=torch.bfloat16)
    state = {
        name: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(weight.shape),
            "exp_avg_sq": torch.rand(weight.shape),
            "master": weight.float() * (1 + 1e-4 * torch.rand(weight.shape)),
        }
        for name, weight in weights.items()
        if not name.endswith("e_score_correction_bias")
    }
    save_training(tmp_path / "training", 20, weights, layout, optimizer=state)
    training_to_megatron(tmp_path / "training", tmp_path / "run", Grid(tp=2), target="megatron")
    steps = ranks.run(
        load_and_save_run_on, str(source), tmp_path / "run", tmp_path / "saved", dims, world=dims.world_size
    )
    assert steps == [7] * dims.world_size
    megatron_to_training(tmp_path / "saved" / "step-7", tmp_path / "back", copy_from=source)
    before, after = (load_training(tmp_path / folder, layout) for folder in ("training", "back"))
    assert after.step == 7
    assert_equal(after.tensors, weights)
    for name, slots in before.optimizer.items():
        assert_equal(after.optimizer[name], slots)


def assert_equal(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype, name
        assert torch.equal(tensors[name], value), name
