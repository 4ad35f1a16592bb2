"""Names of options: short names, names in other libraries, and names in runs before options were nested."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from os import PathLike
from typing import Any

# Short names of options that are typed often, also in files.
SHORT_NAMES = {
    "system_prompt": "data.system_prompt",
    "critic": "critic.model",
    "share_backbone": "critic.share_backbone",
    "dtype": "engine.dtype",
    "recompute": "engine.recompute",
    "tiled_mlp": "engine.tiled_mlp",
    "lora_rank": "engine.lora.rank",
    "optimizer": "optimizer.algorithm",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "schedule": "optimizer.schedule.kind",
    "warmup_steps": "optimizer.schedule.warmup_steps",
    "max_new_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "rollouts": "rollouts.engine",
    "staleness": "rollouts.staleness",
    "in_flight": "rollouts.in_flight",
    "loss": "objective.loss",
    "kl_coefficient": "objective.kl_coefficient",
    "importance_cap": "objective.importance.cap",
    "eval_prompts": "evaluation.prompts",
    "eval_dataset": "evaluation.dataset",
    "eval_every": "evaluation.every",
}

# Before options were nested, an option had its name alone, or with this prefix of its group.
_PREFIXES = {
    "rewards": "reward",
    "engine.pipeline": "pipeline",
    "engine.megatron": "megatron",
    "engine.lora": "lora",
    "engine.router_losses": "router",
    "rollouts": "rollout",
    "objective.importance": "importance",
    "evaluation": "eval",
}
_RENAMED = {
    **{"offload_optimizer": "optimizer.offload", "adam_eps": "optimizer.eps"},
    **dict.fromkeys(("beta1", "beta2"), "optimizer.betas"),
}

# Options of verl, TRL, NeMo-RL and OpenRLHF that a close match would miss, and the option here.
THEIRS = {
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), "learning_rate"),
    **dict.fromkeys(("critic_lr", "vf_lr"), "critic.learning_rate"),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_loss_coef", "beta"), "kl_coefficient"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollout_n"), "samples"),
    **dict.fromkeys(("train_batch_size", "rollout_batch_size", "num_prompts_per_step"), "prompts_per_step"),
    **dict.fromkeys(("ppo_mini_batch_size", "train_global_batch_size"), "mini_batch"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "generate_max_len"), "max_new_tokens"),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "epochs"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio"), "objective.clip_low"),
    **dict.fromkeys(("total_training_steps", "max_num_steps"), "steps"),
    **dict.fromkeys(("model_name_or_path", "pretrain"), "model"),
    **dict.fromkeys(("train_files", "prompt_data", "dataset_name"), "prompts"),
    **dict.fromkeys(("prompt_data_probs", "interleave_probs", "probabilities", "mixing_weights"), "data.weights"),
    **dict.fromkeys(("streaming", "buffer_size"), "data.shuffle_buffer"),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size"), "dims"),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), "out"),
    **{"gradient_checkpointing": "recompute", "use_vllm": "rollouts", "reward_funcs": "reward"},
}


def flag(name: str) -> str:
    """Return the flag of an option, such as `--engine.tiled-mlp`."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Collection[str]) -> str:
    """Return the option that an unknown name most likely means."""
    names = [*known, *(short for short, whole_name in SHORT_NAMES.items() if whole_name in known)]
    other = THEIRS.get(name) or _earlier_names(known).get(name)
    return other if other in names else difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def _earlier_names(known: Collection[str]) -> dict[str, str]:
    """Return the whole names of options by their names before options were nested."""
    names = SHORT_NAMES | _RENAMED
    for whole_name in sorted(known, key=lambda name: name.count(".")):
        group, _, last = whole_name.rpartition(".")
        for name in (last, f"{_PREFIXES.get(group, group)}_{last}"):
            names.setdefault(name, whole_name)
    return names


def flattened(
    values: Mapping[Any, Any], known: Collection[str], groups: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield each option's name as it is given, its whole name such as `engine.lora.rank`, and its value.

    A group is a mapping, or stands in the name. With a text, a group's name is a short name: `critic: folder`. `prefix`
    is the name of the group of `values`, with a dot.
    """
    for key, value in values.items():
        name = prefix + str(key).replace("-", "_")
        if name in groups and hasattr(value, "model_fields_set"):
            value = {field: getattr(value, field) for field in value.model_fields_set}
        if name in groups and isinstance(value, Mapping):
            yield from flattened(value, known, groups, f"{name}.")
        elif name in groups and not isinstance(value, str | PathLike):
            yield prefix + str(key), name, value
        else:
            whole_name = SHORT_NAMES.get(name, name)
            yield prefix + str(key), whole_name if whole_name in known else name, value


def unflattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return mappings of the groups from whole names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        group = tree
        for step in path:
            group = group.setdefault(step, {})
        group[last] = value
    return tree


def of_earlier_runs(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options of a run's `options.json` by their whole names, also of a run before options were nested."""
    names = _earlier_names(known)
    renamed = {names.get(name, name): value for name, value in values.items()}
    if "beta1" in values:
        renamed["optimizer.betas"] = [values["beta1"], values["beta2"]]
    if values.get("keep_probabilities") is True:
        renamed["engine.keep_probabilities"] = "auto"
    if values.get("lora_rank") == 0:  # without adapters
        renamed = {name: value for name, value in renamed.items() if not name.startswith("engine.lora.")}
        renamed["engine.lora.rank"] = None
    return renamed
