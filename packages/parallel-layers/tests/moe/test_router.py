from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from parallel_layers.moe import MoEConfig, TopKRouter, choose_experts, route, router


def config(**options: object) -> MoEConfig:
    return MoEConfig(**{"num_experts": 8, "top_k": 2, "intermediate_size": 4, **options})


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_the_chosen_scores(scoring: str, normalize: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 8)
    routing = route(logits, config(scoring=scoring, normalize_top_k=normalize, routed_scaling_factor=2.0))
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    best, chosen = scores.topk(2)
    assert torch.equal(routing.experts, chosen)
    expected = 2 * (best / best.sum(-1, keepdim=True) if normalize else best)
    torch.testing.assert_close(routing.weights, expected)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.zeros(3, 8)
    bias = torch.zeros(8).index_fill(0, torch.tensor([5, 2]), 1.0)
    routing = route(logits, config(scoring="sigmoid", normalize_top_k=False), bias_E=bias)
    assert routing.experts.sort(1).values.tolist() == [[2, 5]] * 3
    assert torch.equal(routing.weights, torch.full((3, 2), 0.5))


def test_chosen_scores_that_underflow_weigh_nothing() -> None:
    """A bias can choose experts whose softmax scores are all 0; transformers divides them by 1e-12."""
    bias = torch.zeros(8).index_fill(0, torch.tensor([5, 2]), 2.0)
    for scoring in ("softmax", "sigmoid"):
        routing = route(torch.tensor([[0.0] + [-200.0] * 7]), config(scoring=scoring), bias_E=bias)
        assert routing.experts.sort(1).values.tolist() == [[2, 5]]
        assert not routing.weights.any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "top_k_groups": 2, "group_score": "top2"}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_get_what_has_the_same_largest_entries(
    monkeypatch: pytest.MonkeyPatch, scoring: str, options: dict[str, object], biased: bool
) -> None:
    """They choose by logits where scores have the same order."""
    torch.manual_seed(0)
    logits, bias = 3 * torch.randn(64, 8), torch.rand(8) if biased else None
    settings_of_router = config(scoring=scoring, **options)
    expected = route(logits, settings_of_router, bias_E=bias)
    monkeypatch.setattr(router, "use_triton", lambda *_: True)
    monkeypatch.setattr(router, "top_k", lambda scores, k: scores.topk(k).indices)
    monkeypatch.setattr(router, "top_weights", lambda logits, experts, *_: expected.weights)
    assert torch.equal(route(logits, settings_of_router, bias_E=bias).experts, expected.experts)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(2, 1), (4, 2), (4, 3), (1, 1)]))
def test_groups_by_enumeration(seed: int, groups: tuple[int, int]) -> None:
    num_groups, top_groups = groups
    top_k = min(3, 8 // num_groups * top_groups)
    scores = torch.rand(4, 8, generator=torch.Generator().manual_seed(seed))
    chosen = choose_experts(scores, config(num_groups=num_groups, top_k_groups=top_groups, top_k=top_k))
    size = 8 // num_groups
    for row, experts in zip(scores.tolist(), chosen.tolist(), strict=True):
        parts = [sorted(row[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
        by_score = [sum(part[:2]) for part in parts]
        best = max(itertools.combinations(range(num_groups), top_groups), key=lambda c: sum(by_score[g] for g in c))
        eligible = [e for g in best for e in range(g * size, (g + 1) * size)]
        assert experts == sorted(eligible, key=lambda e: -row[e])[:top_k]


def test_the_correction_bias_stays_fp32() -> None:
    router = TopKRouter(4, config(correction_bias=True))
    router.e_score_correction_bias.copy_(torch.arange(8) * 1e-3 + 1)
    before = router.e_score_correction_bias.clone()
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, before)
    assert "e_score_correction_bias" in router.state_dict()
    assert "e_score_correction_bias" not in TopKRouter(4, config()).state_dict()


def test_logits_are_fp32_for_bf16_hidden_states() -> None:
    torch.manual_seed(0)
    router = TopKRouter(64, config()).bfloat16()
    hidden = torch.randn(5, 64).bfloat16()
    routing = router(hidden)
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.logits, hidden.float() @ router.weight.float().T)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "tanh"}, "scoring='tanh'"),
        ({"num_groups": 3}, "num_experts=8 is not divisible by num_groups=3"),
        ({"num_groups": 2, "top_k_groups": 3}, r"top_k_groups=3 must lie in 1\.\.num_groups=2"),
        ({"top_k": 9}, r"top_k=9 must lie in 1\.\.8"),
        ({"num_groups": 4, "top_k": 3}, r"top_k=3 must lie in 1\.\.2"),
        ({"num_groups": 8, "top_k_groups": 8}, "num_groups=8 makes groups of one"),
        ({"shared_expert_gate": True}, "set shared_intermediate_size"),
    ],
)
def test_configs_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)
