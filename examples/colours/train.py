"""A small vision-language model learns by GRPO to name the colour of a picture, on two tensor-parallel ranks.

    torchrun --nproc-per-node 2 examples/colours/train.py [OUT]

`pictures.py` makes the model, a Qwen2-VL with random weights, its processor, and the pictures. OUT (default: `colours`)
gets the learned model.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pictures import COLOURS, PictureProcessor, question, save_model, save_pictures

from parallel_layers import ParallelDims
from rl_models import Actor, Batch, LossInputs, OptimizerOptions, VisualInputs, losses
from rl_models.api import WholeBatches

SAMPLES, STEPS = 16, 40


# --8<-- [start:prompts]
def make_prompts(model: Path, files: dict[str, Path]) -> Batch:
    """Return one prompt for each picture: its tokens, and its pixels beside them."""
    processor = PictureProcessor.from_pretrained(model)  # of a model from a hub: AutoProcessor
    chats = [question(path=str(file)) for file in files.values()]
    inputs = [
        processor.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        for chat in chats
    ]
    ids = [one["input_ids"][0] for one in inputs]
    return Batch.from_sequences(ids, visual=[VisualInputs.from_processor(one) for one in inputs])


# --8<-- [end:prompts]


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.ppo_clip(inputs.log_probs, inputs["log_probs"], inputs["advantages"])


# --8<-- [start:step]
def learn(actor: WholeBatches, prompts: Batch, answers: list[int], step: int) -> float:
    """Take one step of GRPO, and return the share of right answers."""
    batch = actor.generate(prompts, max_new_tokens=1, n=SAMPLES, seed=step)  # the images stay with their prompts
    right = torch.tensor(answers).repeat_interleave(SAMPLES)
    scores = (torch.cat(batch.responses()) == right).float()
    advantages = losses.grpo_advantages(scores, torch.arange(len(answers)).repeat_interleave(SAMPLES))
    batch = batch.with_fields(advantages=torch.where(batch.mask, advantages[batch.sequence_ids], 0))
    actor.update(batch, policy_loss)
    return scores.mean().item()


# --8<-- [end:step]


def main(out: Path) -> None:
    start, files = out / "start", {colour: out / f"{colour}.png" for colour in COLOURS}
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_model(start)
        save_pictures(out, size=(16, 8))
    dist.barrier()
    # --8<-- [start:actor]
    optimizer = OptimizerOptions(learning_rate=5e-3)
    actor = WholeBatches(Actor.from_pretrained(start, dims=ParallelDims(tp=2), optimizer=optimizer))
    prompts = make_prompts(start, files)
    # --8<-- [end:actor]
    tokenizer = PictureProcessor.from_pretrained(start).tokenizer
    answers = tokenizer.convert_tokens_to_ids(list(files))
    for step in range(STEPS):
        reward = learn(actor, prompts, answers, step)
        if step % 5 == 4 and dist.get_rank() == 0:
            print(f"step {step + 1}: reward {reward:.3f}", flush=True)
    greedy = actor.generate(prompts, max_new_tokens=1, temperature=0.0)
    actor.save_pretrained(out / "learned")
    if dist.get_rank() == 0:
        for file, response in zip(files.values(), greedy.responses(), strict=True):
            print(f"{file.name}: {tokenizer.decode(response)}")


if __name__ == "__main__":
    cuda = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank())
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "colours"))
    dist.destroy_process_group()
