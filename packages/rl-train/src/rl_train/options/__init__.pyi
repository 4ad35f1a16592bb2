from rl_train.options.options import MayChange as MayChange, TrainOptions as TrainOptions
