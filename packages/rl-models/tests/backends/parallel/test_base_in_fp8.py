"""Adapters on a frozen base in FP8 give the bits that they give on the dequantised base, on every grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

import ckpt
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.module import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

LORA = LoraOptions(rank=2, alpha=4, seed=1)
OPTIMIZER = OptimizerOptions(learning_rate=1e-2)
# Several blocks, of which ranks have parts: 3 heads of 24 key-value rows, 272 columns.
SIZES = {
    "hidden_size": 160,
    "intermediate_size": 272,
    "head_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 144}
GRIDS = [ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2), ParallelDims(cp=2)]


def batch_of(actor: Actor) -> Batch:
    sequences = [torch.arange(length) % 61 for length in (6, 8, 4, 6)]
    own = list(range(actor.grid.rank("dp"), 4, actor.grid.dims.dp))
    return Batch.from_sequences(sequences, response_lengths=[3, 4, 2, 4]).select(own)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs * torch.sin(1.0 + inputs.batch.tokens))


def results(actor: Actor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs before and after a step, and the step's gradients on this rank."""
    gradients, step = {}, actor.optimizer.step

    def look(rate: float) -> float:
        for name, parameter in actor.engine.module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if is_dtensor(parameter.grad) else parameter.grad
                gradients[name] = grad.clone()
        return step(rate)

    actor.optimizer.step = look  # type: ignore[method-assign]
    batch = batch_of(actor)
    found = [actor.log_probs(batch).log_probs]
    actor.update(batch, loss)
    actor.update(batch, loss)
    return [*found, actor.log_probs(batch).log_probs], gradients


def base_bytes(actor: Actor) -> int:
    """The bytes of this rank's projections and their scales."""
    named = actor.engine.module.named_parameters()
    own = (p.to_local() if is_dtensor(p) else p for name, p in named if "_proj" in name and ".lora" not in name)
    return sum(p.nbytes for p in own)


def compare(group: ProcessGroup | None, folders: dict[str, Path], dims: ParallelDims, out: Path) -> tuple[int, int]:
    """Compare a model in FP8, from plain weights and from block FP8, with the model of the dequantised weights.

    Return the bytes of the projections in FP8 and dense.
    """
    options: dict[str, Any] = {
        "dims": dims,
        "mesh": mesh_of(dims),
        "device": "cpu",
        "optimizer": OPTIMIZER,
        "lora": LORA,
    }
    dense = Actor.from_pretrained(folders["fp8"], **options)
    log_probs, gradients = results(dense)
    assert gradients
    for source in ("plain", "fp8"):
        actor = Actor.from_pretrained(folders[source], base_format="fp8", **options)
        held = [name for name, p in actor.engine.module.named_parameters() if p.dtype == torch.float8_e4m3fn]
        assert held
        found, own = results(actor)
        for ours, theirs in zip(found, log_probs, strict=True):
            assert torch.equal(ours, theirs)
        assert own.keys() == gradients.keys()
        for name, gradient in own.items():
            assert torch.equal(gradient, gradients[name]), name
        actor.save_pretrained(out / source)
    dense.save_pretrained(out / "dense")
    drawn = actor.generate([[1, 2, 3], [4, 5]], max_new_tokens=4, seed=1)
    expected = dense.generate([[1, 2, 3], [4, 5]], max_new_tokens=4, seed=1)
    assert torch.equal(drawn["log_probs"], expected["log_probs"])
    return base_bytes(actor), base_bytes(dense)


@pytest.fixture(scope="module", params=["llama", pytest.param("mixture", marks=pytest.mark.slow)])
def folders(request: Any, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain = tiny(request.param, **(EXPERTS if request.param == "mixture" else SIZES))
    out = tmp_path_factory.mktemp("fp8")
    ckpt.merge(plain, out / "fp8", format="fp8")
    return {"plain": plain, "fp8": out / "fp8"}


def check(results: list[tuple[int, int]], out: Path) -> None:
    for held, dense in results:
        assert held < 0.27 * dense  # a byte a weight, and the scales
    files = [(out / name / "model.safetensors").read_bytes() for name in ("dense", "plain", "fp8")]
    assert files[0] == files[1] == files[2]


def test_the_bits_are_those_of_the_dequantised_base(folders: dict[str, Path], tmp_path: Path) -> None:
    check([compare(None, folders, ParallelDims(), tmp_path)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dims", GRIDS, ids=str)
def test_on_every_grid(ranks: RankPool, folders: dict[str, Path], dims: ParallelDims, tmp_path: Path) -> None:
    check(ranks.run(compare, folders, dims, tmp_path, world=dims.world_size), tmp_path)


def test_no_dense_copy_stays(tiny: Callable[..., Path]) -> None:
    """Between a forward and its backward autograd keeps the numbers, and no dense weight."""
    actor = Actor.from_pretrained(tiny("llama", **SIZES), lora=LORA, base_format="fp8", optimizer=OPTIMIZER)
    shapes = {tuple(p.shape) for p in actor.engine.module.parameters() if p.dtype == torch.float8_e4m3fn}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actor.update(batch_of(actor), loss)
    assert any(tuple(tensor.shape) in shapes and tensor.dtype == torch.float8_e4m3fn for tensor in kept)
    turned = shapes | {shape[::-1] for shape in shapes}
    assert not [tensor for tensor in kept if tuple(tensor.shape) in turned and tensor.dtype == torch.float32]


def test_a_critic_shares_the_base(tiny: Callable[..., Path]) -> None:
    actor = Actor.from_pretrained(tiny("llama", **SIZES), lora=LORA, base_format="fp8", optimizer=OPTIMIZER)
    critic = Critic.sharing_base(actor, lora=LORA)
    named = dict(actor.engine.module.named_parameters())
    held = {name: p for name, p in critic.engine.module.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert held
    assert all(p is named[name] for name, p in held.items())
    assert not critic.values(batch_of(actor)).any()


def test_mistakes_are_refused(tiny: Callable[..., Path]) -> None:
    for kwargs, text in (
        ({}, "base_format='fp8' is for the frozen base of adapters: it needs lora, not None"),
        ({"lora": LORA, "float8": "block"}, "excludes float8='block'"),
        ({"lora": LORA, "backend": "transformers"}, "backend='transformers' does not offer base_format='fp8'"),
    ):
        with pytest.raises(ValueError, match=text):
            Actor.from_pretrained(tiny("llama"), base_format="fp8", **kwargs)
    with pytest.raises(ValueError, match="base_format='fp4' is unknown; use 'fp8'"):
        Actor.from_pretrained(tiny("llama"), base_format="fp4", lora=LORA)
