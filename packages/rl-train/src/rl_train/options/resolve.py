"""Read the options of a run from a YAML or TOML file and the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_train.options.options import TrainOptions

# Options of verl, TRL, NeMo-RL and OpenRLHF that a close match would miss, and the option here.
THEIRS = {
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), "learning_rate"),
    **dict.fromkeys(("critic_lr", "vf_lr"), "critic_learning_rate"),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef", "beta"), "kl_coefficient"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollout_n"), "samples"),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "num_prompts_per_step"), "prompts_per_step"),
    **dict.fromkeys(("ppo_mini_batch_size", "train_global_batch_size"), "mini_batch"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "generate_max_len"), "max_new_tokens"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "epochs"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio"), "clip_low"),
    **dict.fromkeys(("total_training_steps", "max_num_steps"), "steps"),
    **dict.fromkeys(("model_name_or_path", "pretrain"), "model"),
    **dict.fromkeys(("train_files", "prompt_data", "dataset_name"), "prompts"),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size"), "dims"),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), "out"),
    **{"gradient_checkpointing": "recompute", "use_vllm": "rollouts", "reward_funcs": "reward"},
}


def resolve_options(file: Path | None, arguments: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a YAML or TOML file and of the command line, which wins; both use `TrainOptions`' names.

    Raises:
        ValueError: A name is unknown (the error names the nearest one), a value has the wrong type or is out of range,
            or something required is missing; names every such option and where it was given.
    """
    known = TrainOptions.model_fields
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    sources = [] if file is None else [(str(file), _read(file))]
    for source, entries in (*sources, ("the command line", arguments)):
        keys: dict[str, Any] = {}
        for key, value in entries.items():
            name = str(key).replace("-", "_")
            if name not in known:
                near = THEIRS.get(name) or difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise ValueError(f"{source}: unknown option {key!r}; did you mean {near!r}?")
            if (earlier_key := keys.setdefault(name, key)) != key:
                raise ValueError(f"{source}: {earlier_key!r} and {key!r} are the same option; leave one of them out")
            if value is not None:
                values[name], where[name] = value, source
    try:
        return TrainOptions(**values)
    except ValidationError as error:
        error_of_option = {str(details["loc"][0]): details for details in error.errors()}
        missing = [name for name, details in error_of_option.items() if details["type"] == "missing"]
        messages = [
            f"{where[name]}: {name}={details['input']!r} {_fix(details['msg'])}"
            for name, details in error_of_option.items()
            if name in where
        ]
    if missing:
        messages.append(f"missing: {', '.join('--' + name for name in missing)} (or in the file of --config)")
    raise ValueError("; ".join(messages))


def _fix(message: str) -> str:
    """Return pydantic's "Input should be ..." as the end of a sentence about the value."""
    return message.replace("Input should", "must", 1).replace("Input is", "is", 1)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from None
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{path} must end with .yaml, .yml or .toml")
    import yaml  # Only a YAML file needs it.

    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-45 looks like a date
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options by name, got {type(values).__name__}")
    keys = Counter(key.value for key, _ in document.value)
    if repeated := [key for key, number in keys.items() if number > 1]:
        raise ValueError(f"{path}: {', '.join(map(str, repeated))} is given more than once; keep one of them")
    return values
