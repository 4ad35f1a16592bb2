"""`MegatronEngine`: a GPTModel of Megatron-Core as an actor or a critic calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import ckpt
from megatron_utils import MegatronGrid
from megatron_utils.gpt import PackedGPTModel
from megatron_utils.pipeline_parallel import run_schedule
from megatron_utils.router_replay import complete_recordings, moe_layers
from parallel_layers import LogProbs, next_token_labels
from rl_models.engines.decoding import CacheOptions, Decoding
from rl_models.engines.engine import Engine, Loss, MicroBatch, Outputs, Shards
from rl_models.engines.megatron.chunks import stored_tensors
from rl_models.engines.megatron.decoding import decoding
from rl_models.engines.megatron.model import MegatronModel
from rl_models.engines.megatron.optimizer import MegatronOptimizer
from rl_models.engines.optimizer import OptimizerOptions
from rl_models.engines.options import MegatronOptions
from rl_models.grid import Grid


class MegatronEngine(Engine):
    """A GPTModel divided over tp, pp (with virtual stages), cp and ep, and whole on every data-parallel rank.

    Attributes:
        model: This rank's pipeline chunks, in Megatron's global state.
        layout, places: The model's layout, and a place for each chunk.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        enter: Callable[[], AbstractContextManager[MegatronGrid]],
        source: str,
        options: MegatronOptions,
    ) -> None:
        self.model = MegatronModel(chunks, grid, enter, options)
        self.module, self.chunks = self.model.module, self.model.chunks
        self.layout, self.places, self.grid, self.source = layout, list(places), grid, source
        self.vocab_size = chunks[0].true_vocab_size
        self.tokens_multiple_of = chunks[0].tokens_multiple_of
        self.micro_batches_multiple_of = grid.dims.pp if len(chunks) > 1 else 1
        self.routed_layers = moe_layers(chunks[0].config)
        self.num_experts = int(chunks[0].config.num_moe_experts or 0)
        self._scale_loss: Callable[[Tensor], Tensor] | None = None

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch."""
        with self.model.entered() as megatron, torch.no_grad():
            outputs = self._run(self.chunks, micro_batches, megatron)
        return [_outputs(output) for output in outputs]

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses; with a divided optimizer each rank has the gradient of its own part."""

        def total(output: Any, number: int) -> Tensor:
            # Megatron averages over the data-parallel ranks; the gradient here is their sum.
            return loss(micro_batches[number], _outputs(output)) * self.grid.dims.dp

        with self.model.entered() as megatron:
            chunks = self.model.with_gradients(megatron)
            self._run(chunks, micro_batches, megatron, loss=total, grad_scale=self._scale_loss, broadcast=False)

    def _run(
        self, chunks: Sequence[Any], micro_batches: Sequence[MicroBatch], megatron: MegatronGrid, **options: Any
    ) -> Sequence[Any]:
        """Run Megatron's schedule; return the last stage's results."""
        packs = [micro_batch.packed for micro_batch in micro_batches]
        replays = [micro_batch.replay for micro_batch in micro_batches if micro_batch.replay is not None]
        if self.layout.role == "causal_lm":
            # All micro-batches of a call have one temperature.
            options |= {"labels": [next_token_labels(packed) for packed in packs]}
            options |= {"temperature": micro_batches[0].temperature}
        outputs = run_schedule(chunks, packs, megatron, routing=replays or None, **options)
        if replays and replays[0].recording:
            complete_recordings(replays, packs, self.chunks[0].config, megatron)
        return outputs or ()

    def build_optimizer(self, options: OptimizerOptions) -> MegatronOptimizer:
        """Return Megatron's AdamW; from now on its loss scale, if any, multiplies gradients."""
        optimizer = MegatronOptimizer(self.model, options)
        self._scale_loss = None if optimizer.loss_scale is None else optimizer.inner.scale_loss
        return optimizer

    def drop_gradients(self) -> None:
        """Drop the gradients, and give up their memory until the next `forward_backward`."""
        self.model.drop_gradients()

    def shards(self) -> Shards:
        """Return the parameters of this rank, and the routers' biases."""
        pairs = zip(self.chunks, self.places, strict=True)
        return Shards(self.layout, [(place, stored_tensors(chunk, place)) for chunk, place in pairs])

    def decoding(self, options: CacheOptions) -> AbstractContextManager[Decoding]:
        """See `Engine`."""
        return decoding(
            self.model,
            options,
            vocab_size=self.vocab_size,
            tokens_multiple_of=self.tokens_multiple_of,
            micro_batches_multiple_of=self.micro_batches_multiple_of,
        )


def _outputs(output: LogProbs | Tensor) -> Outputs:
    if isinstance(output, Tensor):
        return (output,)
    assert output.entropy is not None
    return output.log_probs, output.entropy
