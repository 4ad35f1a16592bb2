"""torch.compile with its own backend, which generates and builds C++ here: layers and losses as one graph.

The other tests of compilation, beside the layers', take the backend "aot_eager", which traces the same graphs.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers import DecoderConfig, DecoderLayer, ParallelMLP, RMSNorm, RotaryEmbedding
from parallel_layers.distributed.collectives import gather_from_sequence_parallel
from parallel_layers.head import vocab_parallel_log_probs
from parallel_layers.head.log_probs import linear_log_probs
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.layers import ColumnParallelLinear, RowParallelLinear
from parallel_layers.testing import RankPool


def two_lengths(group: ProcessGroup, sp: bool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Compiled and eager: a loss and the gradients of the input and of every parameter."""
    torch._dynamo.reset()
    up = ColumnParallelLinear(8, 12, bias=True, placement=Placement(group, sp))
    down = RowParallelLinear(12, 8, bias=True, placement=Placement(group, sp))
    head = torch.randn(5, 8, requires_grad=True)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        hidden = down(F.gelu(up(x)))
        options = {"group": group, "vocab_size": 10}
        log_probs = linear_log_probs(hidden, head, labels, sequence_parallel=sp, **options).log_probs
        if sp:
            hidden = gather_from_sequence_parallel(hidden, group)
        return log_probs.sum() + vocab_parallel_log_probs(hidden @ head.T, labels, **options).entropy.sum()

    compiled = torch.compile(loss, fullgraph=True)
    results = []
    for tokens in (8, 12):
        x = torch.randn(tokens // group.size() if sp else tokens, 8, requires_grad=True)
        labels = torch.randint(10, (tokens,))
        leaves = [x, head, *up.parameters(), *down.parameters()]
        value, expected = compiled(x, labels), loss(x, labels)
        results.append(
            ([value, *torch.autograd.grad(value, leaves)], [expected, *torch.autograd.grad(expected, leaves)])
        )
    return results


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sp", [False, True])
def test_linears_and_losses_compile_without_a_graph_break(ranks: RankPool, sp: bool) -> None:
    for results in ranks.run(two_lengths, sp, world=2, timeout=600):
        for compiled, eager in results:
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


SIZES = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24}
LAYERS = {
    "norm": lambda: RMSNorm(16),
    "mlp": lambda: ParallelMLP(16, 24),
    "qwen3": lambda: DecoderLayer(DecoderConfig(**SIZES, qk_norm="head", window=4)),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compile_without_a_graph_break(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer: nn.Module = LAYERS[name]()
    compiled = torch.compile(layer, fullgraph=True)
    for lengths in ([5, 2, 9], [3, 8, 0, 1, 12]):
        x, seed = torch.randn(sum(lengths), 16, requires_grad=True), torch.randn(sum(lengths), 16)
        tables = RotaryEmbedding(4)(torch.cat([torch.arange(n) for n in lengths]))
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        arguments = (tables, bounds, max(lengths)) if isinstance(layer, DecoderLayer) else ()
        leaves, outs = [x, *layer.parameters()], [run(x, *arguments) for run in (compiled, layer)]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*(torch.autograd.grad(out, leaves, seed) for out in outs), rtol=1e-5, atol=1e-5)
