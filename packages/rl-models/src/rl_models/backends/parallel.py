"""`backend="parallel"`: the models of this package over parallel-layers, loaded and saved by ckpt."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import ckpt
from ckpt.agree import agree
from parallel_layers import PackedSequence
from rl_models.backends.accumulate import backward_each, forward_each
from rl_models.backends.engine import EngineOptions, Loss, NextLogits, Outputs, Role
from rl_models.backends.fsdp import full_tensors, gathered, shard_over_dp
from rl_models.config import ModelConfig
from rl_models.grid import Grid
from rl_models.models import CausalLM, ValueModel
from rl_models.optimizer import AdamW, OptimizerOptions

MODELS: dict[Role, type[CausalLM] | type[ValueModel]] = {"causal_lm": CausalLM, "value": ValueModel}


class ParallelEngine:
    """A `CausalLM` or `ValueModel` sharded over tp, and over dp by FSDP2."""

    micro_batches_multiple_of = 1

    def __init__(self, model: CausalLM | ValueModel, layout: ckpt.Layout, grid: Grid, source: str) -> None:
        self.module = self.model = model
        self.layout, self.grid, self.source = layout, grid, source
        self.vocab_size = model.config.vocab_size
        self.tokens_multiple_of = model.tokens_multiple_of

    def forward(self, micro_batches: Sequence[PackedSequence], *, temperature: float = 1.0) -> list[Outputs]:
        """The outputs of every micro-batch, without a graph."""
        return forward_each(partial(self._outputs, temperature), micro_batches)

    def forward_backward(
        self, micro_batches: Sequence[PackedSequence], loss: Loss, *, temperature: float = 1.0
    ) -> None:
        """Add the gradient of the losses."""
        backward_each(partial(self._outputs, temperature), self.model, micro_batches, loss)

    def _outputs(self, temperature: float, packed: PackedSequence) -> Outputs:
        if isinstance(self.model, ValueModel):
            return (self.model.values(packed),)
        result = self.model.log_probs(packed, temperature=temperature)
        assert result.entropy is not None
        return result.log_probs, result.entropy

    def build_optimizer(self, options: OptimizerOptions) -> AdamW:
        """AdamW on this rank's shards."""
        return AdamW(self.model, options, groups=[self.grid.group("tp")])

    @contextmanager
    def decoding(self, num_sequences: int, max_length: int) -> Iterator[NextLogits]:
        """Decode with a KV cache, on every tp rank alike."""
        model = self.model
        assert isinstance(model, CausalLM)
        with gathered(model), torch.no_grad():
            cache = model.new_cache(num_sequences, max_length)
            lengths = [0] * num_sequences

            def next_logits(tokens: Sequence[Tensor]) -> Tensor:
                packed = _continue(tokens, lengths, model.tokens_multiple_of)
                for n, new in enumerate(tokens):
                    lengths[n] += len(new)
                return model.next_logits(packed, cache)

            yield next_logits

    def save(self, path: str | os.PathLike[str]) -> None:
        """Every rank writes its own bytes; config and tokenizer files are carried over from where it was loaded."""
        grid = self.grid
        tensors = full_tensors(self.model)
        ckpt.save_hf(path, tensors, self.layout, _place(grid), group=grid.everyone, copy_from=self.source)


def load(path: str, role: Role, grid: Grid, options: EngineOptions) -> ParallelEngine:
    """Load a checkpoint; each rank reads only its own slices.

    Raises:
        ValueError: the architecture or a config field is not supported, sizes do not divide by tp, or the checkpoint is
            broken; on every rank alike.
    """
    group = grid.group("tp")
    sequence_parallel = group is not None if options.sequence_parallel is None else options.sequence_parallel
    if sequence_parallel and group is None:
        raise ValueError("sequence_parallel=True needs tp > 1; leave it out or set dims=ParallelDims(tp=...)")

    def build() -> tuple[CausalLM | ValueModel, ckpt.Layout]:
        config = ModelConfig.from_hf(path)
        layout = ckpt.layout_for(config.hf, target="parallel", role=role)
        dtype = options.dtype or _stored_dtype(path)
        # On the meta device: nothing is allocated or initialised that the checkpoint then replaces.
        model = MODELS[role](config, group=group, sequence_parallel=sequence_parallel, dtype=dtype, device="meta")
        return model, layout

    model, layout = agree(build, grid.everyone)
    model.to_empty(device=grid.device)
    if isinstance(model, ValueModel):
        # What a causal language model's checkpoint does not have: a critic that starts with the value 0 everywhere.
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
    ckpt.load_hf(path, layout, _place(grid), into=model.state_dict(), group=grid.everyone)
    shard_over_dp(model, model.model.layers.values(), grid, methods=model.entry_points)
    return ParallelEngine(model, layout, grid, path)


def _place(grid: Grid) -> ckpt.Place:
    return ckpt.Place(tp=(grid.rank("tp"), grid.dims.tp))


def _stored_dtype(path: str) -> torch.dtype:
    """The type of most of the checkpoint's tensors."""
    stored = Counter(info.dtype for _, info in ckpt.open_checkpoint(path).tensors.values())
    ((name, _),) = stored.most_common(1)
    return name


def _continue(tokens: Sequence[Tensor], lengths: Sequence[int], multiple_of: int) -> PackedSequence:
    """Pack new tokens of sequences that already have `lengths` tokens: their positions go on from there."""
    packed = PackedSequence.from_sequences(tokens, multiple_of=multiple_of)
    starts = torch.tensor([*lengths, *[0] * (packed.padding > 0)], device=packed.position_ids.device)
    counts = packed.cu_seqlens.diff().long()
    shift = torch.repeat_interleave(starts, counts, output_size=packed.num_tokens)
    return PackedSequence(
        packed.input_ids, packed.position_ids + shift, packed.cu_seqlens, packed.max_seqlen, packed.padding
    )
