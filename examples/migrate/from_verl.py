"""Print the command of rl-train for a script that starts verl.

    python examples/migrate/from_verl.py examples/migrate/verl_grpo.sh

Options that rl-train does not need are left out; an option that this table does not know is an error that names it.
"""

import shlex
import sys
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# verl's option: the option here, or for some values alone: {value: words of the command}.
OPTIONS = {
    "algorithm.adv_estimator": {
        "grpo": "--algorithm grpo",
        "gae": "--algorithm ppo",
        "rloo": "--algorithm rloo",
        "reinforce_plus_plus": "--algorithm reinforce++",
    },
    "data.train_files": "--prompts",
    "data.val_files": "--eval-prompts",
    "data.train_batch_size": "--prompts-per-step",
    "data.max_response_length": "--max-new-tokens",
    "data.filter_overlong_prompts": {"True": "--data.long-prompts drop", "False": ""},
    "actor_rollout_ref.model.path": "--model",
    "actor_rollout_ref.model.lora_rank": "--lora-rank",
    "actor_rollout_ref.model.lora_alpha": "--engine.lora.alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": {"True": "--recompute full", "False": ""},
    f"{ACTOR}.optim.lr": "--learning-rate",
    f"{ACTOR}.optim.weight_decay": "--weight-decay",
    f"{ACTOR}.ppo_epochs": "--epochs",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "--max-tokens",
    f"{ACTOR}.clip_ratio_low": "--objective.clip-low",
    f"{ACTOR}.clip_ratio_high": "--objective.clip-high",
    f"{ACTOR}.clip_ratio_c": "--objective.dual-clip",
    f"{ACTOR}.kl_loss_coef": "--kl-coefficient",
    f"{ACTOR}.kl_loss_type": {"low_var_kl": "--objective.kl-estimator k3", "kl": "--objective.kl-estimator k1"},
    f"{ACTOR}.entropy_coeff": "--objective.entropy-coefficient",
    f"{ACTOR}.grad_clip": "--optimizer.max-grad-norm",
    f"{ACTOR}.loss_agg_mode": {
        "token-mean": "--objective.aggregation token-mean",
        "seq-mean-token-mean": "--objective.aggregation sequence-mean",
    },
    f"{ACTOR}.fsdp_config.param_offload": {"True": "--offload", "False": ""},
    f"{ACTOR}.fsdp_config.optimizer_offload": {"True": "--offload", "False": ""},
    f"{ROLLOUT}.name": {"vllm": "--rollouts vllm", "hf": ""},
    f"{ROLLOUT}.n": "--samples",
    f"{ROLLOUT}.temperature": "--temperature",
    f"{ROLLOUT}.top_p": "--top-p",
    f"{ROLLOUT}.gpu_memory_utilization": "--rollouts.memory",
    # Here each rank has an engine, or engines have devices of their own: --rollouts.devices.
    f"{ROLLOUT}.tensor_model_parallel_size": {"1": ""},
    "critic.model.path": "--critic",
    "critic.optim.lr": "--critic.learning-rate",
    "algorithm.use_kl_in_reward": {"False": ""},  # here the penalty is in the loss: use_kl_loss
    "algorithm.gamma": "--objective.gamma",
    "algorithm.lam": "--objective.lam",
    "algorithm.norm_adv_by_std_in_grpo": {"True": ""},
    "trainer.critic_warmup": {"0": ""},
    "trainer.logger": {"console": "", '["console"]': "", '["console","wandb"]': "--logger wandb"},
    "trainer.save_freq": "--save-every",
    "trainer.test_freq": "--eval-every",
    "trainer.total_training_steps": "--steps",
    "trainer.default_local_dir": "--out",
}
# Micro-batches are bounded in tokens, batches are packed and balanced, and engines size their caches by themselves.
NEEDLESS = (
    *("data.max_prompt_length", "data.truncation", "data.shuffle", "data.return_raw_chat"),
    *(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.use_torch_compile"),
    *("actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
    *(f"{ROLLOUT}.{name}" for name in ("mode", "enforce_eager", "free_cache_engine", "enable_chunked_prefill")),
    *("trainer.balance_batch", "trainer.val_before_train", "trainer.project_name", "trainer.experiment_name"),
)
# What verl takes where a script does not say.
DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": "1024",
    "data.max_response_length": "512",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "True",
    f"{ACTOR}.optim.lr": "1e-6",
    f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.clip_ratio_c": "3.0",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ROLLOUT}.n": "1",
}
# These are read together below.
MINI_BATCH, KL_LOSS = f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.use_kl_loss"
DEVICES, NODES, ULYSSES = "trainer.n_gpus_per_node", "trainer.nnodes", f"{ACTOR}.ulysses_sequence_parallel_size"


def translated(script: str) -> list[str]:
    """Return the words of a command `rl-train train` for the words `name=value` of a script.

    Raises:
        ValueError: An option or a value has no counterpart; the message names it.
    """
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    given = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    values = {**DEFAULTS, **given}
    if values.get(KL_LOSS, "False") == "False":
        values.pop(f"{ACTOR}.kl_loss_coef", None)
    command = ["rl-train", "train"]
    for name, value in values.items():
        if name in (*NEEDLESS, MINI_BATCH, KL_LOSS, DEVICES, NODES, ULYSSES):
            continue
        option = OPTIONS.get(name)
        if isinstance(option, str):
            more = [option, "0" if value == "-1" else value]  # verl's -1: never
        elif option is not None and (key := value.replace("'", '"').replace(" ", "")) in option:
            more = option[key].split()
        else:
            raise ValueError(f"{name}={value} has no counterpart in this table; see docs/come-from.md, or leave it out")
        command += [] if more == ["--offload"] and "--offload" in command else more
    cp = int(values.get(ULYSSES, 1))
    devices = int(values.get(DEVICES, 8)) * int(values.get(NODES, 1))
    if devices > 1:
        command += ["--dims", f"dp={devices // cp}" + f",cp={cp}" * (cp > 1)]
    # verl counts prompts, rl-train responses.
    command += ["--mini-batch", str(int(values[MINI_BATCH]) * int(values[f"{ROLLOUT}.n"]))]
    return command


if __name__ == "__main__":
    print(shlex.join([*translated(Path(sys.argv[1]).read_text()), "--reward", "MODULE:FUNCTION"]))
