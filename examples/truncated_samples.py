"""Truncated samples: a policy learns from draws by top-p and min-p, over the tokens that each was drawn from.

    python examples/truncated_samples.py

A small random Llama learns to write the token 7. Some seconds on a CPU.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses

GROUPS, SAMPLES, LENGTH, STEPS = 8, 8, 12, 7
TEMPERATURE = 0.9


def make_model(path: Path) -> None:
    """Save a Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["log_probs"], inputs["advantages"])


def largest_ratio(actor: Actor, batch: Batch) -> float:
    """Return the largest ratio p_train / p_rollout of a drawn token, or its inverse; 1 on policy."""
    differences = actor.log_probs(batch, temperature=TEMPERATURE).log_probs - batch["log_probs"]
    return differences[batch.mask].abs().max().exp().item()


def main(folder: Path) -> None:
    actor = Actor.from_pretrained(folder, optimizer=OptimizerOptions(1e-2))
    prompts = [[1, 10 + number] for number in range(GROUPS)]
    groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    for step in range(STEPS):
        # --8<-- [start:draw]
        batch = actor.generate(
            prompts, max_new_tokens=LENGTH, n=SAMPLES, seed=step,
            temperature=TEMPERATURE, top_p=0.9, min_p=0.02, keep_sampling_mask=True,
        )  # fmt: skip
        assert batch.sampling_mask is not None
        kept = batch.sampling_mask.counts[batch.mask].float()  # the number of tokens that each token was drawn from
        # --8<-- [end:draw]
        # --8<-- [start:ratio]
        whole = largest_ratio(actor, replace(batch, sampling_mask=None))
        masked = largest_ratio(actor, batch)
        # --8<-- [end:ratio]
        scores = torch.stack([(response == 7).float().mean() for response in batch.responses()])
        # --8<-- [start:learn]
        advantages = losses.grpo_advantages(scores, groups)[batch.sequence_ids]
        batch = batch.with_fields(advantages=torch.where(batch.mask, advantages, 0))
        actor.update(batch, policy_loss, temperature=TEMPERATURE)
        # --8<-- [end:learn]
        print(
            f"step {step}: reward {scores.mean():.3f}, kept {kept.mean():.0f} of 256 tokens ({kept.min():.0f} to "
            f"{kept.max():.0f}), largest ratio {whole:.2f} without the mask, {masked:.6f} with it",
            flush=True,
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        main(Path(folder))
