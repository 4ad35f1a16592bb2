"""Each row of the table against its definition, computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_models import Batch, LossInputs, losses
from rl_train.loop.objective import ADVANTAGES, advantages, loss_of, policy_loss, value_loss
from rl_train.options.algorithms import ALGORITHMS
from rl_train.options.derived import check
from rl_train.options.options import TrainOptions

SCORES = torch.tensor([1.0, 0.0, 0.0, 3.0])
GROUPS = torch.tensor([0, 0, 1, 1])


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = (4, 3, 5, 4)
    names = ("old_log_probs", "reference_log_probs", "old_values")
    fields = {name: [torch.randn(length, generator=generator) for length in lengths] for name in names}
    rows = [torch.ones(length, dtype=torch.int64) for length in lengths]
    return Batch.from_sequences(rows, response_lengths=[2, 1, 3, 2], **fields)


def options(algorithm: str, **more: Any) -> TrainOptions:
    return TrainOptions(model=Path("m"), prompts=Path("p"), reward="r:f", algorithm=algorithm, **more)


def loss_inputs(batch: Batch, log_probs: torch.Tensor, entropy: torch.Tensor) -> LossInputs:
    return LossInputs(batch, {"log_probs": log_probs, "entropy": entropy})


def estimate(algorithm: str, **more: Any) -> tuple[Batch, dict[str, torch.Tensor]]:
    batch = make_batch()
    of = options(algorithm, **more)
    return batch, dict(advantages(of, batch, SCORES, GROUPS))


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dapo"])
def test_group_relative_advantages(algorithm: str) -> None:
    batch, found = estimate(algorithm, kl_coefficient=0.5)
    expected = torch.tensor([0.5, -0.5, -1.5, 1.5]) / torch.tensor([0.5, 0.5, 4.5, 4.5]).sqrt()
    for part, mask, value in zip(batch.split(found["advantages"]), batch.split("mask"), expected, strict=True):
        torch.testing.assert_close(part, torch.where(mask, value, 0.0), rtol=1e-5, atol=0)


def test_dr_grpo_centres_advantages_without_scaling() -> None:
    batch, actual = estimate("dr-grpo")
    expected = SCORES - SCORES.view(2, 2).mean(1).repeat_interleave(2)
    torch.testing.assert_close(actual["advantages"], torch.where(batch.mask, expected[batch.sequence_ids], 0))


def test_leave_one_out_counts_the_penalty() -> None:
    batch, found = estimate("rloo", kl_coefficient=0.5)
    penalty = batch.sum_by_sequence(batch["old_log_probs"] - batch["reference_log_probs"])
    totals = SCORES - 0.5 * penalty
    expected = totals - totals[[1, 0, 3, 2]]
    for part, mask, value in zip(batch.split(found["advantages"]), batch.split("mask"), expected, strict=True):
        torch.testing.assert_close(part[mask], value.expand(int(mask.sum())))


@pytest.mark.parametrize(("algorithm", "baseline"), [("ppo", True), ("reinforce++", False)])
def test_advantages_over_time_are_whitened(algorithm: str, baseline: bool) -> None:
    batch, found = estimate(algorithm, kl_coefficient=0.5)
    expected = []
    for number in range(4):
        (log_probs, reference, values, mask) = (
            batch.split(name)[number] for name in ("old_log_probs", "reference_log_probs", "old_values", "mask")
        )
        rewards = -0.5 * (log_probs - reference)[mask]
        rewards[-1] += SCORES[number]
        # With gamma and lambda 1 the advantage is what is still to come, less the value.
        expected.append(rewards.flip(0).cumsum(0).flip(0) - (values[mask] if baseline else 0))
    flat = torch.cat(expected)
    white = (flat - flat.mean()) / flat.std(correction=0)
    torch.testing.assert_close(found["advantages"][batch.mask], white, rtol=1e-4, atol=1e-5)
    assert ("returns" in found) == baseline


def test_distillation_compares_with_the_teacher_token_by_token() -> None:
    batch, estimates = estimate("on-policy-distillation")
    expected = torch.where(batch.mask, batch["reference_log_probs"] - batch["old_log_probs"], 0.0)
    assert torch.equal(estimates["advantages"], expected)


def test_the_strength_of_dro() -> None:
    batch = make_batch().with_fields(advantages=torch.linspace(-1, 1, 16))
    log_probs = batch["old_log_probs"] + 0.3
    terms = policy_loss(
        options("grpo", **{"objective.loss": "dro", "objective.dro_beta": 0.25}),
        loss_inputs(batch, log_probs, torch.rand(16)),
    )
    expected = losses.dro(log_probs, batch["old_log_probs"], batch["advantages"], beta=0.25).loss
    torch.testing.assert_close(terms.loss, expected)


def test_what_the_rows_say_of_the_loss() -> None:
    batch = make_batch().with_fields(advantages=torch.linspace(-1, 1, 16))
    log_probs = batch["old_log_probs"] + 0.3
    entropy = torch.rand(16)
    for name, row in ALGORITHMS.items():
        of = options(name, kl_coefficient=0.5, **{"objective.entropy_coefficient": 0.1})
        terms = policy_loss(of, loss_inputs(batch, log_probs, entropy))
        surrogate = losses.ppo_clip(
            log_probs, batch["old_log_probs"], batch["advantages"], clip_low=row.clip_low, clip_high=row.clip_high
        )
        if name in ("cispo", "sapo"):
            clips = {} if name == "sapo" else {"clip_low": 1.0, "clip_high": 4.0}
            surrogate = getattr(losses, name)(log_probs, batch["old_log_probs"], batch["advantages"], **clips)
        if name == "gspo":
            surrogate = losses.gspo_clip(
                log_probs, batch["old_log_probs"], batch["advantages"], batch.mask, batch.lengths
            )
        expected = surrogate.loss - 0.1 * entropy
        if row.kl == "loss":
            expected = expected + 0.5 * losses.kl_penalty(log_probs, batch["reference_log_probs"], "k3")
        if name == "dr-grpo":
            expected = expected / of.sampling.max_new_tokens
        torch.testing.assert_close(terms.loss, expected)
    assert [name for name, row in ALGORITHMS.items() if row.critic] == ["ppo"]
    assert [name for name, row in ALGORITHMS.items() if row.equal_groups == "resample"] == ["dapo"]
    assert {name for name, row in ALGORITHMS.items() if row.aggregation == "sequence-mean"} == {"grpo", "gspo", "sapo"}


def test_what_the_options_add_to_the_loss() -> None:
    batch = make_batch().with_fields(advantages=torch.linspace(-1, 1, 16), importance_weights=torch.full((16,), 1.5))
    log_probs, old = batch["old_log_probs"] + 1.5, batch["old_log_probs"]
    kl = {"kl_coefficient": 0.5, "objective.kl_estimator": "k2"}
    of = options(
        "dapo", **{"objective.dual_clip": 3.0}, importance_cap=1.5, **{"objective.aggregation": "sequence-mean"}, **kl
    )
    found = policy_loss(of, loss_inputs(batch, log_probs, torch.zeros(16))).loss
    ratio, advantages = math.exp(1.5), batch["advantages"]
    # Above the interval: 1.28 A for a good token, at most 3 |A| lost for a bad one.
    surrogate = torch.where(advantages > 0, -1.28 * advantages, -min(ratio, 3.0) * advantages)
    penalty = 0.5 * (log_probs - batch["reference_log_probs"]).square()
    torch.testing.assert_close(found, 1.5 * surrogate + 0.5 * penalty)
    assert of.objective.aggregation == "sequence-mean"
    values = batch.with_fields(returns=old + 10)
    for clip, moved in ((0.2, 0.2), (0.0, 1.0)):
        found = value_loss(
            options("ppo", **{"critic.value_clip": clip}), LossInputs(values, {"values": batch["old_values"] - 1})
        ).loss
        error = batch["old_values"] - values["returns"]
        expected = 0.5 * torch.maximum((error - 1).square(), (error - moved).square())
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("algorithm", "compare"), [("grpo", losses.grpo_advantages), ("rloo", losses.rloo_advantages)])
def test_rejected_responses_are_no_part_of_the_baseline_of_their_siblings(algorithm: str, compare: Any) -> None:
    batch = make_batch()
    batch = Batch.concatenate([batch, batch.select([3])])
    scores, groups = torch.tensor([1.0, 9.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1, 1])
    rejected = torch.tensor([False, True, False, False, True])  # the last response to the second prompt is left alone
    weights = torch.where(rejected[batch.sequence_ids], 0.0, 0.7)
    batch = batch.with_fields(importance_weights=weights)
    found = ADVANTAGES[options(algorithm).rule.advantages](batch, scores, groups, options(algorithm))["advantages"]
    first, third = compare(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    expected = torch.tensor([float(first), 0.0, float(third), 0.0, 0.0])
    torch.testing.assert_close(found, torch.where(batch.mask, expected[batch.sequence_ids], 0))


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++"])
def test_rejected_responses_are_no_part_of_what_whitens_the_others(algorithm: str) -> None:
    batch, of = make_batch(), options(algorithm)
    weights = torch.where(batch.sequence_ids == 3, 0.0, 1.0)
    found = ADVANTAGES[of.rule.advantages](batch.with_fields(importance_weights=weights), SCORES, GROUPS, of)
    alone = batch.select([0, 1, 2])
    expected = ADVANTAGES[of.rule.advantages](alone, SCORES[:3], GROUPS[:3], of)["advantages"]
    torch.testing.assert_close(found["advantages"][: len(expected)], expected)
    assert not found["advantages"][len(expected) :].any()


LOSSES_OF_A_USER = """
from rl_models.losses import LossTerms, ppo_clip

def reinforce(inputs, options):
    return LossTerms(-inputs.log_probs * inputs["advantages"])

def bare(inputs, options):
    return -inputs.log_probs

def pair(inputs, options):
    return -inputs.log_probs, {}

def short(inputs):
    return LossTerms(inputs.log_probs)
"""


def test_a_loss_by_name_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(LOSSES_OF_A_USER)
    (tmp_path / "broken_losses.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = make_batch().with_fields(advantages=torch.linspace(-1, 1, 16), importance_weights=torch.full((16,), 1.5))
    log_probs = batch["old_log_probs"] + 0.3
    of = options("grpo", loss="losses_of_a_user:reinforce", importance_cap=2.0, kl_coefficient=0.5)
    expected = -1.5 * log_probs * batch["advantages"]
    expected = expected + 0.5 * losses.kl_penalty(log_probs, batch["reference_log_probs"], "k3")
    torch.testing.assert_close(policy_loss(of, loss_inputs(batch, log_probs, torch.zeros(16))).loss, expected)
    bare = policy_loss(options("grpo", loss="losses_of_a_user:bare"), loss_inputs(batch, log_probs, torch.zeros(16)))
    torch.testing.assert_close(bare.loss, -log_probs)
    with pytest.raises(ValueError, match="loss=losses_of_a_user:pair returned tuple; return one term per token"):
        policy_loss(options("grpo", loss="losses_of_a_user:pair"), loss_inputs(batch, log_probs, torch.zeros(16)))
    for name, message in (
        (
            "losses_of_a_user:short",
            r"it takes \(inputs\); a function for loss takes \(inputs, options\)",
        ),
        ("losses_of_a_user:absent", "loss=losses_of_a_user:absent: losses_of_a_user has no function absent"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError"),
        ("broken_losses:f", "importing broken_losses raised ZeroDivisionError: division by zero"),
        ("pop", "loss='pop' must be ppo, gspo, cispo, sapo, dro, or module:function, such as own:function"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_of(name)


ADVANTAGES_OF_A_USER = """
import torch

def ones(batch, scores, groups, options):
    return {"advantages": torch.ones(batch.num_tokens)}

def per_response(batch, scores, groups, options):
    return {"advantages": scores}

def bare(batch, scores, groups, options):
    return torch.ones(batch.num_tokens)
"""


def test_advantages_by_name_of_their_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "advantages_of_a_user.py").write_text(ADVANTAGES_OF_A_USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = make_batch()
    found = advantages(options("grpo", **{"objective.advantages": "advantages_of_a_user:ones"}), batch, SCORES, GROUPS)
    assert torch.equal(found["advantages"], torch.ones(16))
    for algorithm, name, message in (
        ("grpo", "per_response", r"'advantages' must be a tensor \[T=16\], got \[4\]"),
        ("grpo", "bare", r"'advantages' must be a tensor \[T=16\], got tensor.*; return \{'advantages': tensor\}"),
        ("ppo", "ones", "'returns' must be a tensor .*, got \\{'advantages'"),
    ):
        with pytest.raises(ValueError, match=message):
            advantages(
                options(algorithm, **{"objective.advantages": f"advantages_of_a_user:{name}"}), batch, SCORES, GROUPS
            )
    check(options("grpo", **{"objective.advantages": "leave-one-out"}))
    for algorithm, name, message in (
        (
            "grpo",
            "gae",
            "advantages='gae' must be group-centred or group-relative or leave-one-out with algorithm=grpo, or module",
        ),
        ("ppo", "returns", "advantages='returns' must be gae with algorithm=ppo"),
        ("rloo", "mine", "advantages='mine' must be group-centred or group-relative or leave-one-out"),
    ):
        with pytest.raises(ValueError, match=message):
            check(options(algorithm, **{"objective.advantages": name}))
