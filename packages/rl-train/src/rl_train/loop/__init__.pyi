from rl_train.loop.checked_run import plan as plan
from rl_train.loop.run import train as train
