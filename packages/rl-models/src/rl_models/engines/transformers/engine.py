"""`backend="transformers"`: the Hugging Face model itself, patched by hf-patches for packed batches.

This backend is the reference of the native backend, and runs all families of hf-patches. The cp ranks share the tokens
of every batch (Ulysses), all dp x cp ranks the parameters (FSDP2). Each rank reads and writes its own rows alone,
unless transformers converts the family's tensors (`slices`).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

import ckpt
from ckpt import Block, FolderWriter, agree, copy_companions
from ckpt.layout.config import classifies_sequences, load_config
from ckpt.layout.quantization import quantization_of
from hf_patches import Patch, patch
from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from rl_models.engines.checkpoint import stored_dtype
from rl_models.engines.decoding import CacheOptions, Decoding
from rl_models.engines.engine import Engine, Loss, MicroBatch, Outputs, Role, Shards
from rl_models.engines.fsdp import (
    backward_each,
    drop_gradients,
    forward_each,
    full_tensors,
    gathered,
    release,
    shard_over_dp,
)
from rl_models.engines.optimizer import AdamW, OptimizerOptions
from rl_models.engines.options import EngineOptions
from rl_models.engines.transformers.hub import load_model, own_memory, save_model, stacked_experts, stored_tensors
from rl_models.engines.transformers.hub_layout import HubLayout, named_block
from rl_models.engines.transformers.slices import allocate, fill_randomly, model_without_memory
from rl_models.grid import Grid

# The transformers class of each role, and the options of `load_model`.
KINDS: dict[Role, tuple[Any, dict[str, Any]]] = {
    "causal_lm": (AutoModelForCausalLM, {}),
    # The checkpoint of a causal language model is allowed, too: its head is dropped, the value head is new.
    "value": (
        AutoModelForTokenClassification,
        {"num_labels": 1, "may_lack": r"score\.(weight|bias)", "may_have": r"lm_head\.weight"},
    ),
}


class TransformersEngine(Engine):
    """A patched transformers model, its tokens divided over cp, its parameters sharded over dp x cp by FSDP2.

    `blocks` are the model's tensors as parts of those in the files; None: the model was loaded whole.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        patched: Patch,
        role: Role,
        grid: Grid,
        source: str,
        blocks: Mapping[str, Block] | None,
    ) -> None:
        self.module: nn.Module = model
        self.model, self.patch, self.role, self.grid, self.source = model, patched, role, grid, source
        self.blocks = blocks
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.routed_layers = list(patched.routers)
        self.num_experts = max((len(router.get_parameter("weight")) for router in patched.routers.values()), default=0)

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch."""
        return forward_each(self._outputs, self.model, micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses."""
        backward_each(self._outputs, self.model, micro_batches, loss)

    def _outputs(self, micro_batch: MicroBatch) -> Outputs:
        given: dict[str, Any] = {"packed": micro_batch.packed, "router_replay": micro_batch.replay}
        if self.role == "value":
            return (self.model(**given).values,)
        given |= {"temperature": micro_batch.temperature, "within": micro_batch.next_mask}
        output = self.model(**given, entropy=True)
        return output.log_probs, output.entropy

    def drop_gradients(self) -> None:
        """Drop the gradients."""
        drop_gradients(self.model)

    def build_optimizer(self, options: OptimizerOptions) -> AdamW:
        """Return AdamW on this rank's shards."""
        return AdamW(self.model, options)

    def shards(self) -> Shards:
        """Return the parameters of this rank, and the buffers that a checkpoint has."""
        tensors = stored_tensors(self.model)
        stacks = {} if self.blocks is not None else stacked_experts(self.model)
        blocks = {name: named_block(name, tuple(tensor.shape), stacks) for name, tensor in tensors.items()}
        config = json.loads(self.model.config.to_json_string())
        layout = HubLayout(config, self.role, _class_prefix(self.model), {**blocks, **(self.blocks or {})})
        return Shards(layout, [(ckpt.Place(), tensors)])

    @contextmanager
    def decoding(self, options: CacheOptions) -> Iterator[Decoding]:
        """See `Engine`."""

        def forward(packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool) -> Tensor:
            result: Tensor = self.model(packed=packed, cache=caches[0]).logits
            return result

        with gathered(self.model), torch.no_grad():
            yield Decoding(options.build([self.patch.new_cache], self.grid), forward, options.exact)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Let each rank write its part; a model that was loaded whole is written by `save_pretrained` on one rank."""
        if self.blocks is not None:
            return super().save(path)
        tensors = full_tensors(self.model)
        group = self.grid.everyone

        def write() -> None:
            if group is not None and group.rank() != 0:
                return
            with FolderWriter(Path(path)) as folder:
                save_model(self.model, folder, tensors)
                if self.role == "value" and self.model.score.bias is None:
                    _name_sequence_classifier(folder / "config.json")
                for file in folder.iterdir():
                    with open(file, "rb") as written:
                        os.fsync(written.fileno())
                copy_companions(self.source, folder)  # syncs what it copies

        agree(write, group)


def _class_prefix(model: PreTrainedModel) -> str:
    """Return the name of a model's class without ForCausalLM, ForTokenClassification or ForConditionalGeneration."""
    return type(model).__name__.removeprefix("FSDP").rpartition("For")[0]


def _name_sequence_classifier(config: Path) -> None:
    """Name the class of a saved reward model: transformers has written the class that computes here."""
    values = json.loads(config.read_text(encoding="utf-8"))
    values["architectures"] = [
        name.replace("ForTokenClassification", "ForSequenceClassification") for name in values["architectures"]
    ]
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load(path: str, role: Role, grid: Grid, options: EngineOptions) -> TransformersEngine:
    """Load a checkpoint with transformers and patch it; refusals are the same on every rank."""
    if options.sequence_parallel:
        raise ValueError(
            "backend='transformers' does not offer sequence_parallel=True; leave it out, and divide long sequences "
            "with dims=ParallelDims(cp=...)"
        )

    def build() -> tuple[PreTrainedModel, Patch, dict[str, Block] | None, list[str]]:
        if (quantization := quantization_of(load_config(path))) is not None:
            raise ValueError(
                f"{path} holds weights in {quantization['quant_method']}, which backend='transformers' does not train; "
                f"`ckpt merge {path} OUT` makes plain weights, or use backend='parallel'"
            )
        auto_class, load_options = KINDS[role]
        # Stay in evaluation mode: with dropout the policy that learns would differ from the policy that acted.
        dtype = options.dtype or stored_dtype(path)
        unloaded = model_without_memory(auto_class, path, dtype, grid.device, **load_options)
        blocks: dict[str, Block] | None = None
        if unloaded is None:
            warnings.warn(
                f"{path}: transformers converts tensors of this family, so every rank reads the whole model",
                stacklevel=2,
            )
            model, lacked = load_model(auto_class, path, dtype=dtype, **load_options)
        else:
            model, blocks, lacked = unloaded
        if role == "value" and classifies_sequences({"architectures": model.config.architectures}):
            # A reward model: its head has no bias, and is saved without one again.
            model.score.bias = None
            lacked = [name for name in lacked if name != "score.bias"]
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                # Packed batches have no padding: the pad token trains like any other token.
                module.padding_idx = None
        patched = patch(
            model,
            value_head=role == "value",
            sequence_parallel_group=grid.group("cp"),
            router_replay=None,
            keep_probabilities=options.keep_probabilities,
            recompute=options.recompute,
            probe=False,
        )
        return model, patched, blocks, lacked

    model, patched, blocks, lacked = agree(build, grid.everyone)
    layers = patched.backbone.layers
    assert isinstance(layers, nn.ModuleList)
    if grid.everyone is not None:
        # The model is on the CPU or without memory: FSDP2 moves one block after another to the device.
        shard_over_dp(model, layers, grid)
    if blocks is not None:
        allocate(model, grid.device)
        fill_randomly(model, lacked)
        ckpt.load_blocks(ckpt.open_checkpoint(path), blocks, stored_tensors(model), group=grid.everyone)
    elif grid.everyone is None:
        model.to(grid.device)
        own_memory(model)
    patched.probe()
    release(model)  # all is sharded, as the optimizer must find it
    with torch.no_grad():
        # A new value head starts as zeros, as on the native backend; the probe needs other weights.
        for name in lacked:
            model.get_parameter(name).zero_()
    return TransformersEngine(model, patched, role, grid, path, blocks)
