"""PPO over Ray: an actor on dp 2 and its critic on tp 2, on the same devices; this program is no rank itself.

    python examples/ray_ppo.py [CHECKPOINT]       on this machine
    ray job submit --working-dir . -- python examples/ray_ppo.py CHECKPOINT       on a cluster

The task is the quickstart's: continue the alphabet. CHECKPOINT is a folder that every node sees (default: a new
small random model). After the loss of a rank the run continues from its last training checkpoint.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

# Ray reads this variable when rl_train imports it: its workers use this environment even under `uv run`.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch

from parallel_layers import ParallelDims
from rl_models import Actor, Critic, LossInputs, OptimizerOptions, losses
from rl_train import Placement, RankDied, RayModelGroup, Resources
from rl_train.quickstart import LETTERS, VOCABULARY, make_checkpoint

RESPONSE_LENGTH = 8
BEGIN, FIRST = VOCABULARY.index("<s>"), VOCABULARY.index("a")


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    surrogate = losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])
    return surrogate + losses.entropy_bonus(inputs.entropy, 0.02)


def value_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.value_clip(inputs.values, inputs["old_values"], inputs["returns"])


# --8<-- [start:step]
def ppo_step(actor: RayModelGroup, critic: RayModelGroup, step: int) -> str:
    letters = random.Random(step).choices(range(FIRST, FIRST + len(LETTERS)), k=64)
    prompts = [[BEGIN, letter] for letter in letters]
    batch = actor.generate(prompts, max_new_tokens=RESPONSE_LENGTH, seed=step)
    # The actor and the critic work at the same time; `values.result()` waits for the critic.
    values = critic.submit("values", batch)
    old_log_probs = actor.log_probs(batch).log_probs

    previous = batch.tokens.roll(1)
    correct = (previous >= FIRST) & (batch.tokens == (previous - FIRST + 1) % len(LETTERS) + FIRST)
    earned = torch.where(batch.mask, correct / RESPONSE_LENGTH, 0)
    advantages, returns = losses.gae(earned, values.result(), batch.mask, batch.lengths, gamma=0.9, lam=0.9)
    batch = batch.with_fields(
        old_log_probs=old_log_probs,
        old_values=values.result(),
        advantages=losses.whiten(advantages, batch.mask),
        returns=returns,
    )
    for _ in range(2):
        learned = actor.submit("update", batch, policy_loss), critic.submit("update", batch, value_loss)
    policy, value = (future.result() for future in learned)
    reward = float(batch.sum_by_sequence(earned).mean())
    return f"reward {reward:.3f}, gradient norm {policy['grad_norm']:.3f}, value error {value['value_error']:.4f}"


# --8<-- [end:step]


def main(checkpoint: Path, run: Path, steps: int, save_every: int) -> None:
    optimizer = OptimizerOptions(learning_rate=3e-3)
    # --8<-- [start:groups]
    # The placement connects to the cluster of RAY_ADDRESS, or starts Ray on this machine, also on a single core.
    with Placement(2, Resources(cpus=0.5, strategy="PACK")) as placement:
        half = {"resources": placement.share(0.5), "optimizer": optimizer, "wait": False}
        with (
            RayModelGroup(Actor, ParallelDims(dp=2), checkpoint, name="actor", **half) as actor,
            RayModelGroup(Critic, ParallelDims(tp=2), checkpoint, name="critic", **half) as critic,
        ):
            # --8<-- [end:groups]
            step = 0
            # --8<-- [start:loop]
            while step < steps:
                try:
                    if step % save_every == 0:
                        actor.save_training(run / "actor", step=step, keep=2)
                        critic.save_training(run / "critic", step=step, keep=2)
                    print(f"step {step}: {ppo_step(actor, critic, step)}", flush=True)
                    step += 1
                except RankDied as death:
                    print(f"{death}\nback to the last training checkpoint", flush=True)
                    step = min(group.restart().step for group in (actor, critic))
                    # If the rank died between the two saves, one model has a newer checkpoint than the other.
                    actor.load_training(run / "actor", step=step)
                    critic.load_training(run / "critic", step=step)
            # --8<-- [end:loop]
            actor.save_pretrained(run / "learned")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            main(Path(sys.argv[1]), Path("ray_ppo"), steps=200, save_every=20)
        else:
            make_checkpoint(Path(folder) / "start", seed=0)
            main(Path(folder) / "start", Path(folder) / "run", steps=20, save_every=10)
