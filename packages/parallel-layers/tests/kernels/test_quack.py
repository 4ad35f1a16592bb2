"""Products by quack: on a CPU by a stand-in with its signatures, on a GPU by its kernels."""

from __future__ import annotations

import cpu_quack
import pytest
import torch
from torch import Tensor

from parallel_layers.kernels import quack
from parallel_layers.kernels.quack import LARGE, multiply, takes

BF16 = torch.bfloat16


def operands(tokens: int, outputs: int, inputs: int, device: str = "cpu") -> dict[str, tuple[Tensor, Tensor]]:
    """Return what each product of a linear layer multiplies: a and b of `a b^T`."""
    x, weight, dy = (
        torch.randn(*shape, dtype=BF16, device=device)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    return {"output": (x, weight), "dx": (dy, weight.T), "dW": (dy.T, x.T)}


def test_a_plan_for_each_layout_and_none_for_sizes() -> None:
    """A new number of tokens makes no plan: quack keeps one for each call of its own function."""
    with cpu_quack.dense() as (compiled, _):
        for tokens in range(1, 40):
            for a, b in operands(8 * tokens, 16, 24).values():
                out = torch.empty(len(a), len(b), dtype=BF16)
                multiply(a, b, out, LARGE)
                torch.testing.assert_close(out, (a.float() @ b.float().T).to(BF16), rtol=0, atol=0)
        assert len(compiled) == 3
        a, b = operands(16, 16, 24)["output"]
        total = torch.ones(16, 16)
        multiply(a, b, total, LARGE, add=True)
        torch.testing.assert_close(total, 1 + a.float() @ b.float().T)
        assert len(compiled) == 4


def test_which_operands_the_kernels_take() -> None:
    a, b = torch.zeros(64, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)
    assert not takes(a, b)  # no GPU
    with cpu_quack.dense(min_work=64**3, min_size=32):
        assert takes(a, b)
        assert takes(a.T, b.T)
        assert takes(torch.nn.Parameter(a), b)
        odd = torch.zeros(71, 64, dtype=BF16)
        assert takes(odd, b)
        assert not takes(b, odd)  # the output's rows would start anywhere
        odd = torch.zeros(64, 65, dtype=BF16)
        for other in (a[:63], a[:, :31], a.float(), odd[:, :64], odd[:, ::2], odd.flatten()[1:4097].view(64, 64)):
            assert not takes(other, b[:, : other.shape[1]]), (other.shape, other.stride())
        assert torch.compile(lambda x, y: x + takes(x, y), backend="eager", fullgraph=True)(a, b).sum() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not quack.has_quack(), reason="needs quack-kernels")
def test_on_a_gpu() -> None:
    """Equal to fp32 within bf16's rounding, in one order of sums, and nothing compiled for other numbers of tokens."""
    if not quack.is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")
    assert takes(*operands(16384, 4096, 4096, "cuda")["output"])
    plans = None
    for tokens in (2048, 1301, 1025):
        for a, b in operands(tokens, 1024, 2048, "cuda").values():
            out, again = (torch.empty(len(a), len(b), dtype=BF16, device="cuda") for _ in range(2))
            multiply(a, b, out, LARGE)
            multiply(a, b, again, LARGE)
            assert torch.equal(out, again)
            torch.testing.assert_close(out.float(), a.float() @ b.float().T, rtol=8e-3, atol=1e-2)
        plans = len(quack._plans) if plans is None else plans
    assert len(quack._plans) == plans
    x, weight = operands(4096, 1024, 2048, "cuda")["output"]
    whole, parts = (
        torch.empty(4096, 1024, dtype=BF16, device="cuda"),
        torch.empty(4096, 1024, dtype=BF16, device="cuda"),
    )
    multiply(x, weight, whole, LARGE)
    for start in range(0, 4096, 1024):
        multiply(x[start : start + 1024], weight, parts[start : start + 1024], LARGE)
    assert torch.equal(whole, parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(x, weight, parts, LARGE)
    parts.zero_()
    graph.replay()
    graph.replay()
    assert torch.equal(whole, parts)
