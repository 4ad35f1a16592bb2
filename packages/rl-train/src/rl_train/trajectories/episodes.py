"""The samples of episodes in a batch: which samples are one episode, and what its turns came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_models import Batch
from rl_models.calls import DECODING_STEPS, PROMPT_TOKENS_COMPUTED
from rl_train.trajectories.samples import COLUMNS, TURNS, Sample, batch_of

# A field of the batch, `[T]`: the number of the sample within its episode, from 0.
SAMPLE = "sample"
# A field of a mini-batch, `[T]`: see `with_episode_weights`.
EPISODE_WEIGHTS = "episode_weights"


def batch_of_episodes(episodes: Sequence[Sequence[Sample]]) -> Batch:
    """Return the samples of episodes, one episode after another, with the field `SAMPLE`."""
    batch = batch_of([sample for samples in episodes for sample in samples])
    numbers = torch.tensor([number for samples in episodes for number in range(len(samples))])
    # Batches without a call and with calls are concatenated.
    log_probs = batch.fields.get("log_probs", torch.zeros(batch.num_tokens))
    return batch.with_fields(**{"log_probs": log_probs, SAMPLE: numbers[batch.sequence_ids]})


def episode_ids(batch: Batch) -> Tensor:
    """Return the number of each sample's episode in a batch of whole episodes, `[N]`, from 0."""
    if SAMPLE not in batch.fields:
        return torch.arange(len(batch))
    return (batch[SAMPLE][batch.first] == 0).cumsum(0) - 1


def select_episodes(batch: Batch, numbers: Sequence[int]) -> Batch:
    """Return the samples of the episodes with these numbers, in this order."""
    samples = defaultdict[int, list[int]](list)
    for sample, episode in enumerate(episode_ids(batch).tolist()):
        samples[episode].append(sample)
    return batch.select([sample for number in numbers for sample in samples[number]])


def of_episodes(batch: Batch, per_sample: Tensor) -> Tensor:
    """Return the value of each episode `[E]` from equal values of its samples `[N]`."""
    return per_sample[episode_ids(batch).diff(prepend=torch.tensor([-1])) > 0]


def sum_by_episode(batch: Batch, per_sample: Tensor) -> Tensor:
    """Sum a tensor `[N, ...]` over the samples of each episode, `[E, ...]`."""
    ids = episode_ids(batch)
    num_episodes = int(ids[-1]) + 1 if len(ids) else 0
    return per_sample.new_zeros(num_episodes, *per_sample.shape[1:]).index_add(0, ids, per_sample)


def with_episode_weights(batch: Batch, aggregation: str) -> Batch:
    """Add the factor of each token's loss `[T]`, so that `aggregation` averages over episodes instead of samples.

        token-mean      1: all drawn tokens weigh the same, whichever sample has them
        sequence-mean   N m / (E M) for a sample with m of the M drawn tokens of its episode: all episodes weigh the
                        same, and all tokens of an episode
        sequence-sum    N / E: the mean over episodes of sums over tokens

    N samples of E episodes, each with drawn tokens. Episodes of one sample have the factor 1 everywhere.
    """
    if SAMPLE not in batch.fields or aggregation == "token-mean":
        return batch
    counts = batch.masked_counts.float()
    totals = sum_by_episode(batch, counts)
    weights = torch.full((len(batch),), len(batch) / len(totals))
    if aggregation == "sequence-mean":
        weights = weights * counts / totals[episode_ids(batch)]
    return batch.with_fields(**{EPISODE_WEIGHTS: weights[batch.sequence_ids]})


def totals(batch: Batch) -> dict[str, Tensor]:
    """Return the sums of `COLUMNS` over each episode, `[E]` each; empty for responses of one turn.

    An episode that failed has a reward of 0.
    """
    if TURNS not in batch.fields:
        return {}
    by_sequence = torch.stack([turns.sum(0) for turns in batch.split(TURNS)])
    sums = dict(zip(COLUMNS, sum_by_episode(batch, by_sequence).unbind(1), strict=True))
    return sums | {"environment_reward": sums["environment_reward"].where(sums["failed"] == 0, 0.0)}


def describe(batch: Batch) -> dict[str, float]:
    """Return the metrics of turns, and of tokens computed to draw and drawn in a step of the model."""
    sums = totals(batch)
    metrics = {"turns": float(sums["turns"].mean()), "tool_errors": float(sums["tool_errors"].sum())} if sums else {}
    if PROMPT_TOKENS_COMPUTED in batch.fields:
        metrics["prompt_tokens_computed"] = float(batch[PROMPT_TOKENS_COMPUTED].sum())
    if DECODING_STEPS in batch.fields:
        metrics["tokens_per_decoding_step"] = float(batch.mask.sum() / batch[DECODING_STEPS].sum())
    return metrics
