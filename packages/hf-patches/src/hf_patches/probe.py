"""The start-up probe: a proof, on the model at hand, that segments do not influence each other.

Two tiny packed batches that differ in the last tokens of one segment run through the model without gradients. The token
mixer of every layer (attention, or a recurrence) must take part, the outputs of the perturbed tokens must change, and
the outputs of all other tokens must stay exactly equal. So must the outputs of each mixer alone, if the ends of its
other segments change, and a recurrence's gradients.

Routed experts cannot be exact: tokens of all sequences share a GEMM, whose rounding depends on their number. There the
outputs of the model must be nearly equal. Heads with all-zero weights (new value heads) return the same for any tokens,
so their inputs are compared instead. Kernels run beside the code that they replace and may differ by rounding; so may a
recurrence from transformers' own code on each segment alone.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_patches.backbone import compute_device, num_token_mixers
from hf_patches.batch import Trace
from hf_patches.call import CallState
from hf_patches.report import ProbeResult
from hf_patches.routing import has_experts
from parallel_layers import PackedSequence
from parallel_layers.moe import RouterReplay

_LENGTHS = (5, 1, 7, 4)
# The third segment (tokens 6 to 12) is perturbed from its fourth token on.
_PERTURBED = slice(9, 13)
# The allowed difference between a kernel and the code that it replaces, in units of the dtype's epsilon times the
# largest element: both round a few times.
_KERNEL_ROUNDINGS = 16.0
# The allowed change of other tokens with routed experts, as a fraction of the change of the perturbed tokens.
_EXPERT_NOISE = 0.05


def run_probe(
    model: nn.Module, state: CallState, backbone: nn.Module, config: Any, *, heads: Sequence[nn.Module]
) -> ProbeResult:
    """Run the probe and return its result.

    Args:
        model: The patched model.
        state: The state of its calls.
        backbone: The text backbone.
        config: The config of the text backbone.
        heads: The layers that turn the hidden states of the backbone into the output of the model.

    Raises:
        RuntimeError: The patch did not take effect; names the part that leaked.
    """
    ids = ordinary_ids((config, model.config), sum(_LENGTHS))
    changed = ids.clone()
    changed[_PERTURBED] = ids[: _PERTURBED.stop - _PERTURBED.start]
    training = {module: module.training for module in model.modules()}
    state.trace = trace = Trace()
    reading = backbone.register_forward_hook(lambda _, __, output: trace.hidden.append(_gathered(output[0][0], state)))
    try:
        model.eval()
        with torch.no_grad():
            replay = RouterReplay() if state.routed_layers else None
            outputs, perturbed = (
                _outputs(model, x.to(compute_device(backbone)), _LENGTHS, replay) for x in (ids, changed)
            )
    finally:
        state.trace = None
        reading.remove()
        for module, mode in training.items():
            module.training = mode
    layers = len(trace.leaks)
    expected = num_token_mixers(config)
    if len(trace.calls) != 2 * expected or layers != expected:
        raise RuntimeError(
            f"patch() did not take effect: {layers} of {expected} layers of {type(model).__name__} "
            f"called the packed attention function or recurrence ({len(trace.calls)} calls in two forward passes)"
        )
    if replay is not None and tuple(sorted(replay.experts)) != state.routed_layers:
        raise RuntimeError(
            f"patch(router_replay=True) did not take effect: the routers of layers {sorted(replay.experts)} of "
            f"{type(model).__name__} were recorded, the routers of {list(state.routed_layers)} were patched"
        )
    # The label of the token before the perturbed tokens is perturbed, so the log-prob of that token may move.
    keep = torch.ones(sum(_LENGTHS), dtype=torch.bool)
    keep[_PERTURBED.start - 1 : _PERTURBED.stop] = False
    if not outputs.isfinite().all():
        broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
        raise RuntimeError(
            f"the probe of {type(model).__name__} failed: its outputs are not finite"
            + (f", nor are its weights {', '.join(broken[:5])}; load it from another checkpoint" if broken else "")
        )
    if torch.equal(outputs, perturbed) and all(_is_zero(head, compute_device(backbone)) for head in heads):
        outputs, perturbed = (x.float() for x in trace.hidden)
    difference = (perturbed - outputs).abs().amax(dim=-1).cpu()
    moved, leak = difference[_PERTURBED].max().item(), difference[keep].max().item()
    leaking = [name for name, module in model.named_modules() if trace.leaks.get(module, 0.0) != 0]
    allowed = _EXPERT_NOISE * moved if has_experts(backbone) else 0.0
    if not leak <= allowed or not moved > allowed or leaking:
        alone = ", ".join(leaking[:3]) or "no layer"
        raise RuntimeError(
            f"the probe of {type(model).__name__} failed: perturbing one segment of a packed batch moved it by "
            f"{moved:.3g}, other tokens by {leak:.3g} (allowed: {allowed:.3g}), and {alone} alone "
            "lets segments influence each other, so its segments are not kept apart"
        )
    kernel_error = max(trace.kernel_errors.values(), default=0.0)
    if not kernel_error <= _KERNEL_ROUNDINGS:
        wrong = max(trace.kernel_errors, key=lambda kernel: trace.kernel_errors[kernel])
        raise RuntimeError(
            f"in {type(model).__name__}, {wrong} computes something else than the code that it replaces: it is off by "
            f"{kernel_error:.3g} roundings (allowed: {_KERNEL_ROUNDINGS:.3g})"
        )
    key_values, kernels = tuple(trace.key_values.values()), len(trace.kernel_errors)
    recurrent_layers = layers - len(key_values)
    return ProbeResult(len(key_values), recurrent_layers, moved, leak, allowed, key_values, kernels, kernel_error)


def _outputs(model: nn.Module, input_ids: Tensor, lengths: Sequence[int], replay: RouterReplay | None) -> Tensor:
    """Return all outputs of the model for each token, `[T, n]` fp32."""
    packed = PackedSequence.from_sequences(list(input_ids.split(list(lengths))))
    output = model(packed=packed, router_replay=replay)
    columns = [x.reshape(packed.num_tokens, -1).float() for x in output if isinstance(x, Tensor)]
    return torch.cat(columns, dim=-1)


def _is_zero(head: nn.Module, device: torch.device) -> bool:
    """Return whether the weight of a head is all zero; every rank of its mesh must call this function."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, DTensor):
        # FSDP2 may keep the weight on the CPU, and NCCL cannot gather CPU tensors.
        weight = cast(DTensor, weight.detach().to(device)).full_tensor()
    return isinstance(weight, Tensor) and not weight.any()


def _gathered(hidden: Tensor, state: CallState) -> Tensor:
    plan = state.require().plan
    assert plan is not None
    return plan.gather(hidden)


def ordinary_ids(configs: Sequence[Any], count: int) -> Tensor:
    """Return ids that are no special tokens ("..._token_id") of the configs."""
    special: set[int] = set()
    for entries in configs:
        for name in (name for name in dir(entries) if name.endswith("_token_id")):
            value = getattr(entries, name)
            special |= set(value) if isinstance(value, (list, tuple)) else {value}
    config = configs[0]
    ids = [token for token in range(min(config.vocab_size, count + len(special))) if token not in special]
    return torch.tensor([ids[i % len(ids)] for i in range(count)])
