"""The live bytes of the real engine, which a dispatch mode counts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from planner_models import SIZES
from torch._library.custom_ops import OPDEFS
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_layers import ModelConfig
from parallel_layers.head import SamplingMask
from rl_models import Batch, LossInputs, losses
from rl_models.calls import Divergence
from rl_train.planner.memory import MemoryOptions


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, inside; less those of `ignored`."""

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self.alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.ignored = {tensor.untyped_storage()._cdata for tensor in ignored}

    def hold(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage._cdata not in self.ignored:
                self.alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith(("parallel_layers::log_probs", "parallel_layers::chunked_gated")):
            with self:  # the tiles inside the head's operators count, too, and the chunks inside those of recurrences
                out = OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        self.hold(*(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)))
        # FSDP2 gives memory up by resizing storages, so each is asked again.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.alive.values())))
        return out


def maximise(inputs: LossInputs) -> losses.LossTerms:
    """Log-probabilities, values, or both: every other of a worker's outputs; and a teacher's divergence."""
    taught = inputs["divergence"] if "divergence" in inputs.batch.fields else 0.0
    return losses.LossTerms(taught - sum(list(inputs.outputs.values())[::2]))


def random_batch(tokens: int, length: int = 128) -> Batch:
    """Sequences of one length, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return Batch.from_sequences([torch.randint(1000, (length,), generator=generator) for _ in range(tokens // length)])


def measure(group: ProcessGroup, path: Path, kind: Any, options: MemoryOptions) -> int:
    """The peak of an update; of several micro-batches the second finds all gradients there already."""
    dims = options.dims
    worker = kind.from_pretrained(
        path,
        dims=dims,
        mesh=dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None,
        device="cpu",
        dtype=options.dtype,
        recompute=options.recompute,
        tiled_mlp=options.tiled_mlp,
        keep_probabilities=options.keep_probabilities,
        lora=options.lora,
        base_format=options.base_format,
        optimizer=options.optimizer,
        pipeline=options.pipeline,
        max_tokens_per_micro_batch=options.tokens,
    )
    # The chunks of a recurrence end with each sequence, of which a plan has one.
    length = 512 if ModelConfig.from_hf(path).has_linear_attention else 128
    batch = random_batch(options.received * options.tokens, length)
    if options.mask_width:
        others = (batch.tokens[:, None] + torch.arange(options.mask_width)) % SIZES["vocab_size"]
        batch = replace(batch, sampling_mask=SamplingMask.from_rows(list(others)))
    further, held = {}, []
    if options.teacher_size:
        worker.load_teacher_head(path)
        states = torch.randn(batch.num_tokens, options.teacher_size, dtype=options.dtype)
        batch, further = batch.with_fields(teacher_states=states), {"divergence": Divergence("reverse_kl")}
        held = [states, worker.teacher_head.weight]
    worker.update(batch, maximise, **further)
    with LiveBytes() as live:
        live.hold(*worker.engine.module.parameters(), *worker.optimizer.tensors(), *held)
        worker.update(batch, maximise, **further)
    return live.peak
