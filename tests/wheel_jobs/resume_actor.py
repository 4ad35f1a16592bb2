"""Train an actor from CHECKPOINT, save it as a training checkpoint and as a model, and resume from both.

python resume_actor.py CHECKPOINT RUN
"""

import sys
from pathlib import Path

import torch

from rl_models import Actor, LossInputs, OptimizerOptions, losses

source, run = sys.argv[1], Path(sys.argv[2])
optimizer = OptimizerOptions(learning_rate=1e-2)
actor = Actor.from_pretrained(source, optimizer=optimizer)
batch = actor.generate([[1, 2, 3], [4, 5]], max_new_tokens=4, seed=0)
batch = batch.with_fields(old_log_probs=batch["log_probs"], advantages=torch.ones_like(batch["log_probs"]))


def loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])


def log_probs(actor: Actor) -> torch.Tensor:
    return actor.log_probs(batch).log_probs


before = log_probs(actor)
actor.update(batch, loss)
assert not torch.equal(log_probs(actor), before)
actor.save_training(run / "training")
actor.save_pretrained(run / "model")
torch.testing.assert_close(log_probs(Actor.from_pretrained(run / "model", optimizer=None)), log_probs(actor))

resumed = Actor.from_pretrained(source, optimizer=optimizer)
resumed.load_training(run / "training")
for one in (actor, resumed):
    one.update(batch, loss)
assert torch.equal(log_probs(resumed), log_probs(actor))
