"""`GuardedLoss`: a caller's loss whose errors no other rank waits for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import agree
from rl_models.engines.engine import Loss, Outputs


class GuardedLoss:
    """A loss, or zero once it has raised: the forward and backward passes that other ranks take part in go on.

    Args:
        loss: what it stands for.
        group: the ranks that run together; None: this one alone, and an error is raised where it happens.
    """

    def __init__(self, loss: Loss, group: ProcessGroup | None) -> None:
        self.loss, self.group = loss, group
        self._error: Exception | None = None

    def __call__(self, number: int, outputs: Outputs) -> Tensor:
        """The loss of a micro-batch."""
        if self._error is None:
            try:
                return self.loss(number, outputs)
            except Exception as error:
                if self.group is None:
                    raise
                self._error = error
        return torch.stack([output.sum() for output in outputs]).sum() * 0

    def raise_errors(self) -> None:
        """After the last backward: raise on every rank what one of them has met; see `ckpt.agree`."""
        agree(self._raise, self.group)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
