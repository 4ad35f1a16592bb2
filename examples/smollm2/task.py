"""Make the task: sums and differences of a few numbers, as chats with the answer beside them."""

import json
import random
from pathlib import Path


def make_task(
    folder: Path, *, prompts: int, held_out: int, terms: tuple[int, int], largest: int, seed: int = 0
) -> None:
    """Write `prompts.jsonl` and `eval.jsonl`; no question is in both, or twice in one of them.

    Args:
        folder: Where the files go.
        prompts: Number of questions to learn from; fewer, if there are no more questions.
        held_out: Number of questions to evaluate on.
        terms: The least and the largest number of terms of a question.
        largest: The largest term; the least is 1.
        seed: Seed of the questions.
    """
    source = random.Random(seed)
    questions: dict[str, int] = {}
    for _ in range(20 * (prompts + held_out)):
        if len(questions) == prompts + held_out:
            break
        numbers = [source.randint(1, largest) for _ in range(source.randint(*terms))]
        signs = [1] + [source.choice((1, -1)) if terms[1] > 2 else 1 for _ in numbers[1:]]
        shown = " ".join(f"{'+' if sign > 0 else '-'} {number}" for sign, number in zip(signs, numbers, strict=True))
        questions[f"{shown.removeprefix('+ ')} ="] = sum(map(int.__mul__, signs, numbers))
    lines = [
        json.dumps({"messages": [{"role": "user", "content": question}], "answer": answer}) + "\n"
        for question, answer in questions.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(lines[:held_out]))
    (folder / "prompts.jsonl").write_text("".join(lines[held_out:]))
