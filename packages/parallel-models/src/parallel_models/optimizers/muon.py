"""Muon: momentum whose update is orthogonalised, for the weight matrices of the layers.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the scale 0.2 sqrt(max(n, m)) and the weight decay
of Liu et al. 2025 (arXiv:2502.16982): the update of a matrix then has the size of AdamW's, so that AdamW's learning
rate and weight decay fit. For a gradient G:

    B <- momentum B + (1 - momentum) G;   U = (1 - momentum) G + momentum B
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(n, m)) orthogonalised(U)

`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` computes the same, for whole matrices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt.transfer import WholeMatrices
from parallel_layers.memory import StreamedTensors
from parallel_models.optimizers.interface import OptimizerOptions
from parallel_models.optimizers.kernels import average_, supports
from parallel_models.optimizers.moments import STORAGES
from parallel_models.optimizers.rounding import Coordinates, random_bits, step_key
from parallel_models.optimizers.rules import Chunk, Rule, Weight

# The polynomial of Jordan 2024, which is steepest at 0: 5 steps bring singular values from 0.01 up close to 1.
_COEFFICIENTS, _STEPS = (3.4445, -4.7750, 2.0315), 5
_EPS = 1e-7

# Tensors of numbered layers that are no weight matrices: routers, and a layer's own embedding and head.
_OTHERS = re.compile(r"\.(gate|router|embed_tokens|lm_head|head)\.([\w.]+\.)?weight$|bias$")
_LAYER = re.compile(r"\.\d+\.")


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a canonical tensor is a weight matrix of a numbered layer, or a stack of experts' matrices.

    Embeddings, heads, routers, norms, biases, and matrices of one row or column do not count.
    """
    if len(shape) not in (2, 3) or min(shape) < 2:
        return False
    return _LAYER.search(name) is not None and _OTHERS.search(name) is None


class Muon(Rule):
    """Muon over some master weights of this rank; `masters` has them by parameter.

    The momentum is updated where it lies. Then each Hugging Face matrix is gathered by one rank, in the parameter's
    dtype, orthogonalised there and sent back (`WholeMatrices`).
    """

    def __init__(
        self,
        masters: Mapping[Tensor, Tensor],
        matrices: WholeMatrices,
        options: OptimizerOptions,
        coordinates: Mapping[Tensor, Coordinates],
        host: StreamedTensors | None,
    ) -> None:
        storages = {"momentum_buffer": STORAGES[options.moments](False)}
        super().__init__(masters.values(), storages, coordinates, host)
        self.parameters, self.matrices = {master: parameter for parameter, master in masters.items()}, matrices
        self.momentum, self.weight_decay = options.momentum, options.weight_decay

    def step(self, learning_rate: float, weights: Mapping[Tensor, Weight]) -> None:
        """See `Rule`; a parameter without a gradient has the gradient 0, because other ranks may have one."""
        updates = {}
        for master in self.masters:
            self.steps[master] += 1
            gradient, device = weights[master].gradient, self.coordinates[master].rows.device
            updates[master] = (
                torch.zeros(master.shape, dtype=master.dtype, device=device)
                if gradient is None
                else gradient.to(master.dtype)
            )
        for bucket in self.visit(self.masters):
            for chunk in bucket:
                self._average(chunk, chunk.rows_of(updates[chunk.master]))
        self.matrices.apply_(
            {self.parameters[master]: update for master, update in updates.items()},
            orthogonalised,
            lambda shape: 0.2 * math.sqrt(max(shape)),
        )
        for bucket in self.visit(self.masters, moments=False):
            for chunk in bucket:
                update, copy = chunk.rows_of(updates[chunk.master]), weights[chunk.master].copy
                chunk.values.mul_(1 - learning_rate * self.weight_decay).add_(update, alpha=-learning_rate)
                if copy is not None:
                    chunk.rows_of(copy).copy_(chunk.values)

    def _average(self, chunk: Chunk, gradient: Tensor) -> None:
        """Add a chunk of the gradient to its momentum, and replace the gradient by Nesterov's momentum."""
        rows, columns = self.coordinates[chunk.master]
        rows, key = rows[chunk.start : chunk.stop], step_key(self.steps[chunk.master])
        ((slot, storage),) = self.storages.items()
        moment = chunk.moments[slot]
        if supports(chunk.values, gradient):
            average_(gradient, moment, storage.bits, rows, columns, key, self.momentum)
            return
        momentum = storage.read(moment)  # fp64 for fp64 weights, else fp32
        wide = gradient.to(momentum.dtype)
        buffer = torch.lerp(wide, momentum, self.momentum)
        storage.write(moment, buffer, None if storage.exact else random_bits(rows, columns, key) & 0xFFFF)
        gradient.copy_(torch.lerp(wide, buffer, self.momentum))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return about U V^T for each matrix U S V^T of `[N, n, m]`, in its dtype; this overwrites `matrices`.

    Five steps of Newton-Schulz on the matrix divided by its Frobenius norm; the singular values come to about 0.7 to
    1.2.
    """
    a, b, c = _COEFFICIENTS
    turned = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if turned else matrices
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x.div_(norms.clamp(min=_EPS).to(x.dtype))
    for _ in range(_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if turned else x
