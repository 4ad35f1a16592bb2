from rl_train.cluster.future import Future as Future
from rl_train.cluster.launch import slow_imports as slow_imports
