"""A run that is saved on one grid and goes on on another has the losses of the run that never stopped."""

import errno
import os
import pickle
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import tiny_config
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankDied, RankPool
from parallel_layers.training import Schedule

DENSE, MOE = tiny_config("qwen3"), tiny_config("qwen3_moe", mlp_only_layers=[0])
TIED = tiny_config("qwen2", tie_word_embeddings=True)


class Run:
    """A small training run on a grid, started from the same weights on every grid."""

    def __init__(
        self,
        grid: Any,
        hf: dict[str, Any],
        *,
        distributed: bool,
        virtual_stages: int | None = None,
        overlap: bool = False,
        frozen: bool = False,
        precision: str = "fp32",
        seed: int = 0,
    ) -> None:
        from megatron_utils.gpt import build_gpt
        from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel

        self.grid = grid
        # A loss scale that doubles every other step.
        config = OptimizerConfig(
            lr=2e-2, distributed=distributed, precision=precision, initial_loss_scale=64.0, loss_scale_window=2
        )
        chunks = build_gpt(hf, grid, dtype=config.dtype)
        for chunk in chunks:
            for parameter in chunk.parameters():
                torch.manual_seed(seed)
                parameter.data.normal_(0, 0.3)
                parameter.requires_grad_(not (frozen and grid.is_first_stage))
        self.wrapped = wrap_data_parallel(
            chunks, grid, distributed=distributed, overlap=overlap, bucket_size=500 if overlap else None
        )
        self.optimizer = Optimizer(self.wrapped, grid, config, Schedule("cosine", total_steps=12, min_ratio=0.1))

    def steps(self, first: int, last: int) -> list[float]:
        """Train from step `first` to before `last`, all replicas on the whole batch; the losses, and their scale."""
        from megatron_utils.pipeline_parallel import run_schedule

        losses = []
        device = next(self.wrapped[0].module.parameters()).device
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            packed = [
                PackedSequence.from_sequences(
                    [torch.randint(0, DENSE["vocab_size"], (n,), generator=generator).to(device) for n in lengths],
                    multiple_of=4,
                )
                for lengths in ((5, 7), (9,))
            ]
            labels = [next_token_labels(part) for part in packed]

            def loss(output: Any, _: int) -> Tensor:
                return -output.log_probs.mean()

            self.optimizer.zero_grad()
            scale = self.optimizer.scale_loss
            outputs = run_schedule(self.wrapped, packed, self.grid, labels=labels, loss=loss, grad_scale=scale)
            losses.append(sum(-output.log_probs.mean().item() for output in outputs))
            assert not self.optimizer.step().skipped
        return [*losses, self.optimizer.loss_scale or 0.0]


def save_on(
    group: ProcessGroup, root: str, dims: ParallelDims, options: dict[str, Any], asynchronous: bool = False
) -> list[float]:
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import latest_step, save_checkpoint
    from megatron_utils.testing import device_of

    stages = options["virtual_stages"]
    with (
        device_of(group) as device,
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=stages, seed=5) as grid,
    ):
        run = Run(grid, **options)
        run.steps(0, 3)
        torch.rand(group.rank() + 1, device=device)
        pending = save_checkpoint(root, 3, run.optimizer, grid, extra={"note": [1, 2]}, asynchronous=asynchronous)
        if asynchronous:
            # what happens to the model meanwhile is not saved
            kept = [parameter.data.clone() for parameter in run.wrapped[0].parameters()]
            for parameter in run.wrapped[0].parameters():
                parameter.data.zero_()
            assert latest_step(root) is None
            # All ranks ask equally often: each time, all of them learn whether all have written.
            while not pending.poll():
                assert not pending.done
                assert latest_step(root) is None
            pending.wait()
            assert pending.done
            assert latest_step(root) == 3
            for parameter, values in zip(run.wrapped[0].parameters(), kept, strict=True):
                parameter.data.copy_(values)
        expected = torch.rand((), device=device).item()
        return [expected, *run.steps(3, 6)]


def resume_on(group: ProcessGroup, root: str, dims: ParallelDims, options: dict[str, Any]) -> tuple[Any, ...]:
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import load_checkpoint
    from megatron_utils.testing import device_of

    stages = options["virtual_stages"]
    with (
        device_of(group) as device,
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=stages, seed=6) as grid,
    ):
        run = Run(grid, **options, seed=1)
        loaded = load_checkpoint(root, run.optimizer, grid)
        assert loaded.step == 3
        assert loaded.extra == {"note": [1, 2]}
        assert run.optimizer.steps == 3
        number = torch.rand((), device=device).item()
        return loaded.random_restored, number, *run.steps(3, 6)


def case(
    hf: dict[str, Any],
    distributed: bool = False,
    virtual_stages: int | None = None,
    overlap: bool = False,
    frozen: bool = False,
    precision: str = "fp32",
) -> dict[str, Any]:
    names = "hf", "distributed", "virtual_stages", "overlap", "frozen", "precision"
    return dict(zip(names, (hf, distributed, virtual_stages, overlap, frozen, precision), strict=True))


SLOW = pytest.mark.slow
# The grid that saves and the one that resumes, and what each of them runs.
Turn = tuple[ParallelDims, ParallelDims, dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param((ParallelDims(pp=2), ParallelDims(tp=2), case(DENSE, virtual_stages=2), case(DENSE)), marks=SLOW),
        (ParallelDims(dp=2, ep=2), ParallelDims(), case(MOE), case(MOE)),
        # Several buckets in a buffer: tied embeddings have their own, and overlapping makes more.
        pytest.param((ParallelDims(pp=2), ParallelDims(dp=2), case(TIED, True), case(TIED, True)), marks=SLOW),
        pytest.param(
            (ParallelDims(dp=2), ParallelDims(tp=2), case(DENSE, True, overlap=True), case(DENSE, True)), marks=SLOW
        ),
        # Sinks and stacked experts with biases; norms behind attention and over all heads; a gate of shared experts.
        *(
            pytest.param((ParallelDims(tp=2), after, case(tiny_config(name)), case(tiny_config(name))), marks=SLOW)
            for name, after in (
                ("gpt_oss", ParallelDims(dp=2, ep=2)),
                ("gpt_oss", ParallelDims(tp=2, ep=2)),
                ("olmo2", ParallelDims(pp=2)),
                ("qwen2_moe", ParallelDims(dp=2, ep=2)),
            )
        ),
        # The first stage, which writes down the step, trains nothing.
        pytest.param(
            (ParallelDims(pp=2), ParallelDims(pp=2), case(DENSE, True, frozen=True), case(DENSE, True, frozen=True)),
            marks=SLOW,
        ),
        # Masters and the loss scale. Replicas that see the same compute the same bits as one.
        pytest.param(
            (
                ParallelDims(dp=2),
                ParallelDims(),
                case(DENSE, True, precision="bf16"),
                case(DENSE, True, precision="bf16"),
            ),
            marks=SLOW,
        ),
        pytest.param(
            (ParallelDims(tp=2), ParallelDims(tp=2), case(DENSE, precision="fp16"), case(DENSE, precision="fp16")),
            marks=SLOW,
        ),
        *(
            pytest.param((dims, dims, case(DENSE, cut, precision=kind), case(DENSE, cut, precision=kind)), marks=SLOW)
            for dims, cut, kind in ((ParallelDims(dp=2), True, "fp16"), (ParallelDims(tp=2), False, "bf16"))
        ),
        *(
            pytest.param((saved, resumed, first, first), marks=SLOW)
            for saved, resumed, first in (
                (ParallelDims(tp=2), ParallelDims(), case(DENSE)),
                (ParallelDims(dp=2), ParallelDims(tp=2), case(DENSE)),
                (ParallelDims(dp=2), ParallelDims(tp=2), case(DENSE, True)),
                (ParallelDims(tp=2), ParallelDims(tp=2), case(DENSE, True)),
                (ParallelDims(pp=2), ParallelDims(pp=2), case(DENSE, frozen=True)),
            )
        ),
        *(
            pytest.param((saved, resumed, case(hf, True, stages), case(hf, True)), marks=SLOW)
            for saved, resumed, hf, stages in (
                (ParallelDims(tp=2), ParallelDims(), DENSE, None),
                (ParallelDims(dp=4), ParallelDims(dp=2), DENSE, None),
                (ParallelDims(pp=2), ParallelDims(dp=2), DENSE, 2),
                (ParallelDims(pp=2, dp=2), ParallelDims(pp=2), TIED, 2),
                (ParallelDims(), ParallelDims(pp=2), TIED, None),
                (ParallelDims(cp=2), ParallelDims(tp=2), TIED, None),
                (ParallelDims(dp=2, ep=2), ParallelDims(tp=2), MOE, None),
                (ParallelDims(tp=2, ep=2), ParallelDims(dp=2, ep=2), MOE, None),
                (ParallelDims(tp=2, dp=2, ep=2), ParallelDims(dp=2), MOE, None),
            )
        ),
    ],
)
def test_a_run_goes_on_on_another_grid(ranks: RankPool, tmp_path: Path, turn: Turn) -> None:
    goes_on(ranks, tmp_path, turn, tolerance=1e-6)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "turn",
    [
        (ParallelDims(tp=2), ParallelDims(), case(DENSE), case(DENSE)),
        (ParallelDims(tp=2), ParallelDims(tp=2), case(DENSE), case(DENSE)),
        (ParallelDims(dp=2), ParallelDims(tp=2), case(DENSE, True, overlap=True), case(DENSE, True)),
        (ParallelDims(dp=2), ParallelDims(dp=2), case(DENSE, True), case(DENSE, True)),
        (ParallelDims(pp=2), ParallelDims(dp=2), case(TIED, True, 2), case(TIED, True)),
        (ParallelDims(dp=2, ep=2), ParallelDims(), case(MOE), case(MOE)),
        (ParallelDims(pp=2), ParallelDims(pp=2), case(DENSE, True, frozen=True), case(DENSE, True, frozen=True)),
        (ParallelDims(dp=2), ParallelDims(), case(DENSE, True, precision="bf16"), case(DENSE, True, precision="bf16")),
        (ParallelDims(tp=2), ParallelDims(tp=2), case(DENSE, precision="fp16"), case(DENSE, precision="fp16")),
    ],
)
def test_a_run_goes_on_on_gpus(four_nccl_ranks: RankPool, tmp_path: Path, turn: Turn) -> None:
    # NCCL and CUDA kernels add in another order on another grid, and some in any order, which moves 16-bit weights.
    goes_on(four_nccl_ranks, tmp_path, turn, tolerance=1e-4 if turn[2]["precision"] == "fp32" else 2e-2)


def goes_on(ranks: RankPool, tmp_path: Path, turn: Turn, *, tolerance: float) -> None:
    saved, resumed, first, second = turn
    before = ranks.run(save_on, str(tmp_path), saved, first, world=saved.world_size)
    written = Counter[str]()
    for file in (tmp_path / "step-3").glob("*.distcp"):
        written[file.name.split("_")[2]] += file.stat().st_size
    # Replicas share the writing.
    assert len(written) == saved.world_size
    assert min(written.values()) > max(written.values()) / 3 or first["frozen"]
    after = ranks.run(resume_on, str(tmp_path), resumed, second, world=resumed.world_size)
    for number, (restored, random, *losses) in enumerate(after):
        assert losses == pytest.approx(before[0][1:], rel=0, abs=tolerance)
        assert restored is (saved == resumed)
        assert not restored or random == before[number][0]


def test_asynchronous(ranks: RankPool, tmp_path: Path) -> None:
    goes_on_from_an_asynchronous_save(ranks, tmp_path)


@pytest.mark.gpu(2)
def test_asynchronous_on_gpus(four_nccl_ranks: RankPool, tmp_path: Path) -> None:
    goes_on_from_an_asynchronous_save(four_nccl_ranks, tmp_path)


def goes_on_from_an_asynchronous_save(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save_on, str(tmp_path), ParallelDims(tp=2), case(DENSE), asynchronous=True, world=2)
    for _, _, *losses in ranks.run(resume_on, str(tmp_path), ParallelDims(tp=2), case(DENSE), world=2):
        assert losses == pytest.approx(expected[0][1:], rel=0, abs=1e-6)


def read_by_megatron_on(group: ProcessGroup, root: str) -> None:
    """Megatron-Core's own reading of a checkpoint: every tensor, and the metadata that is no tensor."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import save_checkpoint
    from megatron_utils.dist_checkpointing.index import read_index
    from megatron_utils.dist_checkpointing.state import METADATA
    from megatron_utils.testing import cpu_stand_in

    with cpu_stand_in(), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        run = Run(grid, DENSE, distributed=True)
        save_checkpoint(root, 1, run.optimizer, grid)
        stored = read_index(Path(root) / "step-1").state_dict_metadata
        empty = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for name, entry in stored.items()}
        described = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in empty.items()}
        with grid.as_world():
            tensors = dist_checkpointing.load(described, f"{root}/step-1")  # raises for a tensor that it lacks
            assert dist_checkpointing.load_content_metadata(f"{root}/step-1") == METADATA
        assert tensors.keys() == {*stored, "content_metadata"}
        (chunk,) = run.optimizer.chunks
        weights = {name: weight for name, weight in chunk.module.named_parameters() if name in tensors}
        assert "embedding.word_embeddings.weight" in weights
        for name, weight in weights.items():
            assert torch.equal(tensors[name], weight), name


def test_megatron_itself_reads_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(read_by_megatron_on, str(tmp_path), world=1)


def test_a_folder_that_cannot_be_made_is_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"rank 0 cannot make a folder for step 3 in .*file/run: ") as error:
        ranks.run(save_on, str(tmp_path / "file" / "run"), ParallelDims(tp=2), case(DENSE), world=2)
    assert len(error.value.__notes__) == 2


def full_disk_on(group: ProcessGroup, root: Path, asynchronous: bool) -> list[str]:
    """A save of step 0, one of step 1 that finds no space on rank 1, and that again; the errors."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import latest_step, save_checkpoint
    from megatron_utils.testing import cpu_stand_in

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with cpu_stand_in(), megatron_grid(ParallelDims(tp=2), ranks=range(2)) as grid:
        optimizer = Run(grid, DENSE, distributed=False).optimizer
        save_checkpoint(root, 0, optimizer, grid)
        errors = []
        with pytest.MonkeyPatch.context() as patched:
            if group.rank() == 1:
                patched.setattr(filesystem_async, "_write_item", full)
            try:
                pending = save_checkpoint(root, 1, optimizer, grid, asynchronous=asynchronous)
                assert pending is not None
                with pytest.raises(RuntimeError, match=r"step 1 is under way; call its wait\(\) before saving step 2"):
                    save_checkpoint(root, 2, optimizer, grid)
                with pytest.raises(OSError, match="cannot be written"):
                    pending.wait()
                # It is not complete, and does not become so silently.
                assert not pending.done
                pending.poll()
            except OSError as error:
                errors.append(str(error))
        assert latest_step(root) == 0
        save_checkpoint(root, 1, optimizer, grid, asynchronous=False)
        assert latest_step(root) == 1
    return errors


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=SLOW), True])
def test_a_full_disk_is_named_on_every_rank_and_the_next_save_succeeds(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    for (error,) in ranks.run(full_disk_on, tmp_path, asynchronous, world=2, timeout=100):
        # Megatron-Core 0.17 and later log the reason and raise the kind of the error only; so the free space is named.
        assert re.search(
            r"cannot be written \(\d+ MiB are free\): rank 1: Worker failure: .*(No space left|OSError)", error
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-0", "step-1"]


def mistakes_on(group: ProcessGroup, root: Path) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import folder as folders, save_checkpoint
    from megatron_utils.testing import cpu_stand_in

    def full(*_: Any) -> None:
        raise OSError("no space")

    with cpu_stand_in(), megatron_grid(ParallelDims(tp=2), ranks=range(2)) as grid:
        optimizer = Run(grid, DENSE, distributed=False).optimizer
        save_checkpoint(root, 0, optimizer, grid)
        with pytest.raises(ValueError, match="step-0 exists; a complete checkpoint is never written over"):
            save_checkpoint(root, 0, optimizer, grid)
        with pytest.raises(ValueError, match="extra is not JSON: Object of type set"):
            save_checkpoint(root, 1, optimizer, grid, extra={"seen": {1}})
        for name, rank, message in (
            ("write_json", 0, "rank 0 cannot write to .*: no space"),
            ("describe_files", 1, "rank 1 cannot read .*: no space"),
            ("commit", 0, "rank 0 cannot complete .*: no space"),
        ):
            with pytest.MonkeyPatch.context() as patched:
                if group.rank() == rank:
                    patched.setattr(folders, name, full)
                with pytest.raises(OSError, match=message):
                    save_checkpoint(root, 1, optimizer, grid)


def test_mistakes_in_a_save_are_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(mistakes_on, tmp_path, world=2, timeout=100)


def die_in_a_save_on(group: ProcessGroup, root: str, moment: str) -> None:
    """A complete checkpoint of step 3, and SIGKILL in that of step 4."""
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import folder as folders, save_checkpoint
    from megatron_utils.testing import cpu_stand_in

    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with cpu_stand_in(), megatron_grid(ParallelDims(), ranks=[0], seed=5) as grid:
        run = Run(grid, DENSE, distributed=False)
        run.steps(0, 3)
        save_checkpoint(root, 3, run.optimizer, grid, extra={"note": [1, 2]})
        run.steps(3, 4)
        if moment == "while another process writes":
            save_checkpoint(root, 4, run.optimizer, grid, asynchronous=True)
            die()
        setattr(folders, {"before the checksums": "describe_files", "before the rename": "commit"}[moment], die)
        save_checkpoint(root, 4, run.optimizer, grid)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the checksums", "while another process writes", "before the rename"])
def test_a_run_that_was_killed_in_a_save_goes_on(ranks: RankPool, tmp_path: Path, moment: str) -> None:
    expected = ranks.run(save_on, str(tmp_path / "whole"), ParallelDims(), case(DENSE), world=1)[0][1:]
    with RankPool(1) as mortal, pytest.raises(RankDied, match="rank 0 ended without an answer"):
        mortal.run(die_in_a_save_on, str(tmp_path / "killed"), moment)
    assert len(list((tmp_path / "killed").glob(".step-4.*.partial"))) == 1
    ((_, _, *losses),) = ranks.run(resume_on, str(tmp_path / "killed"), ParallelDims(), case(DENSE), world=1)
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)


class Attack:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def attack(folder: Path, fails: Callable[[str], None]) -> Path:
    """Put pickles that run code into a folder, with their checksums; return the file that would tell of it."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    from megatron_utils.dist_checkpointing import folder as folders

    marker = folder / "executed"
    index = folder / ".metadata"
    whole = index.read_bytes()

    def write(content: bytes) -> None:
        index.write_bytes(content)
        folders.write_json(folder / folders.MANIFEST, folders.describe_files(folder, 0, 1))

    write(pickle.dumps(Attack(marker)))
    fails(r"\.metadata is no index of a checkpoint: it asks for \w+\.system, which could run code")
    # An entry with which torch unpickles a part of a data file.
    data = pickle.loads(whole)  # written by this test's own ranks
    key = next(key for key in data.state_dict_metadata if key.startswith("decoder"))
    data.state_dict_metadata[key] = BytesStorageMetadata()
    write(pickle.dumps(data))
    fails(rf"lists 1 pickled objects \({re.escape(key)}\), which could run code")
    # This file is never read.
    torch.save(Attack(marker), folder / "common.pt")
    write(whole)
    return marker


@pytest.mark.slow
def test_damage_is_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_on, str(tmp_path), ParallelDims(tp=2), case(DENSE), world=2)
    folder = tmp_path / "step-3"
    victim = sorted(folder.glob("*.distcp"))[-1]
    whole = victim.read_bytes()

    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            ranks.run(resume_on, str(tmp_path), ParallelDims(tp=2), case(DENSE), world=2)
        assert len(error.value.__notes__) == 2

    victim.write_bytes(whole[:-1])
    fails(f"{victim.name} has {len(whole) - 1} bytes, not {len(whole)}")
    victim.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    fails(f"{victim.name} is corrupt")
    victim.unlink()
    fails(f"{victim.name} is missing")
    victim.write_bytes(whole)
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(manifest[:-9])
    fails("manifest.json is corrupt: ")
    (folder / "manifest.json").write_bytes(manifest)
    marker = attack(folder, fails)
    with pytest.raises(ValueError, match=r"differ: the checkpoint lacks \[.*layers.4"):
        ranks.run(resume_on, str(tmp_path), ParallelDims(tp=2), case(DENSE | {"num_hidden_layers": 5}), world=2)
    with pytest.raises(ValueError, match=r"step-3 cannot be loaded: rank 0: .* tensor for key decoder.*linear_fc1"):
        ranks.run(resume_on, str(tmp_path), ParallelDims(tp=2), case(DENSE | {"intermediate_size": 32}), world=2)
    assert not marker.exists()
    with pytest.raises(ValueError, match=r"saved with OptimizerConfig.distributed=False"):
        ranks.run(resume_on, str(tmp_path), ParallelDims(tp=2), case(DENSE, True), world=2)
    with pytest.raises(ValueError, match=r"holds no complete checkpoint"):
        ranks.run(resume_on, str(tmp_path / "other"), ParallelDims(tp=2), case(DENSE), world=2)
