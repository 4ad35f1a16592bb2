"""PPO with an actor on dp 2 x tp 2 and its critic on tp 4, on the same four ranks of one process group.

    torchrun --nproc-per-node 4 examples/critic_on_another_grid.py CHECKPOINT

CHECKPOINT is a folder of any family of the native backend (default: a new small random model). The task: generate the
token 7. The reward of a response is its share of that token.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches
from rl_train.quickstart import make_checkpoint


def share_of_sevens(batch: Batch) -> Tensor:
    """Return the reward of every sequence, `[N]`."""
    return torch.stack([(response == 7).float().mean() for response in batch.responses()])


# --8<-- [start:losses]
def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])


def value_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.value_clip(inputs.values, inputs["old_values"], inputs["returns"])


# --8<-- [end:losses]


def main(checkpoint: Path, steps: int) -> None:
    optimizer = OptimizerOptions(learning_rate=5e-3)
    # --8<-- [start:models]
    # Actor and critic take the whole batch on every rank and split it over their own grids.
    actor = WholeBatches(Actor.from_pretrained(checkpoint, dims=ParallelDims(dp=2, tp=2), optimizer=optimizer))
    critic = WholeBatches(Critic.from_pretrained(checkpoint, dims=ParallelDims(tp=4), optimizer=optimizer))
    # --8<-- [end:models]
    # --8<-- [start:step]
    for step in range(steps):
        batch = actor.generate([[1, 4], [1, 5]] * 32, max_new_tokens=8, seed=step)
        values = critic.values(batch)
        scores = share_of_sevens(batch)
        rewards = losses.token_rewards(scores, batch.mask, batch.lengths)
        advantages, returns = losses.gae(rewards, values, batch.mask, batch.lengths, lam=1.0)
        batch = batch.with_fields(
            old_log_probs=actor.log_probs(batch).log_probs,
            old_values=values,
            advantages=losses.whiten(advantages, batch.mask),
            returns=returns,
        )
        policy, value = actor.update(batch, policy_loss), critic.update(batch, value_loss)
        # --8<-- [end:step]
        if dist.get_rank() == 0:
            print(
                f"step {step}: reward {scores.mean():.3f}, gradient norm {policy['grad_norm']:.3f}, "
                f"value error {value['value_error']:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= 4
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank())
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), steps=20)
    else:
        # Every rank makes the same small model in its own folder.
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), seed=0)
            main(Path(folder), steps=20)
    dist.destroy_process_group()
