"""The call of a patched model: `model(packed=..., labels=..., temperature=..., entropy=..., router_replay=...)`.

A pre-hook of the model turns the call into arguments of transformers, a pre-hook of the text backbone adds the plan of
the batch, and a hook of the model returns a `PackedOutput`.
"""

import inspect
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from hf_patches.arguments import (
    Rows,
    TokenRows,
    local_labels,
    local_mask,
    local_temperature,
    next_tokens,
    padded_temperature,
)
from hf_patches.attention import ATTENTION_NAME
from hf_patches.batch import PLAN_KEYWORD, BatchPlan, plan_batch
from hf_patches.call import Call, CallState, PackedOutput
from hf_patches.decoding import SCORING, continued_positions, decoding_call, require_no_state
from hf_patches.dropout import RandomParts
from hf_patches.families.refused import longest_exact_sequence
from hf_patches.prefix import head_rows
from hf_patches.routing import padded_replay
from hf_patches.vision import VISUAL_INPUTS, VisionHooks, cut_visual_rows, has_images, take_numbers
from parallel_layers import PackedSequence, next_token_labels
from parallel_layers.data import SharedPrefixes, refuse_unshifted_labels
from parallel_layers.head import SamplingMask, check_token_ids
from parallel_layers.moe import RouterReplay

# The cache of transformers, by its name before 5.24 and since.
_CACHES = ("past_key_values", "cache")

# Arguments that packing decides itself.
_REFUSED = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "logits_to_keep")

# Arguments that continue or cut sequences, as generate() does; padded batches hold whole sequences.
_WHOLE_ONLY = (*_CACHES, "logits_to_keep")

# transformers must return neither a cache nor a tuple.
_RETURNS = {"use_cache": False, "return_dict": True}

# Arguments of a text backbone with one entry per token, and the dim that counts the tokens: ids [1, T], embeddings
# [1, T, H], positions [1, T] or [rows, 1, T].
_TOKEN_DIMS = {"input_ids": -1, "inputs_embeds": -2, "position_ids": -1}


def _refuse_decided(kwargs: dict[str, Any]) -> None:
    decided = [name for name in _REFUSED if kwargs.get(name) is not None]
    if decided := decided + ["use_cache"] * bool(kwargs.pop("use_cache", False)):
        raise ValueError(f"a packed batch decides {', '.join(decided)} itself; leave it out of the call")


def _refuse_unknown(model: nn.Module, kwargs: dict[str, Any], keywords: Collection[str]) -> None:
    """Refuse keywords without effect: transformers accepts any keyword, and `PackedOutput` has fixed fields."""
    unknown = [
        name
        for name, value in kwargs.items()
        if (name not in keywords or name.startswith("output_")) and value is not None and value is not False
    ]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} would change nothing in a call of this patched {type(model).__name__}; leave it out "
            f"(besides the batch a call takes {', '.join(SCORING)})"
        )


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, int) and value == 0)


class CallHooks:
    """The hooks of one patched model, as methods, so that a deep copy of the model gets its own hooks."""

    def __init__(
        self, state: CallState, model: nn.Module, backbone: nn.Module, config: Any, vision: VisionHooks | None
    ) -> None:
        self.state, self.vision, self.config = state, vision, config
        self.keywords = {*inspect.signature(model.forward).parameters, *SCORING, *_RETURNS}
        self.keywords |= set() if vision is None else {*VISUAL_INPUTS, "mm_token_type_ids"}
        self.longest = longest_exact_sequence(config)
        self.random = RandomParts(model)
        self.parameters = list(inspect.signature(backbone.forward).parameters)

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Pre-hook of the model: turn a packed batch into arguments of transformers."""
        batch, cache, replay = (kwargs.pop(name, None) for name in ("packed", "cache", "router_replay"))
        if args or not isinstance(batch, (PackedSequence, SharedPrefixes)):
            raise ValueError(
                "this model is patched for packed batches: call it as model(packed=PackedSequence(...), labels=..., "
                f"temperature=..., entropy=...), keywords only; got packed={type(batch).__name__} and {len(args)} "
                "positional argument(s)"
            )
        if not self.state.proven and self.state.trace is None:
            raise ValueError("the patch of this model is not proven yet: call Patch.probe() before the first batch")
        if replay is not None and not self.state.routed_layers:
            raise ValueError("router_replay=... needs a model that was patched with router_replay=True")
        _refuse_unknown(model, kwargs, self.keywords)
        self.random.refuse_active()
        if cache is not None:
            return self._continue(batch, cache, replay, kwargs)
        packed = batch if isinstance(batch, PackedSequence) else batch.packed
        self._check_length(packed.longest)
        if packed.input_ids.device.type == "cpu":  # on a GPU, reading ids would wait for the device
            check_token_ids(packed.input_ids, self.config.vocab_size)
        positions, types = self._positions(packed, packed.position_ids, kwargs)
        _refuse_decided(kwargs)
        plan = plan_batch(packed, self.state.group, self.state.backend, self.state.trace)
        rows: Rows = TokenRows(plan)
        labels, lengths, count = kwargs.pop("labels", None), packed.cu_seqlens.diff(), packed.num_sequences
        if isinstance(batch, SharedPrefixes):
            self._require_shareable(labels)
            rows = head_rows(batch, plan)
            labels, count = batch.labels, len(batch.lengths)
            lengths = torch.tensor(batch.lengths).to(labels.device)
        if replay is not None:
            plan = replace(plan, replay=padded_replay(replay, plan.num_tokens - plan.num_given))
        shifted = next_token_labels(packed)
        labels = shifted if labels is None else labels
        call = Call(
            plan=plan,
            labels=local_labels(labels, rows, self.config.vocab_size, packed.input_ids, shifted),
            temperature=local_temperature(kwargs.pop("temperature", 1.0), rows, lengths, count),
            sampling_mask=local_mask(self._mask(kwargs), rows),
            entropy=kwargs.pop("entropy", True),
            collect=rows.collect,
            rows=rows.local,
            has_images=has_images(kwargs),
            numbers=take_numbers(kwargs),
            token_types=None if types is None else plan.pad(types, 0),
        )
        self.state.begin(call)
        return (), self._model_inputs(plan, packed, positions, kwargs)

    def _positions(self, packed: PackedSequence, text: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        return (text, None) if self.vision is None else self.vision.take(packed, text, kwargs)

    def _mask(self, kwargs: dict[str, Any]) -> SamplingMask | None:
        mask: SamplingMask | None = kwargs.pop("sampling_mask", None)
        if mask is not None and not self.state.fused:
            raise ValueError(
                "sampling_mask=... needs the fused head; leave it out, or patch the model with fused_head=True"
            )
        return mask

    def _model_inputs(
        self, plan: BatchPlan, packed: PackedSequence, positions: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of transformers: a batch of one row."""
        return kwargs | {
            "input_ids": plan.pad(packed.input_ids, 0).unsqueeze(0),
            "position_ids": plan.pad_positions(positions).unsqueeze(-2),
            "attention_mask": None,
            **_RETURNS,
        }

    def _continue(
        self, batch: PackedSequence | SharedPrefixes, cache: Any, replay: RouterReplay | None, kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Return the arguments of a call that continues the sequences of a cache."""
        call = decoding_call(batch, cache, replay, self.state, self.longest, kwargs)
        assert isinstance(batch, PackedSequence)
        assert call.plan is not None
        positions, types = self._positions(batch, continued_positions(batch, cache), kwargs)
        _refuse_decided(kwargs)
        call.token_types = None if types is None else call.plan.pad(types, 0)
        call.numbers = take_numbers(kwargs)
        self.state.begin(call)
        return (), self._model_inputs(call.plan, batch, positions, kwargs)

    def _check_length(self, longest: int) -> None:
        if self.longest is not None and longest > self.longest:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than the {self.longest} of training, and this "
                "model's rotary embedding (dynamic or longrope) then depends on the rest of the batch; shorten it"
            )

    def _require_shareable(self, labels: object) -> None:
        require_no_state("a prompt that responses share", self.state)
        if self.vision is not None or not self.state.fused or labels is not None:
            raise ValueError(
                "shared prefixes need the fused head (or a value head) of a text model, and their labels are the "
                "response tokens; leave labels out, and pack whole sequences for logits or images"
            )

    def inject(
        self, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Pre-hook of the text backbone: add the plan, and cut arguments by token to this rank's part."""
        plan = self.state.require().plan
        assert plan is not None
        if (implementation := backbone.config._attn_implementation) != ATTENTION_NAME:
            raise ValueError(
                f"the layers of {type(backbone).__name__} have been told to use attention {implementation!r} since "
                "they were patched (by set_attn_implementation()?), which would not keep the sequences apart; call "
                "Patch.of(model).remove() before such a change, and patch the model again after it"
            )
        kwargs |= dict(zip(self.parameters, args, strict=False))
        for name, dim in _TOKEN_DIMS.items():
            if plan.group is not None and isinstance(kwargs.get(name), Tensor):
                local = plan.local_tokens
                kwargs[name] = kwargs[name].narrow(dim, local.start, local.stop - local.start)
        cut_visual_rows(kwargs, plan)
        kwargs |= {"attention_mask": None, "use_cache": False, PLAN_KEYWORD: plan}
        kwargs |= {name: None for name in _CACHES if name in self.parameters}
        return (), kwargs

    def enter_padded(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Pre-hook of a model with padded batches: take the arguments of the head out of the call."""
        kwargs |= dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise ValueError("call a model patched with packed=False as model(input_ids=[B, S], ...)")
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; give one entry per token, {tuple(ids.shape)}: the head "
                "makes its labels from the mask"
            )
        if refused := [name for name in _WHOLE_ONLY if _is_given(kwargs.get(name))]:
            raise ValueError(
                f"a patched model scores whole sequences; leave {', '.join(refused)} out, and before "
                "generate() remove the patch with Patch.remove()"
            )
        _refuse_unknown(model, kwargs, self.keywords | TransformersKwargs.__annotations__.keys())
        labels = kwargs.pop("labels", None)
        temperature = kwargs.pop("temperature", 1.0)
        shifted = next_tokens(ids, mask)
        labels = shifted if labels is None else labels
        if labels.shape != ids.shape or (isinstance(temperature, Tensor) and temperature.shape != ids.shape):
            raise ValueError(f"labels and temperatures must have the shape {tuple(ids.shape)} of input_ids")
        refuse_unshifted_labels(labels, ids, shifted)
        call = Call(
            plan=None,
            labels=labels.flatten(),
            temperature=padded_temperature(temperature, ids),
            sampling_mask=self._mask(kwargs),
            entropy=kwargs.pop("entropy", True),
            collect=lambda columns: columns.view(*ids.shape, -1),
            has_images=has_images(kwargs),
            numbers=take_numbers(kwargs),
        )
        self.state.begin(call)
        return (), kwargs | _RETURNS

    def leave(self, model: nn.Module, args: object, kwargs: object, output: Any) -> PackedOutput | None:
        """Hook of the model, also run after an exception: end the call and return its output."""
        call = self.state.end()
        if call is None or output is None:
            return None
        if self.state.fused and call.head_output is None:
            raise ValueError(
                f"the head of this {type(model).__name__} that was patched took no part in the call: another module "
                "stands in its place (resize_token_embeddings() replaces the head, as adapters do); call "
                "Patch.of(model).remove() before such a change, and patch the model again after it"
            )
        if call.plan is not None and call.plan.cache is not None:
            call.plan.cache.advance(call.plan.cu_seqlens)
        if call.head_output is None or call.decoding:
            return PackedOutput(logits=call.collect(output.logits.flatten(0, 1)))
        columns = call.collect(call.head_output.flatten(0, -2)).split([*call.columns.values()], dim=-1)
        # Clones, because FSDP2 hooks into the tensors that the root returns, which must not be views of each other.
        named = {name: column.squeeze(-1).clone() for name, column in zip(call.columns, columns, strict=True)}
        return PackedOutput(**named)
