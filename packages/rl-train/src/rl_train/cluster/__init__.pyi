from rl_train.cluster.future import Future as Future
