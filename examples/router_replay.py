"""Router replay: a mixture of experts learns with the experts that the sampler chose. Two ranks hold half of them each.

    torchrun --nproc-per-node 2 examples/router_replay.py

A small random Qwen3-MoE draws responses in bf16, as inference engines do, and learns from them in fp32.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, losses
from rl_models.api import WholeBatches

GROUPS, SAMPLES, LENGTH, STEPS = 8, 8, 16, 12
DIMS = ParallelDims(dp=2, ep=2)


def make_model(path: Path) -> None:
    """Save a Qwen3-MoE of four layers, each with 16 experts, of which 4 work on a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32, max_position_embeddings=64,
        norm_topk_prob=True, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)


# --8<-- [start:other]
def share_of_other_experts(actor: WholeBatches, batch: Batch, routing: Tensor) -> float:
    """Return the share of (token, layer) in which the actor's own routers choose another set of experts."""
    own = actor.predict(batch, record_routing=True)["routing"]
    return (own.sort(-1).values != routing.sort(-1).values).any(-1).float().mean().item()


# --8<-- [end:other]


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["old_log_probs"], inputs["advantages"])


def main(folder: Path) -> None:
    actor = WholeBatches(Actor.from_pretrained(folder / "start", dims=DIMS, optimizer=OptimizerOptions(3e-3)))
    prompts = [[1, 4 + i] for i in range(GROUPS)]
    groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    for step in range(STEPS):
        # --8<-- [start:draw]
        actor.save_pretrained(folder / "now")
        sampler = WholeBatches(Actor.from_pretrained(folder / "now", dims=DIMS, dtype=torch.bfloat16))
        batch = sampler.generate(prompts, max_new_tokens=LENGTH, n=SAMPLES, seed=step)
        routing = sampler.predict(batch, record_routing=True)["routing"]  # [T, layers, experts of a token], int16
        # --8<-- [end:draw]
        # --8<-- [start:replay]
        replayed = batch.with_fields(routing=routing)
        free, held = (actor.log_probs(one).log_probs for one in (batch, replayed))
        # --8<-- [end:replay]
        moved = share_of_other_experts(actor, batch, routing)
        scores = torch.stack([(response == 7).float().mean() for response in batch.responses()])
        advantages = losses.grpo_advantages(scores, groups)[batch.sequence_ids]
        # --8<-- [start:learn]
        replayed = replayed.with_fields(old_log_probs=held, advantages=torch.where(batch.mask, advantages, 0))
        for _ in range(2):
            actor.update(replayed, policy_loss)
        # --8<-- [end:learn]
        if dist.get_rank() == 0:
            without, with_replay = ((found - batch["log_probs"])[batch.mask].abs().max() for found in (free, held))
            print(
                f"step {step}: reward {scores.mean():.3f}, other experts {moved:.1%}, largest difference of a log-prob "
                f"{without:.3f}, with replay {with_replay:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank())
    with tempfile.TemporaryDirectory() as own:
        folders = [own] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        if dist.get_rank() == 0:
            make_model(Path(own) / "start")
        dist.barrier()
        main(Path(folders[0]))
        dist.barrier()
    dist.destroy_process_group()
