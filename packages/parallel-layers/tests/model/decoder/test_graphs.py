"""DecoderLayer compiles into one graph without breaks, and reads no value on the host."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from decoder_families import FAMILIES, HIDDEN, Family, cu_seqlens_of, positions_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from parallel_layers.attention import packed
from parallel_layers.attention.backends import BACKENDS
from parallel_layers.attention.context_parallel import ring, ulysses
from parallel_layers.attention.kernel_interface import Kernel
from parallel_layers.distributed.parallel_dims import ParallelDims
from parallel_layers.linear.execution import Placement
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.moe import RouterReplay, RoutingContext, experts
from parallel_layers.testing import RankPool


def compiled_and_eager(
    group: ProcessGroup | None, family: Family, sequence_parallel: bool
) -> tuple[int, list[list[Tensor]], list[list[Tensor]]]:
    """How many graphs were made; output and gradients for packs of three lengths, compiled and eager."""
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds, which every rank would pay

    size = group.size() if group is not None and sequence_parallel else 1
    layer = DecoderLayer(family.ours, placement=Placement(group, sequence_parallel))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    results: tuple[list[list[Tensor]], list[list[Tensor]]] = ([], [])
    for lengths in ([5, 2, 9], [3, 8, 0, 1, 12], [17, 13]):
        arguments = (family.rotary(positions_of(lengths)), cu_seqlens_of(lengths), max(lengths))
        x, seed = torch.randn(2, sum(lengths) // size, HIDDEN)
        leaves = [x.requires_grad_(), *layer.parameters()]
        for run, found in zip((compiled, layer), results, strict=True):
            out = run(x, *arguments)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, seed)])
    return counter.frame_count, *results


# The quick run compiles collectives by themselves and in the linear layers.
COMPILED_IN_EVERY_RUN = {("llama", 1)}
# Each has collectives of its own at tp 2: linears, sums of norms over all heads, sinks, experts, latents.
COMPILED_WITH_COLLECTIVES = ("llama", "olmo2", "gpt-oss", "mixtral", "deepseek")


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        pytest.param(name, tp, marks=[] if (name, tp) in COMPILED_IN_EVERY_RUN else pytest.mark.slow)
        for tp, names in ((1, FAMILIES), (2, COMPILED_WITH_COLLECTIVES))
        for name in names
    ],
)
def test_compiles_without_a_graph_break(ranks: RankPool, name: str, tp: int) -> None:
    """Experts, latents and, at tp 2, collectives included; and the second graph serves all further lengths."""
    family = FAMILIES[name]
    results = (
        [compiled_and_eager(None, family, False)]
        if tp == 1
        else ranks.run(compiled_and_eager, family, True, world=tp, timeout=120)
    )
    for graphs, compiled, eager in results:
        assert graphs == 2
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_value_is_read_on_the_host(name: str) -> None:
    """Fake tensors have no values: reading one (`item`, a boolean index, `nonzero`) raises, forward or backward.

    What is behind an operator of its own is not looked at: on a CPU attention and grouped products read their bounds.
    """
    family = FAMILIES[name]
    config = family.ours
    context = None
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, balance_loss=0.1, sequence_balance_loss=0.1, z_loss=0.1))
        context = RoutingContext(segments=torch.zeros(20, dtype=torch.int64), replay=RouterReplay())
    layer = DecoderLayer(config, device="meta")
    named = [*layer.named_parameters(), *layer.named_buffers()]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {key: torch.empty(t.shape, dtype=t.dtype, requires_grad=t.requires_grad) for key, t in named}
        x = torch.randn(20, HIDDEN, requires_grad=True)
        tables = tuple(mode.from_tensor(table) for table in family.rotary(torch.arange(20)))
        cu_seqlens = torch.zeros(4, dtype=torch.int32)
        out = functional_call(layer, state, (x, tables, cu_seqlens, 9), {"routing": context})
        out.sum().backward()
        assert x.grad.shape == x.shape
        with pytest.raises(DataDependentOutputException):
            out.sum().item()


READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__")


class _ValuesStayOnTheDevice(TorchFunctionMode):
    """Refuses what reads a tensor's value on the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = args[1] if function is Tensor.__getitem__ else None
        indices = index if isinstance(index, tuple) else (index,)
        by_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices)
        if by_mask or function in [getattr(Tensor, name) for name in READS]:
            raise AssertionError(f"{function.__name__} reads a value on the host")
        return function(*args, **(kwargs or {}))


def run_without_reading(group: ProcessGroup, config: DecoderConfig, rotary: tuple[Tensor, Tensor]) -> bool:
    mesh = ParallelDims(cp=2, tp=2).build_mesh("cpu", ranks=torch.distributed.get_process_group_ranks(group))
    tp, cp = mesh.get_group("tp"), mesh.get_group("cp")
    layer = DecoderLayer(config, placement=Placement(tp, sequence_parallel=True), context_group=cp)
    x, cu_seqlens = torch.randn(10, HIDDEN, requires_grad=True), cu_seqlens_of([13, 1, 0, 21, 5])
    # On a CPU attention and grouped products read and check their bounds; their kernels do not.
    readers = [(experts, "_runs"), *((module, "check_segments") for module in (packed, ring, ulysses))]
    unseen = replace(BACKENDS["reference"], kernel=Kernel(*map(_unseen, BACKENDS["reference"].kernel)))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(BACKENDS, reference=unseen))
        for owner, name in readers:
            stack.enter_context(patch.object(owner, name, _unseen(getattr(owner, name))))
        stack.enter_context(_ValuesStayOnTheDevice())
        layer(x, rotary, cu_seqlens, 21).sum().backward()
    return x.grad is not None


def _unseen(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return call


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "ulysses"), ("llama", "ring"), ("gpt-oss attention", "ring"), ("deepseek", "ring")],
)
def test_no_value_is_read_on_the_host_on_a_grid(ranks: RankPool, name: str, attention: str) -> None:
    with pytest.raises(AssertionError, match="tolist reads"), _ValuesStayOnTheDevice():
        torch.zeros(2).tolist()
    family = FAMILIES[name]
    config = replace(family.ours, context_parallel=attention)
    assert all(ranks.run(run_without_reading, config, family.rotary(torch.arange(20)), world=4))
