"""Linears for inference: views that share every weight, bitwise as in training, and the products that overlap."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_peer_memory import peer_memory_on_cpu
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard

from parallel_layers import (
    ColumnParallelLinear,
    DecoderConfig,
    DecoderLayer,
    RotaryEmbedding,
    RowParallelLinear,
)
from parallel_layers.inference import available_linear_backends, for_inference
from parallel_layers.linear import Execution, Placement, symmetric_memory
from parallel_layers.linear.symmetric_memory import why_not_peers, why_not_symmetric_memory
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(
    hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24, attention_bias=True, output_bias=True
)
TOKENS = 6


def new_layer(group: ProcessGroup | None, sequence_parallel: bool = True, **place: Any) -> DecoderLayer:
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, placement=Placement(group, sequence_parallel), **place)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def run(layer: nn.Module, x: Tensor) -> Tensor:
    tokens = TOKENS if x.shape[0] else 0
    rotary = RotaryEmbedding(4)(torch.arange(tokens))
    return layer(x, rotary, torch.tensor([0, tokens], dtype=torch.int32), tokens)


@torch.no_grad()
def _run_layer(group: ProcessGroup | None, sequence_parallel: bool, x: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    layer = new_layer(group, sequence_parallel)
    if group is not None and sequence_parallel:
        x = x.chunk(group.size())[group.rank()]
    view = for_inference(layer)
    names = {module.inference_backend for module in view.modules() if hasattr(module, "inference_backend")}
    return run(layer, x), run(view, x), sorted(names)


@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_evaluation_is_bitwise_training(ranks: RankPool, world: int, sequence_parallel: bool) -> None:
    arguments = sequence_parallel, torch.randn(TOKENS, CONFIG.hidden_size)
    results = [_run_layer(None, *arguments)] if world == 1 else ranks.run(_run_layer, *arguments, world=world)
    for trained, view, backends in results:
        assert torch.equal(trained, view)
        assert backends == ["collectives"]


@torch.no_grad()
def _run_fused(group: ProcessGroup, x: Tensor) -> tuple[Tensor, Tensor, list[str], int]:
    layer = new_layer(group)
    x = x.chunk(group.size())[group.rank()]
    with peer_memory_on_cpu() as called:
        view = for_inference(layer)
        out, first = run(view, x), list(called)
        run(view, x[:0])
    return run(layer, x), out, first, len(called)


def test_products_that_overlap(ranks: RankPool) -> None:
    """The four products of a decoder layer, with biases; without tokens none of them is asked."""
    for trained, fused, first, calls in ranks.run(_run_fused, torch.randn(TOKENS, CONFIG.hidden_size), world=2):
        torch.testing.assert_close(fused, trained, rtol=1e-5, atol=1e-6)
        assert first == ["gather", "scatter", "gather", "scatter"]
        assert calls == len(first)


def _run_options(group: ProcessGroup, x: Tensor) -> None:
    """Outputs and sums in a wider dtype than the products' are computed as in training."""
    place: dict[str, Any] = {"placement": Placement(group, sequence_parallel=True), "bias": True}
    columns = [
        ColumnParallelLinear(8, 4, **place),
        ColumnParallelLinear(8, 4, defer_bias=True, **place),
        ColumnParallelLinear(8, 4, gather_output=True, **place),
        ColumnParallelLinear(8, 4, output_dtype=torch.float64, **place),
    ]
    rows = [
        RowParallelLinear(8, 4, **place),
        RowParallelLinear(8, 4, defer_bias=True, **place),
        RowParallelLinear(8, 4, output_dtype=torch.float64, **place),
        RowParallelLinear(8, 4, execution=Execution(reduce_dtype=torch.float64), **place),
        RowParallelLinear(8, 4, input_is_parallel=False, **place),
    ]
    with peer_memory_on_cpu() as called:
        for layers, fused in ((columns, ["gather"] * 3), (rows, ["scatter"] * 4)):
            called.clear()
            for layer in layers:
                nn.init.normal_(layer.bias)
                size = 8 // group.size() if layer in rows and layer.input_is_parallel else 8
                with torch.no_grad():
                    ours, theirs = for_inference(layer)(x[:, :size]), layer(x[:, :size])
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
                assert ours.dtype == theirs.dtype
            assert called == fused
        with torch.no_grad(), pytest.raises(ValueError, match="not divisible by the group's 2 ranks"):
            for_inference(rows[0])(x[:3, :4])


@torch.no_grad()
def _run_bf16(group: ProcessGroup, x: Tensor) -> list[tuple[bool, list[str]]]:
    """Whether the view computes what its layer does, and what overlapped, by the dtype of the sums."""
    layer = RowParallelLinear(8, 4, placement=Placement(group, sequence_parallel=True), dtype=torch.bfloat16)
    x = x[:, :4].bfloat16()
    results = []
    with peer_memory_on_cpu() as called:
        for dtype in (None, torch.float32, torch.bfloat16):
            called.clear()
            ours = for_inference(layer, reduce_dtype=dtype)(x)
            results.append((torch.equal(ours, layer(x)), list(called)))
    assert layer.execution.reduce_dtype is None
    return results


def test_sums_are_as_exact_as_in_training(ranks: RankPool) -> None:
    """bf16 parts are summed only when they are asked for."""
    torch.manual_seed(0)
    for results in ranks.run(_run_bf16, 100 * torch.randn(64, 8), world=2):
        assert results == [(True, []), (True, []), (False, ["scatter"])]


def test_options(ranks: RankPool) -> None:
    ranks.run(_run_options, torch.randn(TOKENS, 8), world=2)


def test_a_view_shares_everything_and_changes_nothing() -> None:
    layer, x = new_layer(None, sequence_parallel=False), torch.randn(TOKENS, CONFIG.hidden_size)
    before = run(layer, x)
    view = for_inference(layer)
    assert type(view) is DecoderLayer
    assert [name for name, _ in view.named_modules()] == [name for name, _ in layer.named_modules()]
    for (name, ours), (other, theirs) in zip(view.named_parameters(), layer.named_parameters(), strict=True):
        assert name == other
        assert ours is theirs
    assert layer.training
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


def _run_sharded(group: ProcessGroup, x: Tensor) -> list[bool]:
    layer = new_layer(None, sequence_parallel=False)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    view = for_inference(layer)
    with torch.no_grad():
        before, ours = run(layer, x), run(view, x)
    run(layer, x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        after = run(layer, x)
        return [torch.equal(ours, before), torch.equal(run(view, x), after), not torch.equal(before, after)]


def test_a_view_of_a_model_that_fsdp_shards(ranks: RankPool) -> None:
    for results in ranks.run(_run_sharded, torch.randn(TOKENS, CONFIG.hidden_size), world=2):
        assert results == [True] * 3


def test_a_child_of_two_modules_stays_one() -> None:
    child = nn.Linear(2, 2)
    view = for_inference(nn.ModuleList([child, nn.Sequential(child)]))
    assert view[0] is view[1][0]
    assert view[0] is not child


def _refusals(group: ProcessGroup) -> tuple[str, tuple[str, ...]]:
    layer = new_layer(group)
    with pytest.raises(ValueError, match="backend='symmetric-memory' cannot be used") as error:
        for_inference(layer, backend="symmetric-memory")
    return str(error.value), available_linear_backends(group, "cpu")


def test_backends_are_named(ranks: RankPool) -> None:
    for message, available in ranks.run(_refusals, world=2):
        assert "it needs CUDA devices, not cpu; use 'auto' or 'collectives'" in message
        assert available == ("collectives",)
    assert why_not_symmetric_memory(None, torch.device("cpu")) == "one rank has nothing to send"
    with pytest.raises(ValueError, match="backend='nvlink' is unknown; use 'auto' or one of symmetric-memory, coll"):
        for_inference(nn.Linear(2, 2), backend="nvlink")


def test_peers() -> None:
    ids = [b"a", b"b", b"c"]
    assert why_not_peers(1, ids, [b"b", b"c"], lambda own, other: (own, other) == (1, 2)) is None
    reason = why_not_peers(1, ids, [b"b", b"a"], lambda own, other: (own, other) == (1, 2))
    assert reason == "GPU 1 has no peer access to GPU 0 (rank 1): they are not linked by NVLink"
    assert "rank 0 is on another host or hidden" in str(why_not_peers(1, ids, [b"d", b"b"], lambda own, other: True))


def _ask(group: ProcessGroup, unlinked: tuple[int, int] | None, broken: int | None) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) != unlinked)
        mapped = "torch could not map" if group.rank() == broken else None
        patch.setattr(symmetric_memory, "_why_not_mapped", lambda group, device: mapped)
        return symmetric_memory._why_not_linked(group, torch.device("cpu"), group.rank())


def test_ranks_agree(ranks: RankPool) -> None:
    """One rank's reason is a reason for all: none must wait in a product for one that went another way."""
    assert ranks.run(_ask, None, None, world=2) == [None, None]
    first, second = ranks.run(_ask, (0, 1), None, world=2)
    assert "GPU 0 has no peer access to GPU 1 (rank 1)" in first
    assert second == "another rank of the group cannot"
    assert ranks.run(_ask, None, 1, world=2) == ["another rank of the group cannot", "torch could not map"]


@torch.no_grad()
def _run_on_gpus(group: ProcessGroup, dtype: torch.dtype) -> str | None:
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := why_not_symmetric_memory(group, device)) is not None:
        return reason
    assert available_linear_backends(group, device)[0] == "symmetric-memory"
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
            view = for_inference(layer, backend="symmetric-memory", reduce_dtype=dtype)
            ours, theirs = view(x), layer(x)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            if dtype == torch.bfloat16:
                exact = copy.deepcopy(layer).double()(x.double())
                assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
            x = theirs
    return None


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_overlap_on_gpus(nccl_ranks: RankPool, dtype: torch.dtype) -> None:
    for reason in nccl_ranks.run(_run_on_gpus, dtype):
        if reason is not None:
            pytest.skip(reason)


@torch.no_grad()
def _run_decoder(group: ProcessGroup, dtype: torch.dtype) -> list[dict[str, Any]]:
    """By the backend asked for: which one was taken, whether its bits are training's, and how far both are off."""
    nccl = torch.distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    torch.manual_seed(0)
    config = DecoderConfig(hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=512)
    layer = DecoderLayer(config, placement=Placement(group, sequence_parallel=True), dtype=dtype, device=device)
    bounds = torch.tensor([0, 300, 301, 301, 512], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in (300, 1, 211)])
    arguments = RotaryEmbedding(64, device=device)(positions), bounds, 300
    x = torch.randn(512, 256).chunk(group.size())[group.rank()].to(device, dtype)
    trained, exact = layer(x, *arguments), copy.deepcopy(layer).double()(x.double(), *arguments)
    found = []
    for backend in ("collectives", "auto"):
        view = for_inference(layer, backend=backend)
        out = view(x, *arguments)
        errors = [float((y - exact).norm() / exact.norm()) for y in (out, trained)]
        taken = view.mlp.gate_up_proj.inference_backend
        found.append({"backend": taken, "equal": torch.equal(out, trained), "errors": errors})
    return found


def check_decoder(pool: RankPool, dtype: torch.dtype) -> None:
    for collectives, chosen in pool.run(_run_decoder, dtype, world=2):
        assert collectives["backend"] == "collectives"
        assert collectives["equal"]
        if chosen["backend"] == "collectives":  # the fallback
            assert chosen["equal"]
        ours, in_training = chosen["errors"]
        assert in_training < 2e-2
        assert ours <= (1.1 * in_training if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_evaluates_as_it_trains(ranks: RankPool, dtype: torch.dtype) -> None:
    check_decoder(ranks, dtype)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_evaluates_as_it_trains_on_gpus(nccl_ranks: RankPool, dtype: torch.dtype) -> None:
    """Bitwise by collectives; over symmetric memory within the rounding that training has."""
    check_decoder(nccl_ranks, dtype)
