"""Episodes of several samples: one reward, compared once, and counted once where the algorithm says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import CHATML, save_tokenizer

from rl_models import Batch, LossInputs
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION, Response
from rl_train.loop.objective import ADVANTAGES, policy_loss
from rl_train.options.options import TrainOptions
from rl_train.trajectories.episodes import (
    EPISODE_WEIGHTS,
    batch_of_episodes,
    describe,
    episode_ids,
    of_episodes,
    select_episodes,
    sum_by_episode,
    totals,
    with_episode_weights,
)
from rl_train.trajectories.recorder import Recorder
from rl_train.trajectories.samples import Sample, part_of

PROMPT = Prompt([1, 2, 3], {}, 1)
# The draws of the samples of each episode: three samples, one, none, two.
DRAWS = [[2, 3, 1], [4], [], [1, 5]]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder, CHATML)
    return TextCodec(folder)


@pytest.fixture(scope="module")
def episodes(codec: TextCodec) -> list[list[Sample]]:
    """Episodes with the numbers of `DRAWS`; each ends with a reward, the third one failed before its first call."""
    recorders = []
    for number, lengths in enumerate(DRAWS):
        recorder = Recorder(PROMPT, codec, 50)
        for sample, length in enumerate(lengths):
            call = recorder.ids([9 + sample, 1])
            recorder.record(call, part_of(Response([5] * length, [-0.5] * length, versions=[7] * length)))
        recorder.samples[-1].count(environment_reward=number + 1.0, failed=not lengths)
        recorders.append(recorder.samples)
    return recorders


@pytest.fixture(scope="module")
def batch(episodes: list[list[Sample]]) -> Batch:
    return batch_of_episodes(episodes)


def test_samples_of_an_episode_stand_together(batch: Batch) -> None:
    ids = episode_ids(batch)
    assert ids.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert episode_ids(Batch.concatenate([batch, batch])).tolist() == [*ids.tolist(), *(4 + ids).tolist()]
    assert batch.masked_counts.tolist() == [2, 3, 1, 4, 0, 1, 5]
    assert sum_by_episode(batch, batch.masked_counts).tolist() == [6, 4, 0, 6]
    assert of_episodes(batch, 10 * ids).tolist() == [0, 10, 20, 30]
    assert select_episodes(batch, [3, 0]).masked_counts.tolist() == [1, 5, 2, 3, 1]
    sums = {name: values.tolist() for name, values in totals(batch).items()}
    assert sums["turns"] == [3, 1, 0, 2]
    assert sums["environment_reward"] == [1, 2, 0, 4]
    assert sums["failed"] == [0, 0, 1, 0]
    assert describe(batch)["turns"] == 1.5
    assert batch[VERSION][batch.mask].unique().tolist() == [7]


def test_an_episode_weighs_as_its_aggregation_says(batch: Batch) -> None:
    batch = batch.select([0, 1, 2, 3, 5, 6])
    counts, episode = batch.masked_counts, episode_ids(batch)[batch.sequence_ids][batch.mask]
    # For each aggregation the weights of tokens by samples, and the sums over the tokens of an episode.
    for aggregation, of_samples, expected in [
        ("token-mean", torch.full((6,), 1 / 16), [6 / 16, 4 / 16, 6 / 16]),
        ("sequence-mean", 1 / (6 * counts), [1 / 3, 1 / 3, 1 / 3]),
        ("sequence-sum", torch.full((6,), 1 / 6), [6 / 3, 4 / 3, 6 / 3]),
    ]:
        weighted = with_episode_weights(batch, aggregation)
        factors = weighted.fields.get(EPISODE_WEIGHTS, torch.ones(batch.num_tokens))
        weights = (factors * of_samples[batch.sequence_ids])[batch.mask]
        torch.testing.assert_close(torch.zeros(3).index_add(0, episode, weights), torch.tensor(expected))
        for number in range(3):  # all tokens of an episode weigh the same
            torch.testing.assert_close(
                weights[episode == number].std(correction=0), torch.tensor(0.0), atol=1e-7, rtol=0
            )
    single = Batch.from_sequences([[1, 2], [1, 2, 3]])
    assert with_episode_weights(single, "sequence-mean") is single


def options(**more: Any) -> TrainOptions:
    return TrainOptions(model=Path("m"), prompts=Path("p"), reward="r:f", algorithm="grpo", **more)


@pytest.mark.parametrize("name", ["group-relative", "group-centred", "leave-one-out"])
def test_episodes_are_compared_once(batch: Batch, name: str) -> None:
    """The advantages are those of a batch with one sample an episode, whatever the number of samples."""
    batch = batch.select([0, 1, 2, 3, 5, 6])
    names, generator = ("old_log_probs", "reference_log_probs"), torch.Generator().manual_seed(0)
    batch = batch.with_fields(**{key: torch.randn(batch.num_tokens, generator=generator) for key in names})
    ids, scores, groups = episode_ids(batch), torch.tensor([1.0, 4.0, 2.0]), torch.zeros(3, dtype=torch.int64)
    order = [(batch.mask & (ids[batch.sequence_ids] == number)).nonzero().flatten() for number in range(3)]
    drawn = {key: [torch.cat([torch.zeros(1), batch[key][places]]) for places in order] for key in names}
    whole = Batch.from_sequences([[5] * (1 + len(places)) for places in order], **drawn)
    of = options(kl_coefficient=0.3)
    expected = ADVANTAGES[name](whole, scores, groups, of)["advantages"]
    actual = ADVANTAGES[name](batch, scores[ids], groups[ids], of)["advantages"]
    torch.testing.assert_close(actual[torch.cat(order)], expected[whole.mask])
    assert (actual[~batch.mask] == 0).all()


def test_the_loss_has_the_weights_of_episodes(batch: Batch) -> None:
    batch = batch.select([0, 1, 2, 3, 5, 6])
    ones = torch.ones(batch.num_tokens)
    fields = dict.fromkeys(("old_log_probs", "advantages"), ones)
    batch = with_episode_weights(batch.with_fields(**fields), "sequence-mean")
    terms = policy_loss(options(), LossInputs(batch, {"log_probs": ones, "entropy": ones}))
    torch.testing.assert_close(terms.loss, -batch[EPISODE_WEIGHTS])
