"""`backend="transformers"`: the Hugging Face model itself, patched by hf-patches for packed batches.

This backend is the reference of the native backend. It runs all families of hf-patches, also those that see images, and
every other text model for which hf-patches proves at the start that the patched model computes the same. The cp ranks
share the tokens (Ulysses) and the images of every batch, all dp x cp ranks the parameters (FSDP2). A vision tower's
parameters are gathered with those of the root. Each rank reads and writes its own rows alone, unless transformers
computes a family's tensors in a way that `slices` does not know.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

import ckpt
from ckpt import Block, agree
from ckpt.files import FolderWriter, is_finite, non_finite, room_for
from ckpt.layout import HEADS, classifies_sequences, load_config, quantization_of
from ckpt.transfer import copy_companions, load_blocks
from hf_patches import FAMILIES, Patch, decoder_layers, patch
from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from parallel_layers.model import LoraOptions
from parallel_models import (
    CacheOptions,
    Decoding,
    Engine,
    EngineOptions,
    Grid,
    MicroBatch,
    OptimizerOptions,
    Outputs,
    Role,
    Shards,
)
from parallel_models.engine import OUTPUTS, Loss, prediction_layers, require_base, share_base_, stored_dtype
from parallel_models.optimizers import ShardOptimizer
from parallel_models.training import (
    backward_each,
    drop_gradients,
    forward_each,
    full_tensors,
    gathered,
    release,
    shard_over_dp,
    shared_mask,
    shared_pack,
    whole_outputs,
)
from rl_models.backends.images import Images
from rl_models.backends.transformers.adapters import (
    PeftLayout,
    adapter_tensors,
    add,
    base_tensors,
    dropouts,
    reset,
    without_adapters,
)
from rl_models.backends.transformers.hub import (
    load_model,
    own_memory,
    save_model,
    with_score,
)
from rl_models.backends.transformers.hub_layout import HubLayout
from rl_models.backends.transformers.slices import Files, allocate, fill_randomly, find_files, model_without_memory
from rl_models.batch.visual import Visual

_SCORE = r"score\.(weight|bias)"


def _kind(path: str, role: Role) -> tuple[Any, dict[str, Any]]:
    """Return the transformers class of a role, and the options of `load_model`; a value head may be new.

    A value model of text is one for token classification, without the head of a causal language model. transformers has
    no such class for models that see images: there the language model keeps its head, beside the value head.
    """
    sees = FAMILIES.get(load_config(path).get("model_type", "")) is not None
    language_model: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if role == "causal_lm":
        return language_model, {"may_have": _SCORE}
    if role == "value" and not sees:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if type(config) not in AutoModelForTokenClassification._model_mapping:
            raise ValueError(
                f"backend='transformers' has no critic of model_type={config.model_type!r}: transformers has no class "
                "for token classification of this family; use backend='parallel'"
            )
        options = {"num_labels": 1, "may_lack": _SCORE, "may_have": r"lm_head\.weight"}
        return AutoModelForTokenClassification, options
    return with_score(language_model, path), {"may_lack": _SCORE}


class TransformersEngine(Engine):
    """A patched transformers model, its tokens divided over cp, its parameters sharded over dp x cp by FSDP2.

    `files` says where the model's tensors lie in the files; None: transformers converts them in a way that blocks
    cannot express.
    """

    images: Images | None

    def __init__(
        self,
        model: PreTrainedModel,
        patched: Patch,
        role: Role,
        grid: Grid,
        source: str,
        files: Files | None,
        adapters: PeftLayout | None = None,
    ) -> None:
        self.module: nn.Module = model
        self.adapter_layout = adapters
        self.model, self.patch, self.role, self.grid, self.source = model, patched, role, grid, source
        self.files = files
        self.images = None if patched.visual is None else Images(model.config, patched.visual)
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
        shared, mask = None, micro_batch.next_mask
        given = self._inputs(micro_batch.packed, micro_batch.visual) | {"router_replay": micro_batch.replay}
        if micro_batch.prompts:
            shared, mask = shared_pack(micro_batch.packed, micro_batch.prompts), shared_mask(micro_batch)
            given = {"packed": shared}
        if self.role != "value":
            given |= {"temperature": micro_batch.temperature, "entropy": True, "within": mask}
        output = self.model(**given)
        outputs = tuple(getattr(output, name) for name in OUTPUTS[self.role])
        return outputs if shared is None else whole_outputs(shared, outputs, micro_batch.prompts)

    def drop_gradients(self) -> None:
        """Drop the gradients."""
        drop_gradients(self.model)

    def build_optimizer(self, options: OptimizerOptions) -> ShardOptimizer:
        """Return an optimizer of this rank's shards."""
        shards = self.adapters() or self.shards()
        return ShardOptimizer(self.model, options, shards=shards, everyone=self.grid.everyone)

    def shards(self) -> Shards:
        """Return the parameters of this rank without adapters, and the buffers that a checkpoint has."""
        return self._shards(base_tensors(self.model), {} if self.files is None else self.files.blocks)

    def stored(self) -> Shards:
        """See `Engine`; matrices that the files hold transposed are transposed views.

        Raises:
            ValueError: transformers converts tensors of this family in a way that blocks cannot express.
        """
        if self.files is None:
            raise ValueError(
                f"backend='transformers' cannot stream the weights of {self.source}: transformers converts tensors of "
                "this family, so that a file's tensor is no block of the model's; call save_pretrained and let the "
                "engine load the folder"
            )
        if not (transposed := self.files.transposed):
            return self.shards()
        tensors, blocks = base_tensors(self.model), dict(self.files.blocks)
        for name in transposed:
            tensors[name] = tensors[name].detach().transpose(-1, -2)
            blocks[name] = Block.whole(blocks[name].names[0], tuple(tensors[name].shape))
        return self._shards(tensors, blocks)

    def _shards(self, tensors: Mapping[str, Tensor], found: Mapping[str, Block]) -> Shards:
        """Return tensors of the model; those that are not `found` in files have the names that transformers gives."""
        blocks = {name: Block.whole(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        config = json.loads(self.model.config.to_json_string())
        # A model that sees images keeps its class, also with a value head.
        role = self.role if self.patch.vision is None else "causal_lm"
        layout = HubLayout(config, role, _class_prefix(self.model), {**blocks, **found})
        return Shards(layout, [(ckpt.Place(), tensors)])

    def adapters(self) -> Shards | None:
        """See `Engine`."""
        if (layout := self.adapter_layout) is None:
            return None
        return Shards(layout, [(ckpt.Place(), adapter_tensors(self.model, layout))])

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `Engine`."""
        return without_adapters(self.model)

    def adapter_dropouts(self) -> list[nn.Module]:
        """See `Engine`."""
        return dropouts(self.model)

    @contextmanager
    def decoding(self, options: CacheOptions) -> Iterator[Decoding]:
        """See `Engine`."""

        sections = self.patch.vision is not None and self.patch.vision.multi_section

        def forward(
            packed: PackedSequence, caches: Sequence[SequenceCache], *, logits: bool, visual: Visual = ()
        ) -> Tensor:
            given = self._inputs(packed, visual)
            if sections and not visual:
                given["position_ids"] = packed.position_ids.expand(4, -1)
            result: Tensor = self.model(**given, cache=caches[0]).logits
            return result

        with gathered(self.model), torch.no_grad():
            yield Decoding(options.build([self.patch.new_cache], self.grid), forward, options.exact)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Let each rank write its part; `save_pretrained` on one rank writes a model that is no blocks of its files."""
        if self.files is not None or self.adapter_layout is not None:
            return super().save(path)
        tensors = full_tensors(self.model)
        group = self.grid.everyone

        def write() -> None:
            if group is not None and group.rank() != 0:
                return
            if broken := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
                raise ValueError(f"{non_finite(broken)}, so nothing is saved; go back to the last checkpoint")
            needed = sum(tensor.nbytes for tensor in tensors.values())
            with room_for(needed, path), FolderWriter(Path(path)) as folder:
                save_model(self.model, folder, tensors)
                if self.role == "value" and self.model.score.bias is None:
                    _name_sequence_classifier(folder / "config.json")
                for file in folder.iterdir():
                    with open(file, "rb") as written:
                        os.fsync(written.fileno())
                copy_companions(self.companions, folder)  # syncs what it copies

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


def load(
    path: str, role: Role, grid: Grid, options: EngineOptions, base: TransformersEngine | None = None
) -> TransformersEngine:
    """Load a checkpoint with transformers and patch it; refusals are the same on every rank.

    With `base` only the adapters and a value head are new, and the rest is that engine's.
    """
    if options.sequence_parallel:
        raise ValueError(
            "backend='transformers' does not offer sequence_parallel=True; leave it out, and divide long sequences "
            "with dims=ParallelDims(cp=...)"
        )

    def build() -> tuple[PreTrainedModel, Patch, Files | None, list[str], bool, tuple[LoraOptions, PeftLayout] | None]:
        if (quantization := quantization_of(load_config(path))) is not None:
            raise ValueError(
                f"{path} holds weights in {quantization['quant_method']}, which backend='transformers' does not train; "
                f"`ckpt merge {path} OUT` makes plain weights, or use backend='parallel'"
            )
        try:
            AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of many kinds, for a field of a wrong type or an unknown family
            raise ValueError(f"transformers does not read {path}/config.json: {' '.join(str(error).split())}") from None
        # Stay in evaluation mode: with dropout the policy that learns would differ from the policy that acted.
        dtype = options.dtype or stored_dtype(path)
        auto_class, load_options = _kind(path, role)
        predicting = [rf"(.*\.)?{re.escape(each)}.*" for each in prediction_layers(path)]
        left_out = [load_options.get("may_have", "$^"), *predicting]
        load_options = {**load_options, "may_have": "|".join(left_out)}
        unloaded = model_without_memory(auto_class, path, dtype, grid.device, **load_options)
        files: Files | None = None
        if unloaded is None and base is not None:
            raise ValueError(
                f"{path}: transformers converts tensors of this family, and such a model shares no base; use "
                "backend='parallel', or load a second model of its own"
            )
        if unloaded is None:
            warnings.warn(
                f"{path}: transformers converts tensors of this family, so every rank reads the whole model",
                stacklevel=2,
            )
            model, lacked = load_model(auto_class, path, dtype=dtype, **load_options)
            files = find_files(model, path, load_options.get("may_lack", "$^"), load_options["may_have"])
        else:
            model, files, lacked = unloaded
        if dtype == torch.float64:
            model.set_experts_implementation("eager")  # torch's grouped GEMM does not take fp64
        if role == "value" and classifies_sequences({"architectures": model.config.architectures}):
            # A reward model: its head has no bias, and is saved without one again.
            model.score.bias = None
            lacked = [name for name in lacked if name != "score.bias"]
        for module in model.modules():
            # FSDP2 needs one dtype in a module. Modules whose parameters are all in fp32 (ERNIE 4.5's routers) keep it.
            if len({parameter.dtype for parameter in module.parameters() if parameter.requires_grad}) > 1:
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad:
                        parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                # Packed batches have no padding: the pad token trains like any other token.
                module.padding_idx = None
        if role != "value" and getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(
                f"{path}: the language-model head has a bias, which no backend computes; use a checkpoint without one "
                "(ERNIE 4.5: use_bias=false), or load it as a Critic"
            )
        patched = patch(
            model,
            family="auto",
            value_head=role != "causal_lm",
            fused_head=role != "value",
            sequence_parallel_group=grid.group("cp"),
            router_replay=None,
            keep_probabilities=False if role == "value" else options.kept_probabilities,
            recompute=options.recompute,
            tiled_mlp=options.tiled_mlp,
            offload_activations=options.offload_activations,
            probe=False,
        )
        lora = None if options.lora is None else add(model, options.lora, path, role)
        if base is not None:
            require_base(model, base.model)
        return model, patched, files, lacked, unloaded is None, lora

    model, patched, files, lacked, whole, lora = agree(build, grid.everyone)
    if patched.proof is not None and (grid.everyone is None or grid.everyone.rank() == 0):
        warnings.warn(
            f"{path}: {type(model).__name__} is not in hf-patches' table of families; accepted by this {patched.proof}",
            stacklevel=2,
        )
    if grid.everyone is not None:
        # The model is on the CPU or without memory: FSDP2 moves one block after another to the device.
        shard_over_dp(model, decoder_layers(patched.backbone), grid)
    if base is not None:
        share_base_(model, base.model)
    if not whole:
        assert files is not None
        allocate(model, grid.device)
        fill_randomly(model, lacked)
        read = {name: block for name, block in files.blocks.items() if base is None or name in HEADS}
        load_blocks(files.checkpoint, read, base_tensors(model), group=grid.everyone)
    elif grid.everyone is None:
        model.to(grid.device)
        own_memory(model)
    if lora is not None:
        reset(model, *lora)
    patched.probe()
    release(model)  # all is sharded, as the optimizer must find it
    with torch.no_grad():
        # A new value head starts as zeros, as on the native backend; the probe needs other weights.
        for name in lacked:
            model.get_parameter(name).zero_()
    if lora is not None and not isinstance(options.lora, LoraOptions):
        into = adapter_tensors(model, lora[1])  # a value head among them
        ckpt.load_adapter(str(options.lora), lora[1], into=into, group=grid.everyone)
    engine = TransformersEngine(model, patched, role, grid, path, files, None if lora is None else lora[1])
    engine.shares_prefixes = options.share_prefixes
    return engine
