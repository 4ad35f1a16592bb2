"""Adapters on Megatron-Core's linears: PEFT's log-probs and gradients, and the files of the native backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.adapted_models import TARGETS, check, curve, resumed, save_adapted, written

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import MegatronOptions

ON_MEGATRON = {
    "llama": [
        ParallelDims(), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(pp=2, tp=2), ParallelDims(cp=2, tp=2),
        ParallelDims(dp=2, tp=2), ParallelDims(dp=2, pp=2),
    ],
    "partly": [ParallelDims(), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(dp=4)],
    "latent": [ParallelDims(tp=2), ParallelDims(pp=2, tp=2), ParallelDims(dp=2, cp=2)],
    "routed": [ParallelDims(), ParallelDims(tp=2, ep=2), ParallelDims(dp=2, ep=2, pp=2)],
}  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models."""
    return save_adapted(tmp_path_factory.mktemp("lora"), list(ON_MEGATRON))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dims", "sequence_parallel"),
    [
        *((name, dims, None) for name, grids in ON_MEGATRON.items() for dims in grids),
        *((name, ParallelDims(tp=2), False) for name in ("llama", "partly", "latent")),
    ],
    ids=str,
)
def test_megatron_core_gives_what_peft_gives(
    ranks: RankPool, folders: Path, name: str, dims: ParallelDims, sequence_parallel: bool | None, tmp_path: Path
) -> None:
    check(ranks, folders, name, dims, tmp_path, "megatron", sequence_parallel)


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(dims, marks=pytest.mark.gpu(dims.world_size))
        for dims in (ParallelDims(), ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2, tp=2))
    ],
)
def test_megatron_core_on_gpus_gives_what_peft_gives(
    four_nccl_ranks: RankPool, folders: Path, dims: ParallelDims, tmp_path: Path
) -> None:
    check(four_nccl_ranks, folders, "llama", dims, tmp_path, "megatron", None, "cuda")


@pytest.mark.slow
def test_files_of_megatron_core_are_those_of_every_grid(ranks: RankPool, folders: Path, tmp_path: Path) -> None:
    folder, targets = folders / "llama", TARGETS["llama"][0]
    written(None, folder, ParallelDims(), tmp_path / "native")
    grids = {
        "divided": (ParallelDims(dp=2, tp=2), MegatronOptions()),
        "staged": (ParallelDims(pp=2, tp=2), MegatronOptions()),
        "whole": (ParallelDims(dp=2, pp=2), MegatronOptions(distributed_optimizer=False)),
    }
    for name, (dims, options) in grids.items():
        ranks.run(written, folder, dims, tmp_path / name, "megatron", megatron=options, world=dims.world_size)
        for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "merged/model.safetensors"):
            assert (tmp_path / "native" / file).read_bytes() == (tmp_path / name / file).read_bytes(), (name, file)
    learned = load_file(tmp_path / "native" / "learned" / "adapter_model.safetensors")
    # Resumed on another grid or backend, with the moments of the adapters.
    for source, dims, backend in (
        ("native", ParallelDims(dp=2, tp=2), "megatron"),
        ("divided", ParallelDims(pp=2), "megatron"),
        ("staged", ParallelDims(dp=2), "parallel"),
        ("whole", ParallelDims(tp=2), "megatron"),
    ):
        ranks.run(resumed, folder, dims, tmp_path / source, backend, targets, world=dims.world_size)
        for name, tensor in load_file(tmp_path / source / "resumed" / "adapter_model.safetensors").items():
            torch.testing.assert_close(tensor, learned[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_twenty_steps_are_those_of_the_native_layers(ranks: RankPool, folders: Path) -> None:
    one = curve(None, folders / "llama", ParallelDims())
    for dims in (ParallelDims(dp=2), ParallelDims(pp=2, tp=2)):
        (found, *_) = ranks.run(curve, folders / "llama", dims, "megatron", world=dims.world_size)
        torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-3)
    # Dropout draws alike at every tp, and as on the native layers.
    dropped = curve(None, folders / "llama", ParallelDims(), dropout=0.3)
    assert abs(dropped[1] - one[1]) > 1e-3
    for dims in (ParallelDims(), ParallelDims(tp=2)):
        (found, *_) = ranks.run(curve, folders / "llama", dims, "megatron", 0.3, world=dims.world_size)
        torch.testing.assert_close(found, dropped, rtol=1e-3, atol=1e-3)
