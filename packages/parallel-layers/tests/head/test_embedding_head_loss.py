"""Embedding -> block -> tied head -> loss against the unsharded model: the loss and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.distributed.collectives import copy_to_tensor_parallel, gather_from_sequence_parallel
from parallel_layers.head import vocab_parallel_log_probs
from parallel_layers.head.embedding import VocabParallelEmbedding
from parallel_layers.head.log_probs import linear_log_probs
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import ColumnParallelLinear, RowParallelLinear
from parallel_layers.module.sharding import blocks_of, load_full_
from parallel_layers.testing import RankPool

VOCAB, HIDDEN = 11, 8
QUICK = [(2, False, True), (2, True, False), (4, True, True), (4, False, False)]
EVERY = list(itertools.product([1, 2, 4], [False, True], [False, True]))


class Model(nn.Module):
    def __init__(self, group: ProcessGroup | None, sp: bool) -> None:
        super().__init__()
        placement = Placement(group, sp)
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, group=group, sequence_parallel=sp)
        self.up = ColumnParallelLinear(HIDDEN, 16, bias=True, placement=placement)
        self.down = RowParallelLinear(16, HIDDEN, bias=True, placement=placement)


def loss_of(
    group: ProcessGroup | None, full: dict[str, Tensor], ids: Tensor, labels: Tensor, sp: bool, fused: bool
) -> dict[str, Tensor]:
    """The loss, and each gradient laid into a zero tensor of the full shape at the places that this rank holds."""
    model = Model(group, sp).to(full["embed.weight"].dtype)
    load_full_(model, full)
    hidden = model.embed(ids)
    hidden = hidden + model.down(F.gelu(model.up(hidden)))
    head = model.embed.weight
    if fused:
        out = linear_log_probs(hidden, head, labels, group=group, sequence_parallel=sp, vocab_size=VOCAB)
        loss = -out.log_probs.sum()
    else:
        whole = gather_from_sequence_parallel(hidden, group) if sp else copy_to_tensor_parallel(hidden, group)
        loss = -vocab_parallel_log_probs(whole @ head.t(), labels, group=group, vocab_size=VOCAB).log_probs.sum()
    loss.backward()
    result = {"loss": loss.detach()}
    for path, tensor in full.items():
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        grad = owner.get_parameter(name).grad
        assert grad is not None
        result[path] = torch.full_like(tensor, torch.nan)
        for local, where in blocks_of(owner, name):
            result[path][where] = grad[local]
    return result


def problem(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(seed)
    full = {name: p.detach().clone() for name, p in Model(None, False).named_parameters()}
    full["up.bias"], full["down.bias"] = torch.randn(16), torch.randn(HIDDEN)
    ids, labels = torch.randint(VOCAB, (tokens,)), torch.randint(VOCAB, (tokens,))
    labels[3] = -100
    return {name: tensor.to(dtype) for name, tensor in full.items()}, ids, labels


def unsharded(full: dict[str, Tensor], ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss and each gradient, by torch's functions."""
    p = {name: tensor.clone().requires_grad_() for name, tensor in full.items()}
    hidden = F.embedding(ids, p["embed.weight"])
    up = F.gelu(F.linear(hidden, p["up.weight"], p["up.bias"]))
    hidden = hidden + F.linear(up, p["down.weight"], p["down.bias"])
    loss = F.cross_entropy(hidden @ p["embed.weight"].t(), labels, reduction="sum")
    loss.backward()
    return {"loss": loss.detach()} | {name: t.grad for name, t in p.items() if t.grad is not None}


@pytest.mark.parametrize(
    ("world", "sp", "fused"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK)],
)
def test_loss_and_every_gradient(ranks: RankPool, world: int, sp: bool, fused: bool) -> None:
    tensors = problem(8)
    results = ranks.run(loss_of, *tensors, sp, fused, world=world)
    for name, tensor in unsharded(*tensors).items():
        parts = [result[name] for result in results]
        for part in parts:
            torch.testing.assert_close(torch.where(part.isnan(), tensor, part), tensor, rtol=1e-5, atol=1e-5)
        assert not torch.stack(parts).isnan().all(0).any(), f"{name}: a place that no rank holds"


@pytest.mark.parametrize(
    ("world", "sp", "fused"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK)],
)
def test_bf16_error_is_at_most_that_of_unsharded_bf16(ranks: RankPool, world: int, sp: bool, fused: bool) -> None:
    """Times 1.5, against fp64: of torch's functions, which round the logits to bf16 as well.

    By norm, over all ranks and several batches, because the errors of few numbers scatter.
    """
    squares: dict[str, Tensor] = {}
    for seed in range(4):
        full, ids, labels = problem(256, torch.bfloat16, seed)
        truth = unsharded({name: tensor.double() for name, tensor in full.items()}, ids, labels)
        plain = unsharded(full, ids, labels)
        for result in ranks.run(loss_of, full, ids, labels, sp, fused, world=world):
            for name, exact in truth.items():
                here = ~result[name].isnan()
                errors = [(t[name].double() - exact)[here].square().sum() for t in (result, plain)]
                squares[name] = squares.get(name, 0) + torch.stack(errors)
    for name, (error, allowed) in squares.items():
        assert error.sqrt() <= 1.5 * allowed.sqrt(), f"{name}: {(error / allowed).sqrt():.2f} times"
