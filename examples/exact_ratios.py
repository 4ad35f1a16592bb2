"""Ratios that are exactly one: a mixture of experts draws and learns in bf16 with the same bits.

    python examples/exact_ratios.py

A small random Qwen3-MoE learns to write the token 7. Half a minute on a CPU.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses

GROUPS, SAMPLES, LENGTH, STEPS = 3, 4, 6, 2
TEMPERATURE = 0.9


def make_model(path: Path) -> None:
    """Save a Qwen3-MoE of two layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, initializer_range=0.3,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["log_probs"], inputs["advantages"])


def ratios(actor: Actor, batch: Batch) -> Tensor:
    """Return p_train / p_rollout of the drawn tokens."""
    trained = actor.log_probs(batch, temperature=TEMPERATURE).log_probs
    return (trained - batch["log_probs"])[batch.mask].exp()


def main(folder: Path) -> None:
    # --8<-- [start:load]
    options = {"dtype": torch.bfloat16, "optimizer": OptimizerOptions(1e-2)}
    ordinary = Actor.from_pretrained(folder, **options)
    actor = Actor.from_pretrained(folder, tp_invariant=True, **options)
    # --8<-- [end:load]
    prompts = [[1, 10 + number] for number in range(GROUPS)]
    groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    sampling = {"max_new_tokens": LENGTH, "n": SAMPLES, "temperature": TEMPERATURE, "top_p": 0.9}
    for step in range(STEPS):
        batch = ordinary.generate(prompts, seed=step, keep_sampling_mask=True, **sampling)
        rounded = ratios(ordinary, batch)
        # --8<-- [start:draw]
        batch = actor.generate(prompts, seed=step, keep_sampling_mask=True, **sampling)
        batch = batch.with_fields(routing=actor.predict(batch, record_routing=True)["routing"])
        exact = ratios(actor, batch)
        assert torch.equal(exact, torch.ones_like(exact))
        # --8<-- [end:draw]
        scores = torch.stack([(response == 7).float().mean() for response in batch.responses()])
        # --8<-- [start:learn]
        advantages = losses.grpo_advantages(scores, groups)[batch.sequence_ids]
        batch = batch.with_fields(advantages=torch.where(batch.mask, advantages, 0))
        actor.update(batch, policy_loss, temperature=TEMPERATURE)
        # --8<-- [end:learn]
        print(
            f"step {step}: reward {scores.mean():.3f}, ratios of exactly 1: {(rounded == 1).float().mean():.0%} by the "
            f"ordinary model, {(exact == 1).float().mean():.0%} by the invariant one",
            flush=True,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        main(Path(folder))
