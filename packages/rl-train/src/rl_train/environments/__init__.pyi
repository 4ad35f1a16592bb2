from rl_train.environments.protocol import Environment as Environment, Step as Step
