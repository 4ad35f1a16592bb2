from rl_train.rewards.ready import number_match as number_match
from rl_train.rewards.response import Response as Response
