"""`FusedHead`: the output embedding of one model computes log-probs, entropy and values instead of logits.

Shapes: T tokens, H hidden, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hf_patches.call import CallState
from hf_patches.scaling import HeadScaling
from parallel_layers import linear_log_probs
from parallel_layers.distributed import gather_from_tensor_parallel
from parallel_layers.module import without_autocast


class FusedHead:
    """Replaces the `forward` of one `nn.Linear`: hidden `[..., H]` to `[..., n]`, n numbers per token.

    The n columns are the log-prob and, on request, the entropy (with `scaling`), and the values (with `score`). The
    module stays in place, so FSDP2 gathers its weight as before, in the root or apart, and sees the tensor of the loss
    as the output of the head. The operation includes the family's soft-cap and scale of the logits. The model applies
    the same steps to the returned columns; that result is discarded.
    """

    def __init__(
        self,
        head: nn.Linear,
        state: CallState,
        scaling: HeadScaling | None,
        score: nn.Linear | None = None,
        keep_probabilities: bool | Literal["auto"] = False,
    ) -> None:
        self.head, self.state, self.scaling, self.score = head, state, scaling, score
        self.keep_probabilities = keep_probabilities

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns, and keep them in the call for the output of the model."""
        call = self.state.require()
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        if call.rows is not None:
            hidden_TH = hidden_TH[call.rows]
        if call.decoding:
            # The model itself applies the soft-cap and scale of the family.
            call.head_output = _wide_product(hidden_TH, self.head).unsqueeze(0)
            return call.head_output
        columns: dict[str, Tensor] = {}
        if self.scaling is not None:
            weight_VH, group = _local_rows(self.head.weight)
            result = linear_log_probs(
                hidden_TH,
                weight_VH,
                call.labels,
                group=group,
                vocab_size=len(self.head.weight),
                temperature=call.temperature,
                entropy=call.entropy,
                logit_scale=self.scaling.factor,
                logit_softcap=self.scaling.softcap,
                sampling_mask=call.sampling_mask,
                keep_probabilities=self.keep_probabilities,
            )
            columns["log_probs"] = result.log_probs
            if result.entropy is not None:
                columns["entropy"] = result.entropy
        if self.score is not None:
            columns["values"] = _wide_product(hidden_TH, self.score)
        call.columns = {name: column.shape[1] if column.dim() > 1 else 1 for name, column in columns.items()}
        shape = hidden.shape[:-1] if call.rows is None else (1, len(call.rows))
        # Keep the returned tensor itself: FSDP2 hooks the gathering of the weight for the backward into it.
        call.head_output = torch.cat([column.view(*shape, -1) for column in columns.values()], dim=-1)
        return call.head_output


def _local_rows(weight_VH: Tensor) -> tuple[Tensor, ProcessGroup | None]:
    """Return this rank's rows of a head, and the group over which the vocabulary is divided."""
    if not isinstance(weight_VH, DTensor):
        return weight_VH, None
    return weight_VH.to_local(), weight_VH.device_mesh.get_group()


@without_autocast
def _wide_product(hidden_TH: Tensor, head: nn.Linear) -> Tensor:
    """Return hidden @ weight.T + bias `[T, n]` in fp32, or in fp64 for an fp64 model, on every rank."""
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(dtype)
    weight, group = _local_rows(head.weight)
    return gather_from_tensor_parallel(functional.linear(hidden_TH.to(dtype), weight.to(dtype), bias), group)


def require_plain_head(head: nn.Module | None) -> nn.Linear:
    """Return the head if it is a plain `nn.Linear` without bias; refuse LoRA and quantised heads by name.

    Some adapters replace `forward` on the instance instead of the class.
    """
    replaced = head is not None and "forward" in head.__dict__
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or replaced:
        # A LoRA layer's class may be called Linear, too: its module tells it from torch's.
        class_name = f"{type(head).__module__}.{type(head).__qualname__}{' with another forward' * replaced}"
        raise ValueError(
            f"fused_head=True needs an output embedding that is a plain torch.nn.Linear, got {class_name}; merge "
            "the adapter into the weight, leave the head out of the adapter's targets, or pass fused_head=False"
        )
    if head.bias is not None:
        raise ValueError("fused_head=True does not support an output embedding with a bias; pass fused_head=False")
    return head


def require_token_classification(model: nn.Module) -> None:
    """Raise unless the model is a ...ForTokenClassification, which gives every token its scores."""
    score = model.__dict__["_modules"].get("score")
    if not type(model).__name__.endswith("ForTokenClassification") or not isinstance(score, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has neither an output embedding nor a score for every token; load it with "
            "AutoModelForTokenClassification (the weights of a sequence classifier fit) or AutoModelForCausalLM"
        )


def new_score(hidden_size: int, like: Tensor) -> nn.Linear:
    """Return a new value head with deviation 1 / sqrt(H + 1), equal on every rank."""
    if isinstance(like, DTensor):
        raise ValueError("value_head=True adds a parameter to this model: patch it before fully_shard")
    score = nn.Linear(hidden_size, 1, bias=False, device=like.device, dtype=like.dtype)
    if not score.weight.is_meta:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            score.weight.copy_(torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5)
    return score
