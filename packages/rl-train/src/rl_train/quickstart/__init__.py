"""`rl-train quickstart`: a small model learns a small task, end to end on real files."""

from rl_train.quickstart.result import result_table
from rl_train.quickstart.run import QuickstartOptions, quickstart

__all__ = ["QuickstartOptions", "quickstart", "result_table"]
