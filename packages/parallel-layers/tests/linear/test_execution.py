"""Views of a model with another execution: they share every weight, and overlap where they are told to."""

import copy
from typing import Any

import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard

from parallel_layers import ColumnParallelLinear, DecoderConfig, DecoderLayer, RotaryEmbedding, RowParallelLinear
from parallel_layers.linear import with_execution
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.transports import available_overlaps
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(
    hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24, attention_bias=True, output_bias=True
)
TOKENS = 6


def new_layer(group: ProcessGroup | None, sequence_parallel: bool = True) -> DecoderLayer:
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, placement=Placement(group, sequence_parallel))
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def run(layer: nn.Module, x: Tensor) -> Tensor:
    tokens = TOKENS if x.shape[0] else 0
    rotary = RotaryEmbedding(4)(torch.arange(tokens))
    return layer(x, rotary, torch.tensor([0, tokens], dtype=torch.int32), tokens)


@torch.no_grad()
def run_overlapped(group: ProcessGroup, x: Tensor) -> tuple[Tensor, Tensor, list[str], int]:
    layer = new_layer(group)
    x = x.chunk(group.size())[group.rank()]
    with peer_memory_on_cpu() as called:
        view = with_execution(layer, overlap="symmetric-memory")
        out, first = run(view, x), list(called)
        run(view, x[:0])
    return run(layer, x), out, first, len(called)


def test_a_view_overlaps_at_any_number_of_tokens(ranks: RankPool) -> None:
    """The four products of a decoder layer, with biases; without tokens none of them is asked."""
    for trained, overlapped, first, calls in ranks.run(
        run_overlapped, torch.randn(TOKENS, CONFIG.hidden_size), world=2
    ):
        torch.testing.assert_close(overlapped, trained, rtol=1e-5, atol=1e-6)
        assert first == ["gather", "scatter", "gather", "scatter"]
        assert calls == len(first)


@torch.no_grad()
def run_bf16(group: ProcessGroup, x: Tensor) -> list[tuple[bool, list[str]]]:
    """Whether the view computes what its layer does, and what overlapped, by the dtype of the sums."""
    layer = RowParallelLinear(8, 4, placement=Placement(group, sequence_parallel=True), dtype=torch.bfloat16)
    x = x[:, :4].bfloat16()
    results = []
    with peer_memory_on_cpu() as called:
        for dtype in (None, torch.float32, torch.bfloat16):
            called.clear()
            ours = with_execution(layer, overlap="symmetric-memory", reduce_dtype=dtype)(x)
            results.append((torch.equal(ours, layer(x)), list(called)))
        with pytest.raises(ValueError, match="not divisible by the group's 2 ranks"):
            with_execution(layer, overlap="symmetric-memory", reduce_dtype=torch.bfloat16)(x[:3])
    assert layer.execution.reduce_dtype is None
    return results


def test_sums_are_as_exact_as_in_training(ranks: RankPool) -> None:
    """bf16 parts are summed only when they are asked for."""
    torch.manual_seed(0)
    for results in ranks.run(run_bf16, 100 * torch.randn(64, 8), world=2):
        assert results == [(True, []), (True, []), (False, ["scatter"])]


def test_a_view_shares_everything_and_changes_nothing() -> None:
    layer, x = new_layer(None, sequence_parallel=False), torch.randn(TOKENS, CONFIG.hidden_size)
    before = run(layer, x)
    view = with_execution(layer, overlap="serial").eval()
    assert type(view) is DecoderLayer
    assert [name for name, _ in view.named_modules()] == [name for name, _ in layer.named_modules()]
    for (name, ours), (other, theirs) in zip(view.named_parameters(), layer.named_parameters(), strict=True):
        assert name == other
        assert ours is theirs
    assert (view.mlp.down_proj.execution.overlap, layer.mlp.down_proj.execution.overlap) == ("serial", "auto")
    assert all(module.training for module in layer.modules())
    assert not any(module.training for module in view.modules())
    before.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
        # Also a parameter that is another object now, as FSDP2's are while they are gathered.
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight * 2)
    assert torch.equal(run(view, x), run(layer, x))
    assert not torch.equal(run(view, x), before)


def run_sharded(group: ProcessGroup, x: Tensor) -> list[bool]:
    layer = new_layer(None, sequence_parallel=False)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    view = with_execution(layer, overlap="serial")
    with torch.no_grad():
        before, ours = run(layer, x), run(view, x)
    run(layer, x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        after = run(layer, x)
        return [torch.equal(ours, before), torch.equal(run(view, x), after), not torch.equal(before, after)]


def test_a_view_of_a_model_that_fsdp_shards(ranks: RankPool) -> None:
    for results in ranks.run(run_sharded, torch.randn(TOKENS, CONFIG.hidden_size), world=2):
        assert results == [True] * 3


def test_a_child_of_two_modules_stays_one() -> None:
    child = nn.Linear(2, 2)
    view = with_execution(nn.ModuleList([child, nn.Sequential(child)]), overlap="serial")
    assert view[0] is view[1][0]
    assert view[0] is not child


@torch.no_grad()
def run_on_gpus(group: ProcessGroup, dtype: torch.dtype) -> bool:
    device = torch.device("cuda", torch.cuda.current_device())
    if "symmetric-memory" not in available_overlaps(group, device):
        return False
    torch.manual_seed(0)
    place: dict[str, Any] = {
        "placement": Placement(group, sequence_parallel=True),
        "bias": True,
        "dtype": dtype,
        "device": device,
    }
    column, row = ColumnParallelLinear(256, 512, **place), RowParallelLinear(512, 256, **place)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for tokens in (1, 7, 128, 2000):
        x = torch.randn(tokens, 256, device=device).to(dtype)
        for layer in (column, row):
            view = with_execution(layer, overlap="symmetric-memory", reduce_dtype=dtype)
            ours, theirs = view(x), layer(x)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            if dtype == torch.bfloat16:
                exact = copy.deepcopy(layer).double()(x.double())
                assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
            x = theirs
    return True


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_overlaps_on_gpus(nccl_ranks: RankPool, dtype: torch.dtype) -> None:
    if not all(nccl_ranks.run(run_on_gpus, dtype)):
        pytest.skip("the GPUs have no symmetric memory")
