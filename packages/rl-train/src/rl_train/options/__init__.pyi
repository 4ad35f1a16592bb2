from rl_train.options.options import TrainOptions as TrainOptions
