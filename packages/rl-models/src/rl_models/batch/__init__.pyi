from rl_models.batch.batch import token_rows as token_rows
from rl_models.batch.prompts import OtherPrompts as OtherPrompts, prompt_rows as prompt_rows
from rl_models.batch.visual import Visual as Visual, described as described
