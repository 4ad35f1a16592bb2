from rl_train.planner.limits import fitting as fitting
from rl_train.planner.memory import GIB as GIB, MemoryOptions as MemoryOptions
from rl_train.planner.models import savings_text as savings_text
from rl_train.planner.plan import plan_memory as plan_memory
