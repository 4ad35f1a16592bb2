"""Checks of the arguments that the functions of a head share.

Shape suffixes: T tokens, H hidden, V this rank's rows of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.head.chunked import LogitTransform
from parallel_layers.head.sampling_mask import SamplingMask
from parallel_layers.head.vocabulary import IGNORE_INDEX


def check_head(hidden: Tensor, weight: Tensor, owner: str = "") -> None:
    """Raise ValueError unless hidden states and head are `[T, H]` and `[V, H]` of one floating dtype."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{owner}hidden states {list(hidden.shape)} and head {list(weight.shape)} must be [T, H] and [V, H]; "
            "flatten batch and sequence first"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"{owner}hidden states ({hidden.dtype}) and head ({weight.dtype}) must share a floating dtype; "
            "cast one of them, or run the model under torch.autocast"
        )


def whole_length(hidden_TH: Tensor, group: ProcessGroup | None, sequence_parallel: bool) -> int:
    """Return the number of tokens of the whole sequence."""
    return len(hidden_TH) * (group.size() if sequence_parallel and group is not None else 1)


def check_labels(
    hidden_TH: Tensor,
    labels_T: Tensor,
    mask: SamplingMask | None,
    vocab_size: int,
    group: ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """Return the labels, -100 where the sampling mask has no ids; ValueError unless there is one for each token."""
    num_tokens = whole_length(hidden_TH, group, sequence_parallel)
    if labels_T.shape != (num_tokens,) or labels_T.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels must be int64 [{num_tokens}], one for each token of the whole sequence "
            f"(hidden states {list(hidden_TH.shape)}, sequence_parallel={sequence_parallel}, group of "
            f"{1 if group is None else group.size()}), got {labels_T.dtype} {list(labels_T.shape)}"
        )
    return labels_T if mask is None else labels_T.masked_fill(mask.check(labels_T, vocab_size), IGNORE_INDEX)


def logit_transform(
    temperature: float | Tensor, logit_scale: float, logit_softcap: float | None, num_tokens: int, owner: str = ""
) -> LogitTransform:
    """Return the transform of the logits; ValueError for numbers that are not positive."""
    numbers = {"logit_scale": logit_scale, "logit_softcap": logit_softcap}
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (num_tokens,)):
            raise ValueError(f"{owner}temperature must be [{num_tokens}], one a token; got {list(temperature.shape)}")
        # Expand a one-element tensor: reading it on the host would wait for the device.
        temperature = temperature.detach().expand(num_tokens)
    else:
        numbers["temperature"] = temperature
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{owner}{name}={number} must be positive")
    return LogitTransform(
        float(logit_scale),
        float(logit_softcap or 0.0),
        temperature if isinstance(temperature, Tensor) else float(temperature),
    )
