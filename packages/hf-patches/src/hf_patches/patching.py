"""`patch`: explicit, reversible changes of one Hugging Face model, and a proof that they took effect."""

import copy
from typing import Any, Literal

from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig, PreTrainedModel

from hf_patches.attention import ATTENTION_NAME, NPU_BACKEND, register_attention
from hf_patches.auto import prove
from hf_patches.backbone import compute_device, find_backbone
from hf_patches.call import CallState
from hf_patches.decoding import require_no_state
from hf_patches.families import vision_of
from hf_patches.families.table import FAMILIES, Vision
from hf_patches.forward import CallHooks
from hf_patches.head import FusedHead, new_score, require_plain_head, require_token_classification
from hf_patches.journal import Journal
from hf_patches.kernels import UnfusedModule, find_kernels
from hf_patches.linear_attention import PackedMixer, find_mixers
from hf_patches.memory import save_memory
from hf_patches.npu import EXPERTS_NAME, can_group, find_swaps, register_experts
from hf_patches.options import PatchOptions
from hf_patches.probe import run_probe
from hf_patches.report import ProbeResult, Proof, Report
from hf_patches.routing import ReplayedRouter, hook_routers
from hf_patches.scaling import measure_scaling
from hf_patches.tensor_parallel import TensorParallel
from hf_patches.vision import VisionHooks
from parallel_layers.attention import CacheShape
from parallel_layers.inference import PagedKVCache
from parallel_layers.memory import Recompute

__all__ = ["Patch", "patch"]

_MARK = "_hf_patches_patch"


class Patch:
    """The changes that `patch` made to one model; `report` shows them, `remove` reverts them."""

    def __init__(self, model: PreTrainedModel, vision: Vision | None, state: CallState, backbone: nn.Module) -> None:
        self.model, self.vision, self.state, self.backbone = model, vision, state, backbone
        self.config: Any = backbone.config
        self.journal = Journal()
        self.settings = {"head": "logits"}
        # The hooks of a model that sees images.
        self.visual: VisionHooks | None = None
        # Routers by layer number, for models whose routing can be recorded and replayed.
        self.routers: dict[int, nn.Module] = {}
        self._replayed: dict[int, ReplayedRouter] = {}
        # The layers that turn the hidden states of the backbone into the output of a call.
        self.heads: list[nn.Module] = []
        self.probe_result: ProbeResult | None = None
        # Set for model types outside the table of families, and for sharded models.
        self.proof: Proof | None = None
        self.is_sharded = False

    @classmethod
    def of(cls, model: nn.Module) -> "Patch | None":
        """Return the patch of a model, or None; a deep copy of a patched model has its own patch."""
        return model.__dict__.get(_MARK)

    def report(self) -> Report:
        """Return the changes with their places, the settings, and the result of the probe."""
        return Report(
            model=type(self.model).__name__,
            model_type=self.model.config.model_type,
            settings=dict(self.settings),
            changes=tuple(self.journal.changes),
            probe=self.probe_result,
            proof=self.proof,
        )

    def probe(self) -> ProbeResult:
        """Run the start-up probe, or run it again; every rank of the group must call this method.

        Raises:
            RuntimeError: The patch did not take effect.
        """
        self._require_applied()
        self.state.proven = False
        self.probe_result = run_probe(self.model, self.state, self.backbone, self.config, heads=self.heads)
        self.state.proven = True
        return self.probe_result

    def new_cache(self, num_sequences: int, max_length: int, num_blocks: int | None = None) -> PagedKVCache:
        """Return an empty cache of keys and values for N sequences of at most `max_length` tokens each.

        Under `torch.no_grad()`, `model(packed=PackedSequence, cache=cache)` continues the N sequences with their new
        tokens (a prompt, one token, or none) and returns `PackedOutput.logits` `[N, V]` fp32 after the last token of
        each sequence. The row of a sequence without new tokens is arbitrary. Positions continue the cached positions.
        Each rank decodes alone, also with a sequence-parallel group, so ranks may decode different sequences.

        Raises:
            ValueError: The patch is not proven or was removed, or the model has recurrent layers.
        """
        self._require_applied()
        if self.probe_result is None:
            raise ValueError(
                "a cache needs a proven packed patch: leave out packed=False, and call Patch.probe() first"
            )
        require_no_state("a cache of keys and values", self.state)
        layers = self.probe_result.key_values
        return PagedKVCache(
            [CacheShape(layer.heads, layer.key_dim, layer.value_dim) for layer in layers],
            num_sequences,
            max_length,
            num_blocks=num_blocks,
            dtype=layers[0].dtype,
            device=compute_device(self.backbone),
        )

    def _apply(self, options: PatchOptions) -> None:
        names = {module: name for name, module in self.model.named_modules()}
        self.journal.set_attribute(self.model, _MARK, self, "", "remembers its patch")
        vision = None
        if self.vision is not None:
            self.visual = vision = VisionHooks(self.state, self.model.base_model, self.vision)
            embedding = self.model.get_input_embeddings()
            self.journal.add_hook(
                embedding.register_forward_hook(vision.touch_tower),
                names[embedding],
                "a batch without images touches the vision tower",
            )
            inner, text = self.model.base_model, "images stand where the kinds of the tokens say"
            self.journal.set_attribute(inner, "get_placeholder_mask", vision.placeholder_mask, names[inner], text)
            for name in ("image", "video"):
                text = f"equal {name}s go through the vision tower once"
                function = vision.features(name)
                self.journal.set_attribute(inner, f"get_{name}_features", function, names[inner], text)
        hooks = CallHooks(self.state, self.model, self.backbone, self.config, vision)
        enter = hooks.enter if options.packed else hooks.enter_padded
        self.journal.add_hook(
            self.model.register_forward_pre_hook(enter, with_kwargs=True), "", f"takes {options.batches} batches"
        )
        # Prepended, so that FSDP2's hook on the root model sees the output that the caller gets.
        self.journal.add_hook(
            self.model.register_forward_hook(hooks.leave, with_kwargs=True, prepend=True, always_call=True),
            "",
            "returns PackedOutput",
        )
        if options.packed:
            self._use_packed_attention(names, options.npu)
            self.journal.add_hook(
                self.backbone.register_forward_pre_hook(hooks.inject, with_kwargs=True),
                names[self.backbone],
                "adds the batch's plan",
            )
        if options.npu:
            for swap in find_swaps(self.backbone):
                self.journal.set_attribute(swap.module, "forward", swap.forward, names[swap.module], swap.what)
        elif options.kernels:
            self._use_kernels(names)
        if options.router_replay is not False:
            required = options.router_replay is True
            self._replayed = hook_routers(self.backbone, names, self.journal, required=required)
            self.routers = {number: replayed.router for number, replayed in self._replayed.items()}
            self.state.routed_layers = tuple(self.routers)
        for module, forward, text in save_memory(
            self.model, self.backbone, self._replayed, options.tiled_mlp, options.recompute, options.offload_activations
        ):
            self.journal.set_attribute(module, "forward", forward, names[module], text)
        self._replace_head(names, options)
        self.state.can_decode = options.packed and not options.npu and self.model.get_output_embeddings() is not None

    def _replace_head(self, names: dict[nn.Module, str], options: PatchOptions) -> None:
        """Fuse log-probs into the output embedding; return values from the model's `score`, or from a new `score`."""
        head, score = self.model.get_output_embeddings(), self.model.__dict__["_modules"].get("score")
        self.heads = [score if head is None else head]
        scaling = None
        if options.value_head and head is None:
            require_token_classification(self.model)
            head = score
            dropout = self.model.get_submodule("dropout")
            self.journal.set_attribute(dropout, "p", 0.0, names[dropout], "no dropout before the values")
        elif options.fused_head:
            head = require_plain_head(head)
            scaling = measure_scaling(self.model, self.backbone, head)
        if options.value_head and score is None:
            score = new_score(self.config.hidden_size, next(self.backbone.parameters()))
            self.journal.add_submodule(self.model, "score", score, "score", "new value head")
        elif not options.value_head:
            score = None
        if scaling is None and score is None:
            return
        text = " and ".join(["fused log-probs and entropy"] * (scaling is not None) + ["values"] * (score is not None))
        fused = FusedHead(head, self.state, scaling, score, options.keep_probabilities)
        self.journal.set_attribute(head, "forward", fused.forward, names[head], f"{text}, no logits")
        self.settings["head"] = text
        self.heads = [head] * (scaling is not None) + [score] * (score is not None)
        self.state.fused = True

    def _use_kernels(self, names: dict[nn.Module, str]) -> None:
        """Replace norms, rotations and SwiGLUs by one kernel each, if a kernel computes the same."""
        unfused: dict[str, None] = {}
        for swap in find_kernels(self.backbone, self.state):
            if isinstance(swap, UnfusedModule):
                unfused[f"{swap.what} of {type(swap.module).__name__}"] = None
            else:
                self.journal.set_attribute(swap.module, "forward", swap.forward, names[swap.module], swap.what)
        if unfused:
            self.settings["no kernel for"] = ", ".join(unfused)

    def _use_packed_attention(self, names: dict[nn.Module, str], npu: bool) -> None:
        """Give the modules of the backbone copied configs that ask for packed attention by name; pack recurrent layers.

        Other models and the vision tower may share a config, so configs are never changed in place.
        """
        register_attention()
        if npu:
            register_experts()
        inside = f"parallel_layers.packed_attention, backend {self.state.backend!r}"
        self.settings["attention"] = "torch_npu.npu_fusion_attention" if npu else inside
        copies: dict[int, PreTrainedConfig] = {}
        for module in self.backbone.modules():
            config = module.__dict__.get("config")
            if not isinstance(config, PreTrainedConfig):
                continue
            if id(config) not in copies:
                copies[id(config)] = copied = copy.deepcopy(config)
                copied._attn_implementation = ATTENTION_NAME
            copied, text = copies[id(config)], f"config copied, attention {ATTENTION_NAME!r}"
            if npu and can_group(module):
                copied, text = copy.deepcopy(copied), f"{text}, experts {EXPERTS_NAME!r} (npu_grouped_matmul)"
                copied._experts_implementation = EXPERTS_NAME
            self.journal.set_attribute(module, "config", copied, names[module], text)
        for mixer in (mixers := find_mixers(self.backbone, npu)):
            text = "convolution and recurrence start anew in each sequence"
            self.journal.set_attribute(mixer, "forward", PackedMixer(mixer).forward, names[mixer], text)
        self.state.is_recurrent = bool(mixers)

    def _require_applied(self) -> None:
        if Patch.of(self.model) is not self:
            raise ValueError(f"this patch of {type(self.model).__name__} was removed; call patch() again")

    def remove(self) -> None:
        """Revert every change, so that the model is as before, bit for bit. A second call does nothing.

        Raises:
            ValueError: The model was sharded by `tensor_parallel`.
        """
        if self.is_sharded:
            raise ValueError(f"{type(self.model).__name__} is sharded for good; load the model again")
        self.journal.undo()


def patch(
    model: PreTrainedModel,
    *,
    family: Literal["auto"] | None = None,
    sequence_parallel_group: ProcessGroup | None = None,
    packed: bool = True,
    fused_head: bool = True,
    keep_probabilities: bool | Literal["auto"] = False,
    tiled_mlp: int | None = None,
    recompute: Recompute = None,
    offload_activations: bool = False,
    value_head: bool = False,
    attention: str = "auto",
    npu: bool = False,
    router_replay: bool | None = False,
    kernels: bool = True,
    probe: bool = True,
    tensor_parallel: TensorParallel | None = None,
) -> Patch:
    """Make one transformers model take packed batches and return log-probs, entropies and values.

    Afterwards `model(packed=PackedSequence, labels=[T], temperature=1.0, entropy=True)` returns a `PackedOutput`. With
    `within` `[T, K]`, log-probs and entropies are normalised over these tokens (`parallel_layers.linear_log_probs`).
    Only this instance changes: entries in the `__dict__` of its modules, and hooks; `Patch.report()` lists them. The
    start-up probe runs at once, unless `probe=False` or parameters are on the meta device; then call `Patch.probe()`
    before the first batch.

    Args:
        model: A transformers causal LM, or a token-classification model with one label (a value model).
        family: "auto" also takes a text model whose type is not in the table of families, if a copy with few layers
            proves that it computes the same packed and patched as unpatched (`hf_patches.auto`). The proof takes up to
            a minute, and the memory of a few layers in fp32 with their gradients.
        sequence_parallel_group: The ranks that share the T tokens (Ulysses). Every rank passes the same whole batch and
            gets the whole `[T]` back; sum the gradient of each parameter over the group.
        packed: False keeps padded batches and the model's own attention; only the head (and MLPs) are patched, and the
            call is `model(input_ids=[B, S], attention_mask=[B, S], labels=..., ...)`.
        fused_head: False leaves the head alone; the output then has `logits` `[T, V]`, or only values.
        keep_probabilities: Keep the probabilities `[T, V]` of the fused head in bf16 for the backward, which then
            computes one GEMM less. It has no effect where the kernels of the head do not run. "auto": in each pass for
            which the GPU has memory.
        tiled_mlp: The number of tiles of tokens in which each dense MLP is computed. The backward computes each tile
            again. None: all tokens at once.
        recompute: Compute these again in the backward instead of saving them: "full", every layer; "selective", every
            MLP or mixture of experts; or numbers of layers.
        offload_activations: Keep what layers save for the backward in pinned host memory; the copies run beside the
            other layers (`parallel_layers.memory.activations`).
        value_head: Also return `values` `[T]` fp32 of the model's own `score`, or of a new linear head `model.score`
            beside the output embedding.
        attention: The backend of `parallel_layers.attention.packed_attention`.
        npu: Use the fused operators of torch_npu (Huawei Ascend) for norms, SwiGLU, rotary embedding, routed experts
            and attention; see `hf_patches.npu`.
        router_replay: Accept `router_replay=parallel_layers.moe.RouterReplay(...)` in calls. The replay records the
            experts of every token, or sends tokens to recorded experts: `[T, k]` for each layer with experts, by its
            number. None: if the model has experts.
        kernels: On CUDA, compute RMSNorm, rotary embedding and SwiGLU by one kernel each (`hf_patches.kernels`). The
            numbers differ by rounding. A module that no kernel matches keeps its code; the report names it.
        probe: False leaves the probe to a later `Patch.probe()`, if the model cannot run yet (on a CPU, before FSDP2
            takes its shards to the device).
        tensor_parallel: Shard the model over these ranks by transformers' own plans, from 5.23 on, if a copy with few
            layers proves that it computes the same sharded as whole. Every rank passes the same model and batches; the
            parameters become DTensors for good, and the head keeps its rows of the vocabulary.

    Raises:
        ImportError: `npu=True` without torch_npu, or with a version that lacks an operator.
        ValueError: The model is patched already, is of an unknown family, or is refused by name or by the proof (says
            what differed); or options exclude each other.
        RuntimeError: The probe found that the patch did not take effect; the model is as before.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ValueError(f"patch() takes a transformers model that is loaded, got {model!r:.80}; load it first")
    if not isinstance(sequence_parallel_group, ProcessGroup | None):
        raise ValueError(
            f"sequence_parallel_group={sequence_parallel_group!r} must be a torch.distributed.ProcessGroup, such as "
            "ParallelDims(cp=2).build_mesh(device).get_group('cp'), or None"
        )
    if Patch.of(model) is not None:
        raise ValueError(f"{type(model).__name__} is patched already; call Patch.of(model).remove() first")
    if sequence_parallel_group is not None and not packed:
        raise ValueError("sequence_parallel_group needs packed=True")
    if router_replay is not False and not packed:
        raise ValueError(f"router_replay={router_replay} needs packed=True")
    if keep_probabilities and not fused_head:
        raise ValueError("keep_probabilities=True is the fused head's; leave out fused_head=False")
    config: Any = model.config
    vision = vision_of(config, family)
    if npu and (not packed or attention != "auto"):
        raise ValueError("npu=True brings its own packed attention; leave out packed=False and attention=...")
    options = PatchOptions(
        packed=packed,
        fused_head=fused_head,
        keep_probabilities=keep_probabilities,
        tiled_mlp=tiled_mlp,
        recompute=recompute,
        offload_activations=offload_activations,
        value_head=value_head,
        npu=npu,
        router_replay=router_replay,
        kernels=kernels,
    )
    if tensor_parallel is not None and (npu or vision is not None):
        reason = "with npu=True" if npu else "of models that see images"
        raise ValueError(f"there is no proof of tensor parallelism {reason} ({config.model_type!r}); leave out tp")
    proof = None
    if config.model_type not in FAMILIES or tensor_parallel is not None:
        if not packed:
            raise ValueError("the proof of a model takes packed batches; leave out packed=False")
        copied = CallState(None, "auto")
        proof = prove(
            model,
            lambda small: _start(small, None, copied, options.of_copy(small), tensor_parallel=tensor_parallel),
            tensor_parallel,
        )
    state = CallState(sequence_parallel_group, NPU_BACKEND if npu else attention, proven=not packed)
    patched = _start(model, vision, state, options, probe, tensor_parallel)
    patched.proof = proof
    return patched


def _start(
    model: PreTrainedModel,
    vision: Vision | None,
    state: CallState,
    options: PatchOptions,
    probe: bool = True,
    tensor_parallel: TensorParallel | None = None,
) -> Patch:
    """Patch a model, shard it, and run the start-up probe; after a failure the model is as before, unless sharded."""
    patched = Patch(model, vision, state, find_backbone(model))
    try:
        patched._apply(options)
        if tensor_parallel is not None:
            patched.is_sharded = True
            tensor_parallel.shard(model, model.get_output_embeddings() if state.fused else None)
        if options.packed and probe and not any(parameter.is_meta for parameter in model.parameters()):
            patched.probe()
    except BaseException:
        if not patched.is_sharded:
            patched.remove()
        raise
    return patched
