"""Generation: a call with a cache takes new tokens of its sequences and returns the logits after each last token.

Each rank decodes alone, also with a sequence-parallel group, so ranks may decode different sequences.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_patches.batch import plan_batch
from hf_patches.call import Call, CallState
from parallel_layers import PackedSequence
from parallel_layers.data import SharedPrefixes
from parallel_layers.inference import SequenceCache
from parallel_layers.moe import RouterReplay

SCORING = ("labels", "temperature", "sampling_mask", "entropy")
"""The arguments of a call that scores, besides the batch."""


def decoding_call(
    batch: PackedSequence | SharedPrefixes,
    cache: object,
    replay: RouterReplay | None,
    state: CallState,
    longest: int | None,
    kwargs: dict[str, Any],
) -> Call:
    """Return the call that continues the N sequences of a cache.

    Raises:
        ValueError: An argument has no meaning here, the number of sequences differs, the model has no output embedding,
            or the cache is longer than the rotary embedding allows.
    """
    if not isinstance(batch, PackedSequence) or not isinstance(cache, SequenceCache):
        raise ValueError(f"a cache continues a PackedSequence; got {type(batch).__name__} and {type(cache).__name__}")
    if refused := [name for name in SCORING if kwargs.get(name) is not None]:
        raise ValueError(
            f"a call with a cache returns logits after new tokens; leave {', '.join(refused)} out, or score the "
            "whole sequences without a cache"
        )
    if batch.num_sequences != cache.num_sequences:
        raise ValueError(
            f"{batch.num_sequences} sequences for a cache of {cache.num_sequences}; give an empty sequence to "
            "each sequence without new tokens"
        )
    require_no_state("a cache of keys and values", state)
    if not state.can_decode:
        raise ValueError("this model has no output embedding, or runs on NPU operators, which do not take a cache")
    if longest is not None and cache.max_length > longest:
        raise ValueError(
            f"a cache of max_length={cache.max_length} is longer than the {longest} tokens of training, and this "
            "model's rotary embedding (dynamic or longrope) then rotates new keys differently "
            "from the keys in the cache; use a shorter cache"
        )
    plan = replace(plan_batch(batch, None, state.backend), cache=cache, replay=replay)
    last_tokens = (plan.cu_seqlens[1 : batch.num_sequences + 1].long() - 1).clamp(min=0)
    return Call(
        plan=plan,
        labels=batch.input_ids[:0],
        temperature=1.0,
        entropy=False,
        collect=(lambda logits: logits) if state.fused else (lambda logits: logits[last_tokens]),
        rows=last_tokens,
        decoding=True,
    )


def require_no_state(what: str, state: CallState) -> None:
    """Raise ValueError if layers have a recurrent state, which neither caches nor shared prefixes hand on."""
    if state.is_recurrent:
        raise ValueError(
            f"{what} lacks the state of this model's recurrent layers; pack whole sequences, and generate with vLLM or "
            "with the unpatched model (Patch.remove())"
        )


def continued_positions(packed: PackedSequence, cache: SequenceCache) -> Tensor:
    """Return the positions `[T]` of new tokens, which follow the cached tokens; positions of padding count from 0."""
    cu_seqlens = packed.cu_seqlens
    token = torch.arange(packed.num_tokens, device=cu_seqlens.device)
    segment = torch.searchsorted(cu_seqlens, token.int(), right=True) - 1
    cached = functional.pad(cache.lengths, (0, len(cu_seqlens) - 1 - cache.num_sequences))
    return token - cu_seqlens[segment] + cached[segment]
