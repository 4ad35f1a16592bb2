from rl_train.quickstart.task import (
    LETTERS as LETTERS,
    MODEL as MODEL,
    VOCABULARY as VOCABULARY,
    make_checkpoint as make_checkpoint,
)
