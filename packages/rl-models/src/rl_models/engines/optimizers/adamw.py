"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's fused one, and one with moments in less memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rl_models.engines.optimizers.interface import OptimizerOptions
from rl_models.engines.optimizers.moments import Parts, Storage
from rl_models.engines.optimizers.rounding import Coordinates, random_bits, step_key
from rl_models.engines.optimizers.rules import Rule, StoredRule, compiled


class FusedAdamW(Rule):
    """torch's fused AdamW with fp32 moments; `decays` has the master weights of each weight decay."""

    slots = frozenset(("step", "exp_avg", "exp_avg_sq"))

    def __init__(self, decays: Mapping[float, Sequence[Tensor]], options: OptimizerOptions) -> None:
        groups = [{"params": [*masters], "weight_decay": decay} for decay, masters in decays.items()]
        # torch takes no empty list; a pipeline stage may have no adapters.
        empty = [{"params": [torch.empty(0)]}]
        self.adamw = torch.optim.AdamW(groups or empty, options.learning_rate, options.betas, options.eps, fused=True)

    def step(self, learning_rate: float) -> None:
        """See `Rule`; one kernel call for each weight decay."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """See `Rule`."""
        return dict(self.adamw.state.get(master, {}))

    def load_state(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `Rule`."""
        self.adamw.state.pop(master, None)
        if state:
            # Copied: the fused kernel needs the step count on the device, and all slots in fp32.
            self.adamw.state[master] = {
                name: value.detach().to(master.device, torch.float32, copy=True) for name, value in state.items()
            }

    def tensors(self) -> Iterator[Tensor]:
        """See `Rule`."""
        for state in self.adamw.state.values():
            yield from state.values()


class StoredAdamW(StoredRule):
    """AdamW whose moments have a `Storage`, computed in fp32 a chunk at a time; compiled on a GPU."""

    def __init__(
        self,
        decays: Mapping[float, Sequence[Tensor]],
        options: OptimizerOptions,
        coordinates: Mapping[Tensor, Coordinates],
        storage: Storage,
    ) -> None:
        super().__init__(coordinates, storage, {"exp_avg": False, "exp_avg_sq": True})
        self.decays, self.betas, self.eps = decays, options.betas, options.eps

    def step(self, learning_rate: float) -> None:
        """See `Rule`."""
        numbers: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}
        for decay, masters in self.decays.items():
            for master in masters:
                if master.grad is None:
                    continue
                stored = self.stored(master)
                stored.steps += 1
                at = stored.steps, decay, master.device
                if at not in numbers:
                    numbers[at] = self._numbers(stored.steps, learning_rate, decay, master.device)
                values, gradient = self.as_matrix(master, master), self.as_matrix(master, master.grad)
                for start, stop, rows, columns in self.chunks(master):
                    own = (self.storage.part(parts, start, stop) for parts in stored.moments.values())
                    part = slice(start, stop)
                    _adamw(values[part], gradient[part], *own, self.storage, rows, columns, *numbers[at])

    def _numbers(self, step: int, rate: float, decay: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers of a step, on the device, so that new ones compile nothing anew."""
        first, second = self.betas
        bias = 1 - first**step, math.sqrt(1 - second**step)
        numbers = [1 - rate * decay, 1 - first, second, 1 - second, rate / bias[0], bias[1], self.eps]
        return torch.tensor(numbers, device=device), torch.tensor(step_key(step), device=device)


@compiled
def _adamw(
    master: Tensor, gradient: Tensor, first: Parts, second: Parts, storage: Storage, rows: Tensor, columns: Tensor,
    numbers: Tensor, key: Tensor,
) -> None:  # fmt: skip
    """Change a chunk `[R, C]` of a master weight."""
    kept, new, second_kept, second_new, rate, bias, eps = numbers.unbind()
    gradient = gradient.float()
    mean = storage.read(first)
    mean = mean + new * (gradient - mean)
    square = second_kept * storage.read(second) + second_new * gradient.square()
    update = rate * mean / (square.sqrt() / bias + eps)
    master.copy_(master * kept - update)
    draw = random_bits(rows, columns, key)
    storage.write(first, mean, draw & 0xFFFF)
    storage.write(second, square, draw >> 16)
