"""A reward model and a policy learn the same preferences, by Bradley-Terry and by DPO.

    torchrun --nproc-per-node 4 examples/preferences.py CHECKPOINT

CHECKPOINT is a folder of any family of the native backend (default: a new small random model). The preference: of two
responses the one with more tokens 7. Both models are measured on pairs that they have not learned from.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.quickstart import make_checkpoint

STEPS, PAIRS, LENGTH = 30, 64, 8


# --8<-- [start:pairs]
def make_pairs(seed: int) -> Batch:
    """Return prompts with two random responses each, of which the chosen one has two tokens 7 more."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 8, 30, generator=generator)
    prompts, rejected = list(draw((PAIRS, 2))), list(draw((PAIRS, LENGTH)))
    chosen = draw((PAIRS, LENGTH))
    places = torch.rand(PAIRS, LENGTH, generator=generator).argsort(1)[:, :2]
    return Batch.from_pairs(prompts, list(chosen.scatter(1, places, 7)), rejected)


# --8<-- [end:pairs]


# --8<-- [start:losses]
def dpo_loss(inputs: LossInputs) -> losses.LossTerms:
    reference = inputs["reference_log_probs"]
    return losses.dpo(inputs.log_probs, reference, inputs["pair"], inputs.batch.mask, inputs.batch.lengths, beta=0.5)


def reward_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.bradley_terry(inputs.values, inputs["pair"], inputs.batch.mask, inputs.batch.lengths)


# --8<-- [end:losses]


def main(checkpoint: Path) -> None:
    optimizer = OptimizerOptions(learning_rate=3e-3)
    # Both models take whole batches on every rank; the two sequences of a pair stay together on every grid.
    actor = WholeBatches(Actor.from_pretrained(checkpoint, dims=ParallelDims(dp=2, tp=2), optimizer=optimizer))
    critic = WholeBatches(Critic.from_pretrained(checkpoint, dims=ParallelDims(dp=2, pp=2), optimizer=optimizer))
    held_out = make_pairs(seed=STEPS)
    batches = [make_pairs(seed=step) for step in range(STEPS)]
    # --8<-- [start:reference]
    # The reference is the policy before it learns, so its log-probs are computed now.
    reference = [actor.log_probs(batch).log_probs for batch in [*batches, held_out]]
    # --8<-- [end:reference]
    # --8<-- [start:step]
    for step, (batch, log_probs) in enumerate(zip(batches, reference, strict=False)):
        batch = batch.with_fields(reference_log_probs=log_probs)
        policy = actor.update(batch, dpo_loss, aggregation="sequence-mean")
        reward = critic.update(batch.with_ends(), reward_loss, aggregation="sequence-mean")
        # --8<-- [end:step]
        if dist.get_rank() == 0:
            print(f"step {step}: loss of the policy {policy['loss']:.3f}, of the reward model {reward['loss']:.3f}")
    # --8<-- [start:check]
    implicit = held_out.sum_by_sequence(actor.log_probs(held_out).log_probs - reference[-1])
    for name, rewards in (("policy", implicit), ("reward model", critic.rewards(held_out))):
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        # --8<-- [end:check]
        if dist.get_rank() == 0:
            print(f"held-out accuracy of the {name}: {(chosen > rejected).float().mean():.3f}", flush=True)


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= 4
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank())
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        # Every rank makes the same small model in its own folder.
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), seed=0)
            main(Path(folder))
    dist.destroy_process_group()
