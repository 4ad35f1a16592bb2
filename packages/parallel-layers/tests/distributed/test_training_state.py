"""`TrainingState`: runs that torch.distributed.checkpoint saves go on as if they had not stopped, on every grid."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    ParallelDims,
    Placement,
    RMSNorm,
    RotaryEmbedding,
    TrainingState,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_,
    next_token_labels,
)
from parallel_layers.testing import RankPool

VOCAB, HIDDEN, SEQUENCES, LENGTH = 13, 16, 4, 7
# At tp 2 and 4 the only KV head is on several ranks, and the vocabulary does not divide.
CONFIG = DecoderConfig(
    hidden_size=HIDDEN,
    num_heads=4,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=24,
    attention_bias=True,
    qk_norm="head",
)


class Model(nn.Module):
    def __init__(self, group: ProcessGroup | None, sp: bool) -> None:
        super().__init__()
        place: dict[str, Any] = {"group": group, "sequence_parallel": sp}
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, **place)
        self.layers = nn.ModuleList(DecoderLayer(CONFIG, placement=Placement(group, sp)) for _ in range(2))
        self.norm = RMSNorm(HIDDEN, **place)
        self.head = VocabParallelHead(HIDDEN, VOCAB, **place)
        self.rotary = RotaryEmbedding(4)

    def forward(self, packed: PackedSequence) -> Tensor:
        hidden, tables = self.embed(packed.input_ids), self.rotary(packed.position_ids)
        for layer in self.layers:
            hidden = layer(hidden, tables, packed.cu_seqlens, packed.max_seqlen)
        return -self.head(self.norm(hidden), next_token_labels(packed)).log_probs.mean()


class Run:
    def __init__(self, dims: ParallelDims, fsdp: bool, seed: int) -> None:
        mesh = dims.build_mesh("cpu")
        self.dims, self.dp, tp = dims, mesh.get_group("dp"), mesh.get_group("tp")
        self.model = Model(tp if dims.tp > 1 else None, sp=dims.tp > 1)
        initialize_(self.model, seed)
        if fsdp:
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh["dp"])
        self.fsdp = fsdp
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> Tensor:
        """One step on the batch `number`, of which each data-parallel rank has some whole sequences."""
        rows = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(number))
        mine = rows.chunk(self.dims.dp)[self.dp.rank()]
        loss = self.model(PackedSequence.from_sequences(list(mine), multiple_of=4))
        loss.backward()
        if not self.fsdp:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.dp)
                parameter.grad /= self.dims.dp  # type: ignore[operator]
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.dp)
        return total / self.dims.dp

    def state(self) -> dict[str, TrainingState]:
        return {"app": TrainingState(self.model, self.optimizer)}


def _saved(group: ProcessGroup, dims: ParallelDims, fsdp: bool, folder: Path) -> Tensor:
    """Two steps, a save, and the losses of two steps more."""
    run = Run(dims, fsdp, seed=0)
    for number in range(2):
        run.step(number)
    dcp.save(run.state(), checkpoint_id=folder)
    return torch.stack([run.step(number) for number in (2, 3)])


def _resumed(group: ProcessGroup, dims: ParallelDims, fsdp: bool, folder: Path) -> Tensor:
    """The losses of two steps after a load into another model."""
    run = Run(dims, fsdp, seed=1)
    dcp.load(run.state(), checkpoint_id=folder)
    return torch.stack([run.step(number) for number in (2, 3)])


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "plain"])
def test_a_resumed_run_is_the_uninterrupted_one(ranks: RankPool, tmp_path: Path, fsdp: bool) -> None:
    """Bit for bit on the same grid, and up to rounding on others, sharded by FSDP2 or not."""
    here = ParallelDims(dp=2, tp=2)
    expected = ranks.run(_saved, here, fsdp, tmp_path, world=4)[0]
    for found in ranks.run(_resumed, here, fsdp, tmp_path, world=4):
        assert torch.equal(found, expected)
    for other in (ParallelDims(dp=4), ParallelDims(tp=4), ParallelDims(dp=2, tp=2)):
        for found in ranks.run(_resumed, other, not fsdp, tmp_path, world=4):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_shapes_are_those_of_the_undivided_model(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_saved, ParallelDims(dp=2, tp=2), True, tmp_path, world=4)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for name, parameter in Model(None, False).named_parameters():
        for key in (f"app.model.{name}", f"app.optimizer.state.{name}.exp_avg"):
            assert metadata[key].size == parameter.shape


def _by_torchs_recipe(group: ProcessGroup, fsdp: bool, folder: Path) -> list[str]:
    """What a save and a load of the plain state dicts say, and one of the model alone."""
    run = Run(ParallelDims(dp=2, tp=2), fsdp, seed=0)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    messages = []
    for state in ({"model": model, "optimizer": optimizer}, {"model": run.model}, run.model.state_dict()):
        with pytest.raises(dcp.api.CheckpointException) as error:
            dcp.save(state, checkpoint_id=folder)
        messages.append(str(error.value))
    # Everything else does with a state dict what it always did.
    plain = {name: x.full_tensor() if fsdp else x for name, x in run.model.state_dict().items()}
    for source in (plain, copy.deepcopy(plain)):
        file = io.BytesIO()
        torch.save(source, file)
        file.seek(0)
        for name, x in torch.load(file, weights_only=True).items():
            assert type(x) is Tensor
            assert not x.__dict__
            assert torch.equal(x, plain[name])
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    return messages


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "plain"])
def test_torchs_own_recipe_is_refused_by_name(ranks: RankPool, tmp_path: Path, fsdp: bool) -> None:
    for messages in ranks.run(_by_torchs_recipe, fsdp, tmp_path, world=4):
        assert all("parallel_layers.TrainingState(model, optimizer)" in message for message in messages)


def _other_shapes(group: ProcessGroup) -> str:
    model = VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match="optimizer's state") as error:
        TrainingState(model, optimizer).state_dict()
    return str(error.value)


def test_states_of_other_shapes_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(_other_shapes, world=2):
        assert "of weight has shape [7, 1], the parameter [7, 16]" in message
