"""The rollouts of a run, `OUT/rollouts`: all responses of each step as a Parquet file (`--save-rollouts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt.cli import printable
from ckpt.files import replacing, room_for
from rl_models import Batch
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import Prompt
from rl_train.engines.interface import VERSION
from rl_train.trajectories.episodes import SAMPLE, episode_ids

# The folder of a run's rollouts, and the name of the file of a step.
ROLLOUTS, FILE = "rollouts", "step-{:08d}.parquet"
# Fields that a step computes for the responses that it learns from.
ESTIMATES = ("old_log_probs", "advantages")


def check_rollouts() -> None:
    """Raise ValueError where pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        raise ValueError("save_rollouts writes Parquet with pyarrow, which is not installed: pip install 'datasets>=4'")


class RolloutFiles:
    """Write the responses of each step as a Parquet file, `OUT/rollouts/step-00000001.parquet`.

    A run that goes on after an earlier step removes the files of later steps before it writes its first one.
    """

    def __init__(self, out: Path, codec: TextCodec) -> None:
        self._folder, self._codec, self._begun = out / ROLLOUTS, codec, False

    def write(
        self,
        step: int,
        batch: Batch,
        prompts: Sequence[Prompt],
        scores: Tensor,
        rewards: Mapping[str, Tensor],
        *,
        truncated: Sequence[bool],
    ) -> None:
        """Write the responses of a step; the file appears complete.

        A row is a sequence: a response, or one of the samples of an episode. Its columns are

            step, line, source              the step, and the line and the file of the prompt
            response, sample                the response's number among those to the prompt, and the sample's number in
                                            its episode; both from 0
            reward, reward/NAME             the score with its penalties, and each of several rewards
            truncated                       whether a limit cut the response off
            prompt_text, response_text      the texts with special tokens; null without a tokenizer
            tokens, mask                    all token ids, and whether the policy drew the token
            log_probs, versions             of the engine that drew the token; 0 and -1 elsewhere
            old_log_probs, advantages       of the trainer; null for responses that the step does not learn from

        Args:
            step: The number of the step.
            batch: The E episodes of all responses to P prompts, with the fields `ESTIMATES`, NaN in sequences that the
                step does not learn from.
            prompts: The P prompts.
            scores: `[P, E / P]`.
            rewards: The rewards by name, `[E]` each.
            truncated: Whether a limit cut each episode off.
        """
        from pyarrow import parquet  # of the extra `datasets`

        ids, per_prompt = episode_ids(batch), scores.shape[1]
        columns = {
            "line": torch.tensor([prompt.line for prompt in prompts])[ids // per_prompt],
            "response": ids % per_prompt,
            "sample": batch[SAMPLE][batch.first] if SAMPLE in batch.fields else torch.zeros_like(ids),
            "reward": scores.flatten()[ids],
            **{f"reward/{name}": values[ids] for name, values in rewards.items() if len(rewards) > 1},
            "truncated": torch.tensor(truncated)[ids],
        }
        table = self._table(batch, {"step": torch.full_like(ids, step), **columns})
        # Arrow takes no names of files that are not UTF-8.
        sources = [printable(prompts[number].source) for number in (ids // per_prompt).tolist()]
        table = table.append_column("source", [sources])
        file = self._folder / FILE.format(step)
        with room_for(None, file):
            self._folder.mkdir(exist_ok=True)
            for later in self._folder.glob(FILE.format(0).replace("0" * 8, "*")) if not self._begun else ():
                if later.name >= file.name:
                    later.unlink()
            self._begun = True
            with replacing(file) as opened:
                parquet.write_table(table, opened, compression="zstd")

    def _table(self, batch: Batch, numbers: Mapping[str, Tensor]) -> Any:
        """Return the table of a batch, with numbers `[N]` of its sequences."""
        import pyarrow  # of the extra `datasets`

        texts = [self._texts(tokens, mask) for tokens, mask in zip(batch.split(), batch.split("mask"), strict=True)]
        offsets = pyarrow.array(torch.tensor([0, *batch.lengths]).cumsum(0).int().numpy())
        columns = {name: pyarrow.array(values.numpy()) for name, values in numbers.items()}
        columns["prompt_text"] = pyarrow.array([prompt for prompt, _ in texts], pyarrow.string())
        columns["response_text"] = pyarrow.array([response for _, response in texts], pyarrow.string())
        absent = torch.full((batch.num_tokens,), torch.nan)
        per_token = {
            "tokens": batch.tokens.int(),
            "mask": batch.mask,
            "log_probs": batch["log_probs"].float(),
            "versions": batch[VERSION].int(),
            **{name: batch.fields.get(name, absent) for name in ESTIMATES},
        }
        for name, values in per_token.items():
            nulls = [bool(row.isnan().any()) for row in values.split(list(batch.lengths))]
            arrays = offsets, pyarrow.array(values.numpy())
            columns[name] = pyarrow.ListArray.from_arrays(*arrays, mask=pyarrow.array(nulls))
        return pyarrow.table(columns)

    def _texts(self, tokens: Tensor, mask: Tensor) -> tuple[str | None, str | None]:
        """Return the texts before and from the first token that the policy drew."""
        if not self._codec.available:
            return None, None
        drawn = mask.cumsum(0) > 0
        return (
            self._codec.decode(tokens[~drawn].tolist(), special=True),
            self._codec.decode(tokens[drawn].tolist(), special=True),
        )
