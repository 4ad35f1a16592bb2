"""`rl-train quickstart`: a small model learns a small task, end to end on real files."""

from rl_train.quickstart.report import Display, result_table
from rl_train.quickstart.run import QuickstartOptions, quickstart

__all__ = ["Display", "QuickstartOptions", "quickstart", "result_table"]
