"""The run of trl_grpo.py by rl-train: its rows, its reward, and each option by its name here.

python examples/migrate/from_trl.py MODEL OUT
"""

import sys

from questions import ROWS, reward

from rl_train.loop import train_on

OPTIONS = {
    "out": sys.argv[2],  # output_dir
    "steps": 20,  # max_steps
    "prompts_per_step": 4,  # per_device_train_batch_size * devices / num_generations
    "samples": 8,  # num_generations
    "max_new_tokens": 8,  # max_completion_length
    "epochs": 1,  # num_iterations
    "algorithm": "grpo",  # loss_type
    "kl_coefficient": 0.0,  # beta
    "objective": {"clip_low": 0.2, "clip_high": 0.2},  # epsilon, epsilon_high
    "temperature": 1.0,
    "learning_rate": 1e-2,
    "schedule": "constant",  # lr_scheduler_type
    "weight_decay": 0.0,
    "optimizer": {"max_grad_norm": 1.0},
    "seed": 0,
    "dtype": "float32",  # bf16
    "save_every": 0,  # save_strategy
}

if __name__ == "__main__":
    train_on(sys.argv[1], ROWS, reward=reward, **OPTIONS)
