"""The fused head: the output embedding of one model, computing log-probs, entropy and values instead of logits.

Shapes: T tokens, H hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hf_patches.call import CallState
from hf_patches.families import HeadScaling
from parallel_layers import linear_log_probs
from parallel_layers.autocast import without_autocast


class FusedHead:
    """Stands in for the `forward` of one `nn.Linear`: hidden [..., H] -> [..., n], n numbers a token instead of logits.

    The n columns are log-prob and (when asked for) entropy, if `scaling` is given, and the value, if `score` is. The
    module itself stays where it is, so FSDP2 gathers its weight as before (in the root or apart), and what FSDP2 sees
    as the head's output is the tensor that the loss is computed from. What a family does to its logits after the head
    (soft-cap, scale) belongs to the distribution and goes into the operation; the same steps, applied by the model to
    the columns returned here, change only a tensor that nobody reads.
    """

    def __init__(
        self,
        head: nn.Linear,
        state: CallState,
        scaling: HeadScaling | None,
        score: nn.Linear | None = None,
        keep_probabilities: bool = False,
    ) -> None:
        self.head, self.state, self.scaling, self.score = head, state, scaling, score
        self.keep_probabilities = keep_probabilities

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute this rank's columns; they are kept in the call's state for the model's output."""
        call = self.state.require()
        hidden_TH = hidden.reshape(-1, hidden.shape[-1])
        if call.rows is not None:
            hidden_TH = hidden_TH[call.rows]
        if call.decoding:
            # What the family does to its logits follows in the model itself.
            call.head_output = _wide_product(hidden_TH, self.head).unsqueeze(0)
            return call.head_output
        columns: dict[str, Tensor] = {}
        if self.scaling is not None:
            result = linear_log_probs(
                hidden_TH,
                self.head.weight,
                call.labels,
                temperature=call.temperature,
                entropy=call.entropy,
                logit_scale=self.scaling.factor,
                logit_softcap=self.scaling.softcap,
                keep_probabilities=self.keep_probabilities,
            )
            columns["log_probs"] = result.log_probs
            if result.entropy is not None:
                columns["entropy"] = result.entropy
        if self.score is not None:
            columns["values"] = _wide_product(hidden_TH, self.score).squeeze(-1)
        call.columns = tuple(columns)
        shape = hidden.shape[:-1] if call.rows is None else (1, len(call.rows))
        # The very tensor that is returned: FSDP2 hangs the gathering of the weight for the backward on it.
        call.head_output = torch.stack([column.view(shape) for column in columns.values()], dim=-1)
        return call.head_output


@without_autocast
def _wide_product(hidden_TH: Tensor, head: nn.Linear) -> Tensor:
    """[T, n] in fp32 (fp64 for an fp64 model), whatever the weights are."""
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(dtype)
    return functional.linear(hidden_TH.to(dtype), head.weight.to(dtype), bias)


def require_plain_head(head: nn.Module | None) -> nn.Linear:
    """The head, if it is a plain `nn.Linear` without bias; a LoRA or quantised one is refused by name.

    Some adapters replace `forward` on the instance instead of the class.
    """
    replaced = head is not None and "forward" in head.__dict__
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or replaced:
        # A LoRA layer's class may be called Linear, too: its module tells it from torch's.
        found = f"{type(head).__module__}.{type(head).__qualname__}{' with another forward' * replaced}"
        raise ValueError(
            f"fused_head=True needs an output embedding that is a plain torch.nn.Linear, got {found}; merge "
            "the adapter into the weight, leave the head out of the adapter's targets, or pass fused_head=False"
        )
    if head.bias is not None:
        raise ValueError("fused_head=True does not support an output embedding with a bias; pass fused_head=False")
    return head


def require_token_classification(model: nn.Module) -> None:
    """Raise unless the model gives every token one score, as ...ForTokenClassification with one label does."""
    score = model.__dict__["_modules"].get("score")
    if not type(model).__name__.endswith("ForTokenClassification") or not isinstance(score, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has neither an output embedding nor a score for every token; load it with "
            "AutoModelForTokenClassification (the weights of a sequence classifier fit) or AutoModelForCausalLM"
        )
    if score.out_features != 1:
        raise ValueError(f"value_head=True needs one score a token, got {score.out_features}; load with num_labels=1")


def new_score(hidden_size: int, like: Tensor) -> nn.Linear:
    """A value head for a model that has none: deviation 1 / sqrt(H + 1), the same numbers on every rank."""
    if isinstance(like, DTensor):
        raise ValueError("value_head=True adds a parameter to this model: patch it before fully_shard")
    score = nn.Linear(hidden_size, 1, bias=False, device=like.device, dtype=like.dtype)
    if not score.weight.is_meta:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            score.weight.copy_(torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5)
    return score
