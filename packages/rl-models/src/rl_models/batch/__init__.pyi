from rl_models.batch.batch import prompt_rows as prompt_rows, token_rows as token_rows
from rl_models.batch.visual import Visual as Visual, described as described
