from rl_train.loop.checked_run import check_run as check_run
from rl_train.loop.in_memory import train_on as train_on
from rl_train.loop.run import train as train
