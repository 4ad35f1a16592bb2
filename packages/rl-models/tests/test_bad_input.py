"""Arguments of a wrong type or shape are refused by name, with what is allowed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import transformers

from hf_patches.testing import tiny_config, tiny_model
from parallel_models import GenerationKeywords, GenerationOptions
from rl_models import Actor, Batch, Critic, LoraOptions, OptimizerOptions, losses
from rl_models.backends.options import BackendKeywords, BackendOptions
from rl_models.losses import LossTerms

BATCH = Batch.from_sequences([[1, 2, 3], [4, 5]])
LISTS: Any = [1.0, 2.0]
TEXT: Any = "8"
ROWS = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BATCH.with_fields(pair=ROWS), r"pair must be \[5\] like the tokens, got \[5, 2\]"),
        (lambda: BATCH.with_fields(group=ROWS), r"group must be \[5\] like the tokens, got \[5, 2\]"),
        (lambda: BATCH.split(torch.zeros(3)), r"expected a tensor \[5\], one row for each token, got tensor\("),
        (lambda: BATCH.sum_by_sequence(LISTS), r"expected a tensor \[5\], one row for each token, got \[1.0, 2.0\]"),
        (lambda: losses.grpo_advantages(LISTS, LISTS), "scores must be a tensor, got list; use torch.tensor"),
        (lambda: losses.rloo_advantages(torch.ones(2), LISTS), "groups must be a tensor, got list"),
        (lambda: losses.overlong_penalty(LISTS, max_length=4, buffer=2), "response_lengths must be a tensor, got list"),
        (lambda: losses.token_rewards(LISTS, BATCH.mask, BATCH.lengths), "scores must be a tensor, got list"),
        (lambda: losses.ppo_clip(ROWS, ROWS, LISTS), "advantages must be a tensor, got list"),
        (lambda: LoraOptions(alpha=TEXT), "alpha='8' must be a positive number"),
        (lambda: LoraOptions(dropout=TEXT), "dropout='8' must be at least 0 and below 1"),
    ],
)
def test_a_wrong_type_or_shape_is_refused_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 2}, r"dims=2 must be ParallelDims\(...\), not int"),
        ({"recomput": "full"}, r"Actor.from_pretrained has no option 'recomput'; did you mean 'recompute'\?"),
        ({"optimiser": None}, "no option 'optimiser'; did you mean 'optimizer'"),
        ({"backend": None}, "backend=None is not available; available: parallel, megatron, transformers"),
    ],
)
def test_a_model_is_not_loaded_with_wrong_options(options: Any, message: str, tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(tiny("llama"), device="cpu", **options)


@pytest.mark.parametrize(
    ("keywords", "options"), [(BackendKeywords, BackendOptions), (GenerationKeywords, GenerationOptions)]
)
def test_keyword_arguments_are_the_fields_of_the_options(keywords: type, options: type) -> None:
    # The options are imported without torch, so their module does not hold the name.
    names = {"torch": torch}
    assert get_type_hints(keywords, localns=names) == get_type_hints(options, localns=names)


def test_a_head_with_a_bias_is_refused_in_words_of_an_actor(tmp_path: Path) -> None:
    tiny_model("ernie4_5_moe", use_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the language-model head has a bias, which no backend computes"):
        Actor.from_pretrained(tmp_path, backend="transformers", device="cpu")


def test_a_reward_model_of_gemma_3_is_known_by_its_own_class(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text", num_labels=1, pad_token_id=0)
    transformers.Gemma3TextForSequenceClassification(config).save_pretrained(tmp_path / "in")
    critic = Critic.from_pretrained(tmp_path / "in", device="cpu")
    critic.save_pretrained(tmp_path / "out")
    configs = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("in", "out")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == ["Gemma3TextForSequenceClassification"]


def test_options_of_a_generation_are_refused_by_name(tiny: Callable[..., Path]) -> None:
    actor = Actor.from_pretrained(tiny("llama"), device="cpu")
    misspelt: Any = {"max_new_token": 2}
    with pytest.raises(
        ValueError, match=r"Actor.generate has no option 'max_new_token'; did you mean 'max_new_tokens'"
    ):
        actor.generate([[1, 2]], **misspelt)
    lacking: Any = {"n": 2}
    with pytest.raises(ValueError, match=r"Actor.generate needs max_new_tokens; pass max_new_tokens="):
        actor.generate([[1, 2]], **lacking)


def with_fields(path: Path, folder: Path, **fields: object) -> Path:
    """Return a copy of a checkpoint whose config has these fields, too."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("backend", ["parallel", "transformers", "megatron"])
def test_a_config_that_contradicts_itself_is_refused_on_every_backend(
    tiny: Callable[..., Path], tmp_path: Path, backend: str
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = with_fields(tiny("llama"), tmp_path / "model", rope_scaling=scaling)
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling differ in factor, "):
        Actor.from_pretrained(folder, backend=backend, device="cpu")


def test_a_config_that_transformers_does_not_read_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_fields(tiny("llama"), tmp_path / "model", max_position_embeddings="64")
    with pytest.raises(ValueError, match=f"transformers does not read {folder}/config.json: .*expected int, got str"):
        Actor.from_pretrained(folder, backend="transformers", device="cpu")


def test_what_a_save_cannot_write_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    actor = Actor.from_pretrained(tiny("llama"), device="cpu", optimizer=OptimizerOptions())
    extra: Any = [1]
    with pytest.raises(ValueError, match=r"extra=\[1\] must be Mapping\(...\), not list"):
        actor.save_training(tmp_path, extra=extra)
    dtype: Any = "bfloat16"
    with pytest.raises(ValueError, match=r"dtype='bfloat16' must be a torch.dtype"):
        list(actor.stream_weights(dtype=dtype))


def test_mixtures_learn_in_fp64_on_both_backends(tiny: Callable[..., Path]) -> None:
    """torch's grouped GEMM, transformers' default for experts, does not take fp64."""
    after = {}
    for backend in ("parallel", "transformers"):
        actor = Actor.from_pretrained(
            tiny("mixture"),
            backend=backend,
            device="cpu",
            dtype=torch.float64,
            optimizer=OptimizerOptions(learning_rate=0.1, eps=1.0),  # a step in proportion to the gradient
        )
        actor.update(BATCH, lambda inputs: LossTerms(-inputs.log_probs))
        after[backend] = dict(actor.stream_weights())
    assert after["parallel"].keys() == after["transformers"].keys()
    for name, weight in after["parallel"].items():
        torch.testing.assert_close(weight, after["transformers"][name], rtol=0, atol=1e-6, msg=name)
