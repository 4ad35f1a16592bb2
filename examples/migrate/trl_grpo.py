"""GRPO by TRL, as the run that moves to rl-train.

pip install trl==1.16.0
python examples/migrate/trl_grpo.py MODEL OUT
"""

import sys

import torch
from datasets import Dataset
from questions import ROWS, share
from trl import GRPOConfig, GRPOTrainer

config = GRPOConfig(
    output_dir=sys.argv[2],
    max_steps=20,
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=8,
    num_iterations=1,
    loss_type="grpo",
    beta=0.0,
    epsilon=0.2,
    temperature=1.0,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    weight_decay=0.0,
    max_grad_norm=1.0,
    seed=0,
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = GRPOTrainer(model=sys.argv[1], reward_funcs=share, args=config, train_dataset=Dataset.from_list(ROWS))
trainer.train()
trainer.save_state()  # its log
trainer.save_model(sys.argv[2])
