"""The whole block against transformers' own, on one rank and divided every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from parallel_layers import ParallelDims
from parallel_layers.inference import decoding_attributes
from parallel_layers.linear.execution import Placement
from parallel_layers.module import view_of
from parallel_layers.module.sharding import load_full_
from parallel_layers.moe import ClampedSwiGLU, MoE, MoEConfig, RouterReplay, RoutingContext, gathered_attributes
from parallel_layers.testing import RankPool

HIDDEN, TOKENS = 24, 20

# family -> (transformers' block, its config, ours)
FAMILIES: dict[str, tuple[type[nn.Module], Any, MoEConfig]] = {
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
        ),
        MoEConfig(num_experts=8, top_k=3, intermediate_size=12),
    ),
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(hidden_size=HIDDEN, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2),
        MoEConfig(num_experts=4, top_k=2, intermediate_size=20),
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        DeepseekV3Config(
            hidden_size=HIDDEN, moe_intermediate_size=12, n_routed_experts=16, num_experts_per_tok=4, n_group=4,
            topk_group=2, n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        ),
        MoEConfig(
            num_experts=16, top_k=4, intermediate_size=12, scoring="sigmoid", correction_bias=True, num_groups=4,
            top_k_groups=2, routed_scaling_factor=2.5, shared_intermediate_size=24,
        ),
    ),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=12, shared_expert_intermediate_size=16, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=False,
        ),
        MoEConfig(
            num_experts=8, top_k=2, intermediate_size=12, normalize_top_k=False, shared_intermediate_size=16,
            shared_expert_gate=True,
        ),
    ),
    "gpt_oss": (
        GptOssMLP,
        # Bounds that many of these numbers reach.
        GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=12, num_local_experts=8, num_experts_per_tok=3, swiglu_limit=1.5,
            swiglu_alpha=1.3,
        ),
        MoEConfig(
            num_experts=8, top_k=3, intermediate_size=12, router_bias=True, expert_bias=True,
            activation=ClampedSwiGLU(alpha=1.3, limit=1.5),
        ),
    ),
}  # fmt: skip


def full_tensors(block: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """transformers' parameters (or their gradients) by our names."""
    tensors = {name: p.grad if gradients else p.detach() for name, p in block.named_parameters()}
    if isinstance(block, GptOssMLP):
        return {name.replace("router.", "gate."): gpt_oss_tensor(name, tensor) for name, tensor in tensors.items()}
    shared = next((name.split(".")[0] for name in tensors if name.endswith("gate_proj.weight")), None)
    if shared is not None:
        parts = [tensors.pop(f"{shared}.{half}_proj.weight") for half in ("gate", "up")]
        tensors["shared_experts.gate_up_proj.weight"] = torch.cat(parts)
        tensors["shared_experts.down_proj.weight"] = tensors.pop(f"{shared}.down_proj.weight")
    return tensors


def gpt_oss_tensor(name: str, tensor: Tensor) -> Tensor:
    """Its experts' weights are `[E, in, out]`, and its gate and up take turns in the last dim."""
    if "gate_up" in name:
        tensor = torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)
    return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor


def reference(family: str, hidden: Tensor, d_out: Tensor) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """The block, its output, its input's gradient and its parameters' gradients, for random weights."""
    torch.manual_seed(11)
    build, config, _ = FAMILIES[family]
    config._experts_implementation = "eager"
    block = build(config)
    if family == "gpt_oss":  # transformers 5.17 does not read these
        block.experts.alpha, block.experts.limit = config.swiglu_alpha, config.swiglu_limit
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.4)
    if family == "deepseek_v3":
        block.gate.e_score_correction_bias.normal_(std=0.3)
    hidden = hidden.clone().requires_grad_()
    out = block(hidden[None])
    out = out[0][0] if isinstance(out, tuple) else out[0]  # gpt-oss also returns its scores
    out.backward(d_out)
    return block, out.detach(), hidden.grad, full_tensors(block, gradients=True)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)


def ours(family: str, block: nn.Module, **options: Any) -> MoE:
    moe = MoE(HIDDEN, FAMILIES[family][2], **options)
    load_full_(moe, full_tensors(block))
    if family == "deepseek_v3":
        moe.gate.e_score_correction_bias.copy_(block.gate.e_score_correction_bias)
    return moe


def check_gradients(moe: MoE, expected: dict[str, Tensor]) -> None:
    """Every gradient equals this rank's part of the full one."""
    parts = {name: torch.zeros_like(p) for name, p in moe.named_parameters()}
    actual = {name: p.grad.clone() for name, p in moe.named_parameters()}
    assert actual.keys() == expected.keys()
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parts[name] = parameter.detach().clone()
        load_full_(moe, expected)
        for name, parameter in moe.named_parameters():
            scale = expected[name].abs().max().clamp(min=1)
            torch.testing.assert_close(
                actual[name] / scale, parameter / scale, rtol=1e-5, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
            )
            parameter.copy_(parts[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_with_every_gradient(family: str) -> None:
    hidden, d_out = inputs()
    block, out, d_hidden, gradients = reference(family, hidden, d_out)
    moe = ours(family, block)
    hidden.requires_grad_()
    actual = moe(hidden)
    actual.backward(d_out)
    torch.testing.assert_close(actual, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=1e-5, atol=1e-5)
    check_gradients(moe, gradients)


def divided(group: ProcessGroup, family: str, tp: int, ep: int, sequence_parallel: bool, whole_experts: bool) -> None:
    """Rank = data * tp + t. Data-parallel ranks hold different tokens; the expert group is as the case says.

    The decoding view of the layer computes the same, and so do views with gathered experts.
    """
    rank, world = group.rank(), group.size()
    data = world // tp
    mesh = ParallelDims(dp=data, tp=tp).build_mesh("cpu", ranks=range(world))
    tp_group, across = mesh.get_group("tp"), mesh.get_group("dp")
    expert_group = None if ep == 1 else (group if whole_experts else across)
    assert expert_group is None or expert_group.size() == ep

    hidden, d_out = inputs()
    block, out, d_hidden, gradients = reference(family, hidden, d_out)
    moe = ours(
        family, block, placement=Placement(tp_group, sequence_parallel), expert_group=expert_group,
        expert_tensor_parallel=not whole_experts,
    )  # fmt: skip

    def local(x: Tensor) -> Tensor:
        mine = x.chunk(data)[rank // tp]
        return mine.chunk(tp)[rank % tp] if sequence_parallel else mine

    gathered = view_of(moe, lambda _, copy: copy.__dict__.update(gathered_attributes(copy)))
    for held in (moe, gathered):
        view = view_of(held, lambda _, copy: copy.__dict__.update(decoding_attributes(copy)))
        with torch.no_grad():  # every tensor-parallel rank has all tokens
            decoded = view(hidden.chunk(data)[rank // tp])
        torch.testing.assert_close(decoded, out.chunk(data)[rank // tp], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(gathered(local(hidden)), local(out), rtol=1e-5, atol=1e-5)
    assert len(gathered.experts.gate_up_proj) == gathered.config.num_experts
    if rank < tp:  # no rank waits for others that have other tokens
        with torch.no_grad():
            gathered(local(hidden))

    mine = local(hidden).clone().requires_grad_()
    actual = moe(mine)
    actual.backward(local(d_out))
    torch.testing.assert_close(actual, local(out), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, local(d_hidden), rtol=1e-5, atol=1e-5)
    # The data-parallel engine's part: sum what is replicated over ranks with other tokens.
    for name, parameter in moe.named_parameters():
        if not name.startswith("experts.") or ep == 1:
            dist.all_reduce(parameter.grad, group=across)
    check_gradients(moe, gradients)


# tp, ep, world, sequence_parallel, whole_experts
GRIDS = [
    (2, 1, 2, False, False),
    (2, 1, 2, True, False),
    (1, 2, 2, False, False),
    (2, 2, 2, False, True),
    (2, 2, 2, True, True),
    (2, 2, 4, False, False),
    (2, 2, 4, True, False),
    (2, 4, 4, True, True),
]
# In the quick run every grid has one or two families, and every family three or four grids.
DIVIDED = [
    pytest.param(family, *grid, marks=[] if (f - g) % 5 in (0, 2) else pytest.mark.slow)
    for f, family in enumerate(FAMILIES)
    for g, grid in enumerate(GRIDS)
]


@pytest.mark.parametrize(("family", "tp", "ep", "world", "sequence_parallel", "whole_experts"), DIVIDED)
def test_divided_equals_transformers(
    ranks: RankPool, family: str, tp: int, ep: int, world: int, sequence_parallel: bool, whole_experts: bool
) -> None:
    ranks.run(divided, family, tp, ep, sequence_parallel, whole_experts, world=world, timeout=60)


def one_sided(group: ProcessGroup, empty_rank: int | None) -> list[Tensor]:
    """All tokens go to expert 1, of rank 0; one rank may have no token at all."""
    torch.manual_seed(0)
    moe = MoE(8, MoEConfig(num_experts=4, top_k=1, intermediate_size=6), expert_group=group)
    tokens = 0 if group.rank() == empty_rank else 5
    hidden = torch.ones(tokens, 8, requires_grad=True)
    with torch.no_grad():
        moe.gate.weight.zero_()
        moe.gate.weight[1] = 1.0
    out = moe(hidden)
    out.sum().backward()
    assert out.shape == hidden.grad.shape == (tokens, 8)
    return [parameter.grad for parameter in moe.experts.parameters()]


@pytest.mark.parametrize("empty_rank", [None, 0, 1])
def test_experts_and_ranks_without_tokens(ranks: RankPool, empty_rank: int | None) -> None:
    results = ranks.run(one_sided, empty_rank, world=2, timeout=60)
    for gradient in results[0]:
        assert gradient[0].abs().max() == 0
        assert gradient[1].abs().max() > 0
    for gradient in results[1]:
        assert gradient.abs().max() == 0


def test_no_tokens_at_all() -> None:
    moe = MoE(8, MoEConfig(num_experts=4, top_k=2, intermediate_size=6, shared_intermediate_size=4, balance_loss=0.1))
    hidden = torch.zeros(0, 8, requires_grad=True)
    context = RoutingContext()
    moe(hidden, context).sum().backward()
    assert all(parameter.grad.abs().sum() == 0 for parameter in moe.parameters())
    assert context.loads[0].tolist() == [0.0] * 4
    assert context.losses[0]["balance_loss"] == 0


def test_tokens_of_two_dims_are_refused() -> None:
    moe = MoE(8, MoEConfig(num_experts=4, top_k=2, intermediate_size=6))
    with pytest.raises(ValueError, match=r"hidden states of shape \[2, 3, 8\] must be \[T, H\]; flatten"):
        moe(torch.randn(2, 3, 8))


def test_a_token_changes_no_other() -> None:
    torch.manual_seed(0)
    moe = MoE(8, MoEConfig(num_experts=4, top_k=2, intermediate_size=6))
    hidden = torch.randn(9, 8)
    changed = hidden.clone()
    changed[4] += 1
    others = torch.arange(9) != 4
    torch.testing.assert_close(moe(hidden)[others], moe(changed)[others], rtol=1e-6, atol=1e-6)


def test_bf16_errs_no_more_than_transformers() -> None:
    hidden, d_out = inputs()
    block, out, _, _ = reference("qwen3_moe", hidden, d_out)
    record = RouterReplay()
    ours("qwen3_moe", block)(hidden, RoutingContext(replay=record))
    actual = ours("qwen3_moe", block).bfloat16()(hidden.bfloat16(), RoutingContext(replay=record.replaying()))
    block.bfloat16()
    theirs = block(hidden[None].bfloat16())[0]
    # Near a tie bf16 logits choose another expert; that is not rounding.
    chosen = block.gate(hidden.bfloat16())[2]
    same = (chosen.sort(1).values == record.experts[0].sort(1).values).all(1)
    assert same.sum() > TOKENS // 2
    error, their_error = ((x.double() - out.double())[same].norm() for x in (actual, theirs))
    assert error <= 1.5 * their_error
    assert actual.dtype == torch.bfloat16


def test_whole_experts_need_an_exchange_within_the_tensor_group(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"must contain the tensor-parallel ranks \[0, 1\]"):
        ranks.run(whole_without_exchange, world=2, timeout=60)


def whole_without_exchange(group: ProcessGroup) -> None:
    MoE(
        8,
        MoEConfig(num_experts=4, top_k=2, intermediate_size=6),
        placement=Placement(group),
        expert_tensor_parallel=False,
    )


def parts_within_the_tensor_group(group: ProcessGroup) -> None:
    MoE(8, MoEConfig(num_experts=4, top_k=2, intermediate_size=6), placement=Placement(group), expert_group=group)


def test_divided_experts_are_not_exchanged_within_the_tensor_group(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\] has several ranks of the tensor-parallel group \[0, 1\]"):
        ranks.run(parts_within_the_tensor_group, world=2, timeout=60)


def indivisible(group: ProcessGroup) -> None:
    MoE(8, MoEConfig(num_experts=3, top_k=2, intermediate_size=6), expert_group=group)


def test_experts_that_do_not_divide(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"num_experts=3 is not divisible by ep=2; use ep in \{1, 3\}"):
        ranks.run(indivisible, world=2, timeout=60)
