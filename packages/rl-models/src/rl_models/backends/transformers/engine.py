"""`backend="transformers"`: the Hugging Face model itself, patched by hf-patches for packed batches.

This backend is the reference of the native backend. It runs all families of hf-patches, also those that see images, and
every other text model for which hf-patches proves at the start that the patched model computes the same. The cp ranks
share the tokens (Ulysses) and images of every batch, the tp ranks each layer by transformers' own plans, and all dp x
cp ranks the parameters (FSDP2), a vision tower's with the root's. Each rank reads and writes its own parts alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import ckpt
from ckpt import Block
from ckpt.layout import HubLayout
from hf_patches import Patch
from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from parallel_models import CacheOptions, Decoding, Engine, Grid, MicroBatch, OptimizerOptions, Outputs, Role, Shards
from parallel_models.engine import OUTPUTS, Loss
from parallel_models.optimizers import ShardOptimizer
from parallel_models.training import (
    backward_each,
    drop_gradients,
    forward_each,
    gathered,
    shared_mask,
    shared_pack,
    whole_outputs,
)
from rl_models.backends.images import Images
from rl_models.backends.transformers.adapters import adapter_tensors, base_tensors
from rl_models.backends.transformers.slices import Files
from rl_models.batch.visual import Visual


class TransformersEngine(Engine):
    """A patched transformers model: tokens over cp, layers over tp, parameters over dp x cp of a replica by FSDP2.

    `files` says where the model's tensors lie in the files.
    """

    images: Images | None

    def __init__(
        self,
        model: PreTrainedModel,
        patched: Patch,
        role: Role,
        grid: Grid,
        files: Files,
        adapters: ckpt.AdapterLayout | None = None,
    ) -> None:
        self.module: nn.Module = model
        self.adapter_layout = adapters
        self.model, self.patch, self.role, self.grid = model, patched, role, grid
        self.files = files
        self.images = None if patched.visual is None else Images(model.config, patched.visual)
        self.num_labels = 1 if role == "causal_lm" else model.score.out_features
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.routed_layers = list(patched.routers)
        self.num_experts = max((len(router.get_parameter("weight")) for router in patched.routers.values()), default=0)

    def _inputs(self, packed: PackedSequence, visual: Visual) -> dict[str, Any]:
        """Return the batch and its images as arguments of the model."""
        return {"packed": packed} | ({} if self.images is None else self.images.inputs(packed, visual))

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch."""
        return forward_each(self._outputs, self.model, micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the losses."""
        with self.dropout():
            backward_each(self._outputs, self.model, micro_batches, loss)

    def _outputs(self, micro_batch: MicroBatch) -> Outputs:
        """Return the outputs of one micro-batch; prompts that its sequences share are computed once."""
        shared, mask = None, micro_batch.sampling_mask
        arguments = self._inputs(micro_batch.packed, micro_batch.visual) | {"router_replay": micro_batch.replay}
        if micro_batch.prompts:
            shared, mask = shared_pack(micro_batch.packed, micro_batch.prompts), shared_mask(micro_batch)
            arguments = {"packed": shared}
        if self.role != "value":
            arguments |= {"temperature": micro_batch.temperature, "entropy": True, "sampling_mask": mask}
        output = self.model(**arguments)
        columns = (getattr(output, name) for name in OUTPUTS[self.role])
        outputs = tuple(x for column in columns for x in (column.unbind(1) if column.dim() > 1 else (column,)))
        return outputs if shared is None else whole_outputs(shared, outputs, micro_batch.prompts)

    def drop_gradients(self) -> None:
        """Drop the gradients."""
        drop_gradients(self.model)

    def build_optimizer(self, options: OptimizerOptions) -> ShardOptimizer:
        """Return an optimizer of this rank's shards."""
        shards = self.adapters() or self.shards()
        groups = [self.grid.group("tp"), self.grid.group("replicate")]
        return ShardOptimizer(self.model, options, shards=shards, everyone=self.grid.everyone, groups=groups)

    def shards(self) -> Shards:
        """Return the parameters of this rank without adapters, and the buffers that a checkpoint has."""
        tensors = base_tensors(self.model)
        return Shards(self._layout(tensors), [(ckpt.Place(), tensors)])

    def stored(self) -> Shards:
        """See `Engine`; matrices that the files hold transposed are transposed views."""
        return self._views(self.files.transposed)

    def streamed(self) -> Shards:
        """See `Engine`; matrices of experts have the order of the other backends, also where the files differ."""
        return self._views(self._layout(base_tensors(self.model)).in_other_order)

    def _views(self, transposed: Collection[str]) -> Shards:
        tensors = base_tensors(self.model)
        shards = Shards(self._layout(tensors).exchanged(transposed), [(ckpt.Place(), tensors)], transposed)
        views = {name: shards.exchanged(name, tensor) for name, tensor in tensors.items()}
        return Shards(shards.layout, [(ckpt.Place(), views)])

    def training_shards(self) -> Shards:
        """See `Engine`; matrices of experts have the order of the other backends, also where the files differ."""
        if (adapters := self.adapters()) is not None:
            return adapters
        tensors = base_tensors(self.model)
        layout = self._layout(tensors)
        return Shards(layout.exchanged(layout.in_other_order), [(ckpt.Place(), tensors)], layout.in_other_order)

    def _layout(self, tensors: Mapping[str, Tensor]) -> HubLayout:
        """Return the layout of the model's tensors; tensors that no file has keep their names in transformers."""
        blocks = {name: Block.whole(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        # A model that sees images keeps its class, also with a value head.
        role, config = self.role if self.patch.vision is None else "causal_lm", self.model.config.to_json_string()
        # The class without ForCausalLM, ForTokenClassification or ForConditionalGeneration.
        prefix = type(self.model).__name__.removeprefix("FSDP").rpartition("For")[0]
        return HubLayout(json.loads(config), role, prefix, {**blocks, **self.files.blocks})

    def adapters(self) -> Shards | None:
        """See `Engine`."""
        if (layout := self.adapter_layout) is None:
            return None
        return Shards(layout, [(ckpt.Place(), adapter_tensors(self.model, layout))])

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """See `Engine`."""
        layers = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        # `enable_adapters` would change `requires_grad`, too, which FSDP2 has read already.
        for layer in layers:
            layer.__dict__["_disable_adapters"] = True
        try:
            yield
        finally:
            for layer in layers:
                layer.__dict__["_disable_adapters"] = False

    def adapter_dropouts(self) -> list[nn.Module]:
        """See `Engine`."""
        modules = self.model.named_modules()
        return [x for name, x in modules if name.endswith("lora_dropout.default") and isinstance(x, nn.Dropout)]

    @contextmanager
    def decoding(self, options: CacheOptions) -> Iterator[Decoding]:
        """See `Engine`."""
        options.require_parallel("transformers")
        sections = self.patch.vision is not None and self.patch.vision.multi_section

        def forward(
            packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool, visual: Visual = ()
        ) -> Tensor:
            arguments = self._inputs(packed, visual)
            if sections and not visual:
                arguments["position_ids"] = packed.position_ids.expand(4, -1)
            result: Tensor = self.model(**arguments, cache=caches[0]).logits
            return result

        with gathered(self.model), torch.no_grad():
            yield Decoding(options.build([self.patch.new_cache], self.grid), forward, options.exact)
