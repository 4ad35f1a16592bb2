from rl_train.cluster.future import RankDied as RankDied
from rl_train.cluster.group import RayModelGroup as RayModelGroup
from rl_train.cluster.placement import Placement as Placement
from rl_train.cluster.resources import Resources as Resources
