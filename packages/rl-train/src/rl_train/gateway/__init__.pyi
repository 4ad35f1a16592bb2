from rl_train.gateway.server import Gateway as Gateway
from rl_train.gateway.service import PoolService as PoolService
from rl_train.gateway.sessions import Session as Session
