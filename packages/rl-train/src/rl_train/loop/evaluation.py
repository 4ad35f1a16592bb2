"""`evaluate`: the metrics of responses to the evaluation prompts: mean reward, pass@k and maj@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_models import SamplingOptions
from rl_train.data.mixture import by_source
from rl_train.loop.checked_run import CheckedRun
from rl_train.loop.draws import Ask
from rl_train.loop.scoring import Scorer
from rl_train.trajectories.episodes import describe


def evaluate(
    checked_run: CheckedRun,
    ask: Ask,
    scorer: Scorer,
    show: Callable[[Iterator[dict[str, Any]]], None] = lambda records: None,
) -> dict[str, float]:
    """Draw and score responses to the evaluation prompts; all ranks call this.

    Every evaluation of a run draws with the same seed. `show` is called with a record of each response, which
    `Scorer.records` describes, where the responses are read.
    """
    options, evaluation, prompts = checked_run.options, checked_run.options.evaluation, checked_run.eval_prompts
    sampling = SamplingOptions(
        options.sampling.max_new_tokens,
        n=evaluation.samples,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        stop_ids=checked_run.stop_ids,
        seed=options.seed,
        log_probs=False,
    )
    batch = ask(prompts, sampling).result()
    scored = scorer([prompt for prompt in prompts for _ in range(sampling.n)], batch)
    values = {
        "reward": float(scored.scores.mean()),
        "response_length": int(batch.mask.sum()) / len(scored.scores),
        "truncated": sum(scorer.truncated(batch)) / len(scored.scores),
        **describe(batch),
        **scored.describe(counts_errors=options.rewards.errors == "zero"),
    }
    scores = scored.scores.view(len(prompts), sampling.n)
    if evaluation.prompts is not None:
        values |= by_source(evaluation.prompts, prompts, scores)
    every = [(number, column) for number in range(len(prompts)) for column in range(sampling.n)]
    show(scorer.records(prompts, batch, scores, every))
    doubling = [2**power for power in range(1, sampling.n.bit_length())]
    values |= {f"pass@{k}": best_of(scores, k) for k in sorted({*doubling, sampling.n} - {1})}
    if scored.answers and sampling.n > 1:
        values[f"maj@{sampling.n}"] = majority(scores, scored.answers)
    return {f"eval/{name}": value for name, value in values.items()}


def best_of(scores: Tensor, k: int) -> float:
    """Return the expected highest score `[prompts, n]` among `k` of the responses to a prompt, a mean over the prompts.

    For scores of 0 and 1 this is the unbiased pass@k, 1 - C(n - c, k) / C(n, k) with c right responses of n (Chen et
    al. 2021, arXiv:2107.03374).
    """
    n = scores.shape[1]
    # The i-th lowest score (from 0) is the highest of k in C(i, k - 1) of the C(n, k) choices.
    chances = [math.comb(place, k - 1) / math.comb(n, k) for place in range(n)]
    return float((scores.double().sort(1).values * torch.tensor(chances, dtype=torch.float64)).sum(1).mean())


def majority(scores: Tensor, answers: Sequence[str | None]) -> float:
    """Return the score of the most frequent answer to a prompt, a mean over the prompts (Wang et al. 2022).

    Equally frequent answers count with their mean. Responses without an answer count where no response has one. Scores
    are `[prompts, n]`, and answers stand prompt by prompt.
    """
    n, total = scores.shape[1], 0.0
    for number, row in enumerate(scores.tolist()):
        prompt_answers = answers[number * n : (number + 1) * n]
        votes: Counter[str | None] = Counter(answer for answer in prompt_answers if answer is not None) or Counter(
            prompt_answers
        )
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        winning_scores = [score for score, answer in zip(row, prompt_answers, strict=True) if answer in winners]
        total += sum(winning_scores) / len(winning_scores)
    return total / len(scores)
