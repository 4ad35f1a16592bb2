"""A small model learns by GRPO to call a calculator.

    python examples/calculator/train.py OUT
    python examples/calculator/train.py OUT --client      # the same task by a program that uses OpenAI's client

The task: the product of two numbers of two digits, which the model cannot compute. It first sees answers of which one
in four calls the calculator, so that it knows how to call. Reinforcement learning then teaches it when to.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from rl_models import Actor, Batch, OptimizerOptions
from rl_models.losses import LossTerms
from rl_train.loop import check_run, train
from rl_train.options import TrainOptions
from rl_train.quickstart import MODEL

# One token for each part of a call: short conversations of a small model.
OPEN, BETWEEN, CLOSE = '<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>", "<tool>", "multiply", OPEN, BETWEEN, CLOSE, "*")
VOCABULARY = (*TOKENS, *"0123456789")
TEMPLATE = (
    "<s>{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEPS = 30


def make_model(path: Path) -> None:
    """Save a Llama like that of the quickstart, with a tokenizer of `VOCABULARY` and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL | {"vocab_size": len(VOCABULARY)})).save_pretrained(path)
    model = models.WordLevel({token: id for id, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([OPEN, BETWEEN, CLOSE, "multiply"])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<tool>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


# --8<-- [start:demonstration]
def demonstration(generator: random.Random) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of these are the model's own."""
    a, b = generator.randint(10, 99), generator.randint(10, 99)
    parts = [["<s>", "multiply", "<user>", *f"{a}*{b}", "</s>", "<assistant>"]]
    if generator.random() < 0.25:
        parts += [[OPEN, *str(a), BETWEEN, *str(b), CLOSE, "</s>"]]
        parts += [["<tool>", *str(a * b), "</s>", "<assistant>"], [*str(a * b), "</s>"]]
    else:
        parts += [[*str(generator.randint(100, 9801)), "</s>"]]
    tokens = [VOCABULARY.index(token) for part in parts for token in part]
    return tokens, [own for part, own in zip(parts, (False, True, False, True), strict=False) for _ in part]


# --8<-- [end:demonstration]


# --8<-- [start:imitate]
def imitate(model: Path, steps: int = 400) -> None:
    """Teach the model of a folder by demonstrations, and save it there."""
    import torch

    generator = random.Random(0)
    actor = Actor.from_pretrained(model, optimizer=OptimizerOptions(3e-3), device="cpu")
    for _ in range(steps):
        tokens, masks = zip(*(demonstration(generator) for _ in range(64)), strict=True)
        batch = Batch.from_sequences(tokens)
        mask = torch.tensor([own for one in masks for own in one])
        batch = Batch(batch.tokens, batch.lengths, mask)
        actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs))
    actor.save_pretrained(model)


# --8<-- [end:imitate]


def write_rows(path: Path, seed: int, count: int) -> None:
    """Write questions with their answers, as JSON lines."""
    generator = random.Random(seed)
    pairs = [(generator.randint(10, 99), generator.randint(10, 99)) for _ in range(count)]
    path.write_text("".join(json.dumps({"messages": f"{a}*{b}", "answer": str(a * b)}) + "\n" for a, b in pairs))


def main(out: Path, agent: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    make_model(out / "start")
    imitate(out / "start")
    write_rows(out / "questions.jsonl", 1, 1024)
    write_rows(out / "held_out.jsonl", 2, 64)
    # --8<-- [start:options]
    options = TrainOptions(
        model=out / "start",
        prompts=out / "questions.jsonl",
        out=out / "run",
        device="cpu",
        steps=STEPS,
        prompts_per_step=16,
        save_every=0,
        sampling={"max_new_tokens": 32},
        optimizer={"learning_rate": 5e-4},
        evaluation={"prompts": out / "held_out.jsonl", "temperature": 1.0},
        **agent,
    )
    last = train(check_run(options), report)
    # --8<-- [end:options]
    print(f"held out {last['eval/reward']:.3f}; the curves are in {out / 'run' / 'report.html'}")


def report(event: dict) -> None:
    if "message" in event:
        print(event["message"])
    elif "reward" in event:  # a step has ended; other events tell the phase
        numbers = f"reward {event['reward']:.3f}  turns {event['turns']:.2f}  failed calls {event['tool_errors']:.0f}"
        print(f"step {event['step']}: {numbers}")


# --8<-- [start:agents]
ENVIRONMENT = {"environment": "calculator:Calculator", "data": {"max_turns": 3}}
CLIENT = {"agent": "client:solve", "agents": {"max_calls": 3}}
# --8<-- [end:agents]

if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "calculator"), CLIENT if "--client" in sys.argv else ENVIRONMENT)
