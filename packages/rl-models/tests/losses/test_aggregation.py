"""The weights of tokens: sums of one over all ranks, whatever the division."""

import pytest
import torch

from rl_models.batch.batch import Batch
from rl_models.losses.aggregation import AGGREGATIONS, token_weights, total_weight


def make() -> Batch:
    return Batch.from_sequences([[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]], response_lengths=[1, 3, 0, 0])


def weights(batch: Batch, aggregation: str) -> torch.Tensor:
    return token_weights(batch, aggregation, total_weight(batch.masked_counts.tolist(), aggregation))


def test_every_aggregation() -> None:
    token = weights(make(), "token-mean")
    torch.testing.assert_close(token, torch.tensor([0, 0, 1, 0, 1, 1, 1, 0, 0, 0]) / 4)
    sequence = weights(make(), "sequence-mean")
    sums = weights(make(), "sequence-sum")
    torch.testing.assert_close(sums, torch.tensor([0, 0, 1, 0, 1, 1, 1, 0, 0, 0]) / 2)
    # Sequences without a token in the mask count for nothing.
    torch.testing.assert_close(sequence, torch.tensor([0, 0, 3, 0, 1, 1, 1, 0, 0, 0]) / 6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_weights_of_a_divided_batch_are_those_of_the_whole(aggregation: str) -> None:
    batch = make()
    whole = weights(batch, aggregation)
    parts = [[1], [0, 2, 3]]
    total = sum(total_weight(batch.select(part).masked_counts.tolist(), aggregation) for part in parts)
    for part in parts:
        torch.testing.assert_close(token_weights(batch.select(part), aggregation, total), whole[batch.positions(part)])


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="known: token-mean, sequence-mean, sequence-sum"):
        weights(make(), "mean")
    with pytest.raises(ValueError, match="no token of the batch is in its mask"):
        weights(make().select([2, 3]), "token-mean")
