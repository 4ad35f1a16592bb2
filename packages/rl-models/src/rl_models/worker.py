"""What `Actor` and `Critic` share: micro-batches in, per-token results or one optimizer step out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ckpt.agree import agree
from megatron_utils.pipeline_parallel import split_micro_batches
from parallel_layers import PackedSequence, ParallelDims, clip_grad_norm_
from parallel_layers.embedding import check_token_ids
from rl_models.aggregation import token_weights
from rl_models.backends import Engine, EngineOptions, Role, load_engine
from rl_models.backends.fsdp import sync_gradients
from rl_models.batch import Batch
from rl_models.grid import Grid, checkpoint_folder
from rl_models.losses import LossTerms


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and gradient clipping.

    Attributes:
        learning_rate, betas, eps: AdamW's.
        weight_decay: of matrices; vectors (norms, biases) are not decayed.
        max_grad_norm: the gradient of the whole model is scaled down to this norm; infinity: never.
    """

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def build(self, module: nn.Module) -> torch.optim.AdamW:
        """The optimizer of a module's parameters."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], self.learning_rate, self.betas, self.eps)


def shift_to_own_token(per_token: Tensor, batch: Batch) -> Tensor:
    """From "after token t" to "of token t": `result[t] = per_token[t - 1]`, 0 for each sequence's first token.

    A model says at each token something of the next one. Args: `[T]` or longer (padding at the end is dropped).
    """
    if not batch.num_tokens:
        return per_token[:0]
    moved = torch.cat([per_token.new_zeros(1), per_token[: batch.num_tokens - 1]])
    return torch.where(batch.first, 0, moved)


class Worker:
    """An engine, its optimizer, and the division of batches; the base of `Actor` and `Critic`.

    Every data-parallel rank passes its own part of a batch; the ranks of one tensor-parallel group pass the same.
    """

    role: ClassVar[Role]

    def __init__(self, engine: Engine, options: OptimizerOptions, max_tokens_per_micro_batch: int) -> None:
        self.engine = engine
        self.options = options
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.optimizer = options.build(engine.module)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "parallel",
        dims: ParallelDims | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool | None = None,
        optimizer: OptimizerOptions | None = None,
        max_tokens_per_micro_batch: int = 16384,
    ) -> Self:
        """Load a Hugging Face checkpoint; each rank reads only what it will hold.

        Args:
            path: a folder with `config.json` and safetensors files.
            backend: one of `rl_models.backends.BACKENDS`.
            dims: the sizes of the grid; default one rank.
            device: default this process's CUDA device where there is one, else the CPU.
            dtype: of the parameters; default as stored.
            mesh: a mesh from `dims.build_mesh(...)`, when the grid is on some of the ranks; default all of them.
            sequence_parallel: default where tp > 1.
            optimizer: default `OptimizerOptions()`.
            max_tokens_per_micro_batch: the most tokens that one forward pass takes.

        Raises:
            ValueError: an unknown backend or architecture, sizes that do not divide, or a broken checkpoint; on every
                rank alike.
        """
        grid = Grid.build(dims or ParallelDims(), device=device, mesh=mesh)
        options = EngineOptions(dtype=dtype, sequence_parallel=sequence_parallel)
        folder = agree(lambda: checkpoint_folder(path), grid.everyone)
        engine = load_engine(backend, folder, cls.role, grid, options)
        return cls(engine, optimizer or OptimizerOptions(), max_tokens_per_micro_batch)

    @property
    def grid(self) -> Grid:
        """Where the model stands."""
        return self.engine.grid

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.engine.grid.device

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint with the config and tokenizer files of the one that was loaded.

        Every rank calls it. The folder appears in one step when it is complete; what was there is kept until then.
        """
        self.engine.save(path)

    def micro_batches(self, batch: Batch) -> list[list[int]]:
        """The sequences of each micro-batch: at most `max_tokens_per_micro_batch` tokens, equally many on all dp ranks.

        Raises:
            ValueError: a sequence is longer than the budget.
        """
        return split_micro_batches(batch.lengths, self.max_tokens_per_micro_batch, group=self.grid.group("dp"))

    def predict(self, batch: Batch, model: Callable[[PackedSequence], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run the model over the micro-batches, without gradients; results `[T]` in the batch's order.

        `model` returns tensors "after each token"; they come back aligned with their own token.
        """
        batch = self._own(batch)
        results: tuple[Tensor, ...] | None = None
        with torch.no_grad():
            for indices in self.micro_batches(batch):
                part = self._part(batch, indices)
                outputs = model(self._pack(part))
                if results is None:
                    results = tuple(torch.zeros(batch.num_tokens, device=self.device) for _ in outputs)
                if indices:
                    where = batch.positions(indices)
                    for result, output in zip(results, outputs, strict=True):
                        result[where] = shift_to_own_token(output, part)
        if results is None:
            raise ValueError("the batch has no sequences, on any rank")
        return results

    def step(
        self,
        batch: Batch,
        model: Callable[[PackedSequence], tuple[Tensor, ...]],
        loss: Callable[[Batch, tuple[Tensor, ...]], LossTerms],
        aggregation: str,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch: gradients add up over micro-batches and data-parallel ranks.

        The gradient is that of  sum_t w_t loss_t  over all tokens of all ranks, w being `token_weights`; so it does not
        depend on how the batch was divided.

        Raises:
            ValueError: the batch has nothing to learn from, or the loss is not one number per token.
            FloatingPointError: the gradient is not finite; the parameters have not been changed.
        """
        metrics = self._backward(self._own(batch), model, loss, aggregation)
        norm = self._clip()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {norm} (metrics: {metrics}); no step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**metrics, "grad_norm": norm}

    def _backward(
        self,
        batch: Batch,
        model: Callable[[PackedSequence], tuple[Tensor, ...]],
        loss: Callable[[Batch, tuple[Tensor, ...]], LossTerms],
        aggregation: str,
    ) -> dict[str, float]:
        batch = batch.with_fields(_weight=token_weights(batch, aggregation, self.grid.group("dp")))
        sums: dict[str, Tensor] = {}
        micro_batches = self.micro_batches(batch)
        for number, indices in enumerate(micro_batches):
            sync_gradients(self.engine.module, last=number == len(micro_batches) - 1)
            part = self._part(batch, indices)
            outputs = model(self._pack(part))
            # What is outside the mask is a constant: whatever a loss does there, no gradient can come of it.
            own = tuple(torch.where(part.mask, shift_to_own_token(output, part), 0) for output in outputs)
            terms = loss(part, own)
            if terms.loss.shape != part.tokens.shape:
                raise ValueError(f"the loss must be one number per token, [{part.num_tokens}], got {terms.loss.shape}")
            total = _weighted_sum(terms.loss, part)
            total.backward()
            for name, value in {"loss": terms.loss, **terms.metrics}.items():
                sums[name] = sums.get(name, 0) + _weighted_sum(value.detach(), part)
        return self._reduce(sums)

    def _own(self, batch: Batch) -> Batch:
        """The batch on this rank's device; its ids are checked before, where that does not stall the device."""
        check_token_ids(batch.tokens, self.engine.vocab_size)
        return batch.to(self.device)

    def _part(self, batch: Batch, indices: list[int]) -> Batch:
        """The sequences of a micro-batch. An empty one is one token outside the mask: the ranks must run in step."""
        if indices:
            return batch.select(indices)
        zero = {name: torch.zeros(1, dtype=tensor.dtype) for name, tensor in batch.fields.items()}
        return Batch(torch.zeros(1, dtype=torch.int64), (1,), torch.zeros(1, dtype=torch.bool), zero).to(self.device)

    def _pack(self, part: Batch) -> PackedSequence:
        return part.packed(multiple_of=self.engine.tokens_multiple_of)

    def _reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum over dp, all numbers in one all-reduce."""
        values = torch.stack(list(sums.values())).double()
        if (group := self.grid.group("dp")) is not None:
            dist.all_reduce(values, group=group)
        return dict(zip(sums, values.tolist(), strict=True))

    def _clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`; returns the norm of the whole model's gradient before."""
        groups = [self.grid.group("tp")]
        return float(clip_grad_norm_(self.engine.module, self.options.max_grad_norm, groups=groups))


def _weighted_sum(per_token: Tensor, part: Batch) -> Tensor:
    weight = part["_weight"]
    return torch.where(weight > 0, weight * per_token, 0).sum()
