from rl_models.batch.batch import token_rows as token_rows
from rl_models.batch.prompts import prompt_rows as prompt_rows
from rl_models.batch.visual import Visual as Visual, described as described
