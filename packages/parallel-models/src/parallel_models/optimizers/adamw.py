"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): torch's fused AdamW, and AdamW with moments in less memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel_layers.memory import StreamedTensors
from parallel_models.optimizers.interface import OptimizerOptions
from parallel_models.optimizers.kernels import AdamWNumbers, adamw_, supports
from parallel_models.optimizers.moments import STORAGES, Storage
from parallel_models.optimizers.rounding import Coordinates, random_bits, step_key
from parallel_models.optimizers.rules import CHUNK, Chunk, Rule, Weight


class AdamW(Rule):
    """AdamW; `decays` has the master weights of each weight decay.

    fp32 moments have torch's fused kernel, one call for each weight decay and bucket. Other moments are stepped in
    fp32, by our Triton kernel on a GPU, else by torch, a chunk at a time.
    """

    def __init__(
        self,
        decays: Mapping[float, Sequence[Tensor]],
        options: OptimizerOptions,
        coordinates: Mapping[Tensor, Coordinates],
        host: StreamedTensors | None,
    ) -> None:
        storage = STORAGES[options.moments]
        masters = [master for masters in decays.values() for master in masters]
        super().__init__(masters, {"exp_avg": storage(False), "exp_avg_sq": storage(True)}, coordinates, host)
        self.decays, self.betas, self.eps = decays, options.betas, options.eps

    def step(self, learning_rate: float, weights: Mapping[Tensor, Weight]) -> None:
        """See `Rule`."""
        for decay, masters in self.decays.items():
            updated = [master for master in masters if weights[master].gradient is not None]
            for master in updated:
                self.steps[master] += 1
            for bucket in self.visit(updated, at_once=None if self.exact else CHUNK):
                if self.exact:
                    self._fused(bucket, learning_rate, decay, weights)
                    continue
                for chunk in bucket:
                    self._stored_step(chunk, learning_rate, decay, weights[chunk.master])

    def _fused(
        self, bucket: Sequence[Chunk], learning_rate: float, decay: float, weights: Mapping[Tensor, Weight]
    ) -> None:
        """Step chunks with fp32 moments, and copy them."""
        values = [chunk.values for chunk in bucket]
        device = values[0].device
        counts = {self.steps[chunk.master] for chunk in bucket}
        steps = {count: torch.full((), float(count), device=device) for count in counts}
        gradients = [chunk.rows_of(_gradient(weights[chunk.master])).to(chunk.values.dtype) for chunk in bucket]
        beta1, beta2 = self.betas
        torch._fused_adamw_(
            values,
            gradients,
            [chunk.moments["exp_avg"][0] for chunk in bucket],
            [chunk.moments["exp_avg_sq"][0] for chunk in bucket],
            [],
            [steps[self.steps[chunk.master]] for chunk in bucket],
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        low = [
            (chunk.rows_of(copy), chunk.values) for chunk in bucket if (copy := weights[chunk.master].copy) is not None
        ]
        if low:
            torch._foreach_copy_([copy for copy, _ in low], [master for _, master in low])

    def _stored_step(self, chunk: Chunk, learning_rate: float, decay: float, weight: Weight) -> None:
        """Step a chunk with moments in low precision, and copy it."""
        step, (beta1, beta2) = self.steps[chunk.master], self.betas
        numbers = AdamWNumbers(
            decay_factor=1 - learning_rate * decay,
            mean_share=1 - beta1,
            second_kept=beta2,
            second_new=1 - beta2,
            rate=learning_rate / (1 - beta1**step),
            bias=math.sqrt(1 - beta2**step),
            eps=self.eps,
        )
        gradient, copy = chunk.rows_of(_gradient(weight)), None if weight.copy is None else chunk.rows_of(weight.copy)
        rows, columns = self.coordinates[chunk.master]
        rows, key = rows[chunk.start : chunk.stop], step_key(step)
        mean, square = chunk.moments["exp_avg"], chunk.moments["exp_avg_sq"]
        if supports(chunk.values, gradient):
            bits = self.storages["exp_avg"].bits
            adamw_(chunk.values, gradient, copy, mean, square, bits, rows, columns, key, numbers)
            return
        _adamw(chunk, gradient, self.storages, random_bits(rows, columns, key), numbers)
        if copy is not None:
            copy.copy_(chunk.values)


def _adamw(
    chunk: Chunk, gradient: Tensor, storages: Mapping[str, Storage], draw: Tensor, numbers: AdamWNumbers
) -> None:
    """Change a chunk `[R, C]` of a master weight and of its moments."""
    (mean_slot, mean_tensors), (square_slot, square_tensors) = chunk.moments.items()
    gradient = gradient.float()
    mean = storages[mean_slot].read(mean_tensors)
    mean = mean + numbers.mean_share * (gradient - mean)
    square = numbers.second_kept * storages[square_slot].read(square_tensors) + numbers.second_new * gradient.square()
    update = numbers.rate * mean / (square.sqrt() / numbers.bias + numbers.eps)
    chunk.values.copy_(chunk.values * numbers.decay_factor - update)
    storages[mean_slot].write(mean_tensors, mean, draw & 0xFFFF)
    storages[square_slot].write(square_tensors, square, draw >> 16)


def _gradient(weight: Weight) -> Tensor:
    assert weight.gradient is not None
    return weight.gradient
