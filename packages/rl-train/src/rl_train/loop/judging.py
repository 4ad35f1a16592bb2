"""Models of a run that judge, `--reward judge:FILE` without a URL: their checks, and the draws of their replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt import Checkpoint
from parallel_models import SamplingOptions
from rl_models import Actor, Policy
from rl_train.data.codec import TextCodec, end_of_text
from rl_train.data.prompts import vocabulary_size
from rl_train.loop.checked_models import check_reference, require_states
from rl_train.loop.recipe_run import ModelMaker
from rl_train.options.derived import cache_options
from rl_train.options.options import TrainOptions
from rl_train.rewards.function import judges_of_run
from rl_train.rewards.rubric import REFERENCE, Rubric
from rl_train.rewards.run_judge import folder_of_judge, longest_judgement

# The options of a frozen model, which has no adapters.
FROZEN: Mapping[str, Any] = {"lora": None, "base_format": None}


@dataclass(frozen=True)
class JudgingModel:
    """A model of a run that judges.

    Attributes:
        model: The model, a policy of which `options` of `generate` may leave the adapters out.
        sampling: The options of the draws.
        options: Further options of `generate`.
    """

    model: Policy
    sampling: SamplingOptions
    options: Mapping[str, Any]

    def draw(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the reply to each prompt; all ranks call this."""
        if not prompts:
            return []
        batch = self.model.generate(prompts, **vars(self.sampling), **self.options)
        return [response.tolist() for response in batch.responses()]


def judging_models(
    options: TrainOptions, make: ModelMaker, actor: Policy, reference: Policy | None
) -> dict[str, JudgingModel]:
    """Return the models of the run that judge, by the name of their reward; judges of one folder share a model."""
    rollouts, models = options.rollouts, dict[Path, Policy]()
    further = {"max_sequences": rollouts.max_sequences, "cache_gib": rollouts.cache_gib, "experts": rollouts.experts}
    judges = dict[str, JudgingModel]()
    for name, rubric in judges_of_run(options.reward).items():
        folder = folder_of_judge(rubric, options)
        if rubric.model != REFERENCE and folder not in models:
            models[folder] = make(Actor, folder, options.grid, 0.0, **FROZEN)
        of_reference, changes = (actor, {"adapters": False}) if reference is None else (reference, {})
        model, changes = (of_reference, changes) if rubric.model == REFERENCE else (models[folder], {})
        judges[name] = JudgingModel(model, _sampling(rubric, folder, options.seed), further | changes)
    return judges


def check_judges(options: TrainOptions) -> None:
    """Refuse rubrics whose model the run does not have, or cannot load or draw with.

    Raises:
        ValueError: As above; names the reward.
    """
    for name, rubric in judges_of_run(options.reward).items():
        try:
            _check(rubric, options)
        except ValueError as error:
            raise ValueError(f"reward {name}: {error}") from None


def _check(rubric: Rubric, options: TrainOptions) -> None:
    if rubric.model == REFERENCE and not options.separate_reference and options.lora is None:
        raise ValueError(
            f"model={REFERENCE!r} needs a reference on the policy's ranks, and the run has none; give a "
            "kl_coefficient above 0 or adapters (engine.lora.rank), or the checkpoint folder of a judge"
        )
    folder = folder_of_judge(rubric, options)
    codec, longest = TextCodec(folder), longest_judgement(folder, options)
    if not codec.available or not codec.chats:
        raise ValueError(
            f"{folder} has no chat template, by which a judge is asked; write one into its file chat_template.jinja, "
            "or take another model"
        )
    roles = ["system"] * bool(rubric.system) + ["user"]
    codec.chat([{"role": role, "content": "."} for role in roles], None)
    sampling = _sampling(rubric, folder, options.seed)
    if sampling.max_new_tokens >= longest:
        raise ValueError(
            f"max_tokens={sampling.max_new_tokens} of a reply must be less than {longest}, the smaller one of "
            f"--max-tokens and the positions of {folder}"
        )
    require_states(options.backend, Checkpoint(folder))
    if rubric.model != REFERENCE:
        cache = replace(cache_options(options, longest, 0), drafts=0)
        check_reference(options, Checkpoint(folder), options.grid, longest, cache)


def _sampling(rubric: Rubric, folder: Path, seed: int) -> SamplingOptions:
    """Return the options with which a model of the run draws replies."""
    stops = end_of_text(folder, vocabulary_size(folder))
    return SamplingOptions(**{"seed": seed, "stop_ids": stops, "log_probs": False, **rubric.sampling})
