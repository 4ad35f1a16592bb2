"""Run a program, and kill rank 1 of one of its Ray groups when a method of that group is called for the n-th time.

python tests/kill_a_rank.py PROGRAM GROUP METHOD N
"""

import os
import runpy
import signal
import sys
from typing import Any

from rl_train import RayModelGroup
from rl_train.cluster import Future

program, group, method, number = sys.argv[1:]
submit = RayModelGroup.submit
calls = 0


def counting(self: RayModelGroup, called: str, *args: Any, **kwargs: Any) -> Future[Any]:
    """`RayModelGroup.submit`, behind the kill."""
    global calls
    if (self.name, called) == (group, method):
        calls += 1
        if calls == int(number):
            os.kill(self.seats[1].pid, signal.SIGKILL)
    return submit(self, called, *args, **kwargs)


RayModelGroup.submit = counting  # type: ignore[method-assign]
sys.argv = [program]
runpy.run_path(program, run_name="__main__")
