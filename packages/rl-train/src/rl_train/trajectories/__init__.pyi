from rl_train.trajectories.recorder import Recorder as Recorder
