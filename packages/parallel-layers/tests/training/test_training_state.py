"""`TrainingState`: runs that torch.distributed.checkpoint saves go on as if they had not stopped, on every grid."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    ParallelDims,
    Placement,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    initialize_,
    next_token_labels,
)
from parallel_layers.moe import MoEConfig
from parallel_layers.testing import RankPool
from parallel_layers.training.training_state import TrainingState

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
EXPERTS = dataclasses.replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=8))


class Model(nn.Module):
    """A layer with an MLP and one with experts, which the tensor-parallel ranks divide among themselves."""

    def __init__(self, group: ProcessGroup | None, sp: bool) -> None:
        super().__init__()
        place: dict[str, Any] = {"group": group, "sequence_parallel": sp}
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, **place)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config, placement=Placement(group, sp), expert_group=group, expert_tensor_parallel=group is None
            )
            for config in (CONFIG, EXPERTS)
        )
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


GRIDS = [ParallelDims(dp=4), ParallelDims(tp=4), ParallelDims(dp=2, tp=2)]
# Saved from FSDP2 or not, and resumed the other way on this grid; --slow has all.
RESUMED_IN_EVERY_RUN = [(True, ParallelDims(tp=4))]


@pytest.mark.parametrize(
    ("fsdp", "other"),
    [
        pytest.param(fsdp, other, marks=[] if (fsdp, other) in RESUMED_IN_EVERY_RUN else pytest.mark.slow)
        for fsdp in (True, False)
        for other in GRIDS
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(
    ranks: RankPool, tmp_path: Path, fsdp: bool, other: ParallelDims
) -> None:
    """Bit for bit on the same grid, and up to rounding on others, sharded by FSDP2 or not."""
    here = ParallelDims(dp=2, tp=2)
    expected = ranks.run(_saved, here, fsdp, tmp_path, world=4)[0]
    for found in ranks.run(_resumed, here, fsdp, tmp_path, world=4):
        assert torch.equal(found, expected)
    for found in ranks.run(_resumed, other, not fsdp, tmp_path, world=4):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # The saved shapes are those of the undivided model.
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for name, parameter in Model(None, False).named_parameters():
        for key in (f"app.model.{name}", f"app.optimizer.state.{name}.exp_avg"):
            assert metadata[key].size == parameter.shape


def _by_torchs_recipe(group: ProcessGroup, fsdp: bool, folder: Path) -> dict[str, str]:
    """Return what saves of plain state dicts say, of the model alone too, and loads into them."""
    run = Run(ParallelDims(dp=2, tp=2), fsdp, seed=0)
    run.step(0)
    weights, messages = run.model.state_dict(), {}
    dcp.save({name: torch.zeros(x.shape) for name, x in weights.items()}, checkpoint_id=folder / "of one shape")

    def expect_refusal(case: str, call: Callable[..., Any], state: dict[str, Any], place: str = "wrong") -> None:
        with pytest.raises((dcp.api.CheckpointException, RuntimeError)) as error:
            call(state, checkpoint_id=folder / place)
        messages[case] = str(error.value)

    options = [{}, {"cpu_offload": True}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]
    for option in options:
        states = get_state_dict(run.model, run.optimizer, options=StateDictOptions(**option))
        if all(states):  # offloaded full tensors are on rank 0 alone
            alone = len(option) == 2
            expect_refusal(f"recipe {option}", partial(dcp.save, no_dist=alone), dict(zip("mo", states, strict=True)))
    expect_refusal("module", dcp.save, {"model": run.model})
    expect_refusal("load", dcp.load, weights, "of one shape")
    expect_refusal("asynchronous", lambda *args, **kwargs: dcp.async_save(*args, **kwargs).result(), weights)
    copies: dict[str, Callable[[Tensor], Tensor]] = {
        "detach": Tensor.detach,
        "clone": Tensor.clone,
        "cast": Tensor.bfloat16,
        "device and dtype": lambda x: x.to("cpu", torch.float64),
        "deep copy": copy.deepcopy,
        "default stager": lambda x: StateDictStager().stage({"x": x})["x"],
        "blocking stager": lambda x: BlockingAsyncStager().stage({"x": x})["x"],  # type: ignore[dict-item]
        "sent to a process": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    }
    if fsdp:
        copies |= {"full": lambda x: x.full_tensor().clone(), "local": lambda x: x.to_local().clone()}  # type: ignore[attr-defined]
    for case, copied in copies.items():
        expect_refusal(case, dcp.save, {name: copied(x) for name, x in weights.items()})
    return messages


@pytest.mark.parametrize("fsdp", [pytest.param(True, marks=pytest.mark.slow), False], ids=["fsdp2", "plain"])
def test_torchs_own_recipe_is_refused_by_name(ranks: RankPool, tmp_path: Path, fsdp: bool) -> None:
    for messages in ranks.run(_by_torchs_recipe, fsdp, tmp_path, world=4):
        for case, message in messages.items():
            assert "{'app': parallel_layers.training.TrainingState(model, optimizer)}" in message, case


def _other_uses(group: ProcessGroup, fsdp: bool) -> None:
    """Everything else does with a state dict what it does with other models'."""
    run = Run(ParallelDims(dp=2, tp=2), fsdp, seed=0)
    parameters = dict(run.model.named_parameters())
    weights = run.model.state_dict()
    plain = {name: x.full_tensor() if fsdp else x for name, x in weights.items()}
    for source in (plain, copy.deepcopy(plain)):
        file = io.BytesIO()
        torch.save(source, file)
        file.seek(0)
        for name, x in torch.load(file, weights_only=True).items():
            assert type(x) is Tensor
            assert not x.__dict__
            assert torch.equal(x, plain[name])
    name = "embed.weight"
    assert type(torch.cat([plain[name], plain[name]])) is Tensor  # the ranks' shards together may be saved
    weights[name].zero_()
    assert not parameters[name].any()
    run.model.load_state_dict({name: x.clone().add_(1) for name, x in weights.items()})
    run.model.load_state_dict(copy.deepcopy(weights), assign=True)
    assert {type(x) for x in run.model.parameters()} == {type(x) for x in parameters.values()}
    if not fsdp:
        hidden = torch.randn(4, HIDDEN)
        layer = run.model.layers[0].mlp
        layer.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(torch.func.functional_call(layer, layer.state_dict(), hidden), layer(hidden))


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp2", "plain"])
def test_state_dicts_serve_all_other_uses(ranks: RankPool, fsdp: bool) -> None:
    ranks.run(_other_uses, fsdp, world=4)


def _other_shapes(group: ProcessGroup) -> str:
    model = VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match="optimizer's state") as error:
        TrainingState(model, optimizer).state_dict()
    return str(error.value)


def test_states_of_other_shapes_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(_other_shapes, world=2):
        assert "of weight has shape [7, 1], the parameter [7, 16]" in message
