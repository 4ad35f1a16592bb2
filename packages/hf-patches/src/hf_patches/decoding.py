"""Generation: a call with a cache brings new tokens for its sequences and returns the logits after each one's last.

Such a call is this rank's alone, also in a patch with a sequence-parallel group: ranks may decode different sequences.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_patches.batch import plan_batch
from hf_patches.call import Call, CallState
from hf_patches.prefix import SharedPrefixes
from hf_patches.vision import VISUAL_INPUTS
from parallel_layers import PackedSequence
from parallel_layers.inference import SequenceCache
from parallel_layers.moe import RouterReplay

_SCORING = ("labels", "temperature", "entropy", "position_ids", "mm_token_type_ids", *VISUAL_INPUTS)


def decoding_call(
    batch: PackedSequence | SharedPrefixes,
    cache: object,
    replay: RouterReplay | None,
    state: CallState,
    longest: int | None,
    kwargs: dict[str, Any],
) -> Call:
    """The call that continues the N sequences of a cache.

    Raises:
        ValueError: arguments that mean nothing here, another number of sequences, a model without an output embedding,
            or a cache longer than the rotary embedding allows.
    """
    if not isinstance(batch, PackedSequence) or not isinstance(cache, SequenceCache):
        raise ValueError(f"a cache continues a PackedSequence; got {type(batch).__name__} and {type(cache).__name__}")
    if given := [name for name in _SCORING if kwargs.get(name) is not None]:
        raise ValueError(
            f"a call with a cache returns logits after new text tokens; leave {', '.join(given)} out, or score the "
            "whole sequences without a cache"
        )
    if batch.num_sequences != cache.num_sequences:
        raise ValueError(
            f"{batch.num_sequences} sequences for a cache of {cache.num_sequences}; give a sequence that has no new "
            "token an empty one"
        )
    if not state.can_decode:
        raise ValueError("this model has no output embedding, or runs on NPU operators, which do not take a cache")
    if longest is not None and cache.max_length > longest:
        raise ValueError(
            f"a cache of max_length={cache.max_length} is longer than the {longest} tokens of training, and this "
            "model's rotary embedding (dynamic or longrope) then turns keys that are already in it; make it shorter"
        )
    plan = replace(plan_batch(batch, None, state.backend), cache=cache, replay=replay)
    last = (plan.cu_seqlens[1 : batch.num_sequences + 1].long() - 1).clamp(min=0)
    return Call(
        plan=plan,
        labels=batch.input_ids[:0],
        temperature=1.0,
        entropy=False,
        collect=(lambda logits: logits) if state.fused else (lambda logits: logits[last]),
        rows=last,
        decoding=True,
    )


def continued_positions(packed: PackedSequence, cache: SequenceCache) -> Tensor:
    """[T] the places of new tokens in their sequences: behind those in the cache; those of the padding count from 0."""
    cu_seqlens = packed.cu_seqlens
    token = torch.arange(packed.num_tokens, device=cu_seqlens.device)
    segment = torch.searchsorted(cu_seqlens, token.int(), right=True) - 1
    held = functional.pad(cache.lengths, (0, len(cu_seqlens) - 1 - cache.num_sequences))
    return token - cu_seqlens[segment] + held[segment]
