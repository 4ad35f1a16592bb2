"""The weights of tokens: sums of one over all ranks, whatever the division."""

import pytest
import torch
from torch.distributed import ProcessGroup

from parallel_layers.testing import RankPool
from rl_models.batch import Batch
from rl_models.losses.aggregation import token_weights


def make() -> Batch:
    return Batch.from_sequences([[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]], response_lengths=[1, 3, 0, 0])


def test_token_mean_and_sequence_mean() -> None:
    token = token_weights(make(), "token-mean", None)
    torch.testing.assert_close(token, torch.tensor([0, 0, 1, 0, 1, 1, 1, 0, 0, 0]) / 4)
    sequence = token_weights(make(), "sequence-mean", None)
    # Sequences without a token in the mask count for nothing.
    torch.testing.assert_close(sequence, torch.tensor([0, 0, 3, 0, 1, 1, 1, 0, 0, 0]) / 6)


def part_weights(group: ProcessGroup, aggregation: str) -> torch.Tensor:
    indices = [[1], [0, 2, 3]][group.rank()]
    return token_weights(make().select(indices), aggregation, group)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_the_weights_of_a_divided_batch_are_those_of_the_whole(ranks: RankPool, aggregation: str) -> None:
    batch = make()
    whole = token_weights(batch, aggregation, None)
    first, second = ranks.run(part_weights, aggregation, world=2)
    torch.testing.assert_close(first, whole[batch.positions([1])])
    torch.testing.assert_close(second, whole[batch.positions([0, 2, 3])])


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="known: token-mean, sequence-mean"):
        token_weights(make(), "mean", None)
    with pytest.raises(ValueError, match="no token of the batch is in its mask"):
        token_weights(make().select([2, 3]), "token-mean", None)
