from ckpt.comparison.report import Difference as Difference
