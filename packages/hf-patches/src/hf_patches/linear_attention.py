"""Recurrent token mixers (gated delta networks, Kimi's delta attention, Mamba-2) on packed batches.

The `forward` of such a mixer calls a causal convolution and a recurrence by name. transformers has both in plain torch,
which takes no boundaries, and loads kernels of other packages, to which not every family hands the boundaries. A
patched mixer runs its own `forward` with functions of ours in their place: `parallel_layers.linear_attention` computes
both for packed sequences, on any device.

Shapes: T tokens of the packed batch, C channels, W taps of the convolution, K key heads, V value heads, G groups of
heads, D key or state size, E value size.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_patches.batch import PLAN_KEYWORD, BatchPlan, Trace, required_plan
from hf_patches.isolation import measure_leak
from hf_patches.swaps import called_names, own_function, rebound
from parallel_layers.linear_attention import (
    context_parallel_convolution,
    context_parallel_delta_rule,
    context_parallel_state_space,
    gated_delta_rule,
    short_convolution,
    state_space_dual,
)


def packed_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """Convolve `[1, C, T]` with `weight` `[C, W]`, causal, by channel, within the segments of the batch's plan.

    Raises:
        ValueError: The plan of the batch is missing.
    """
    plan = required_plan("the convolution", kwargs, hidden_states.shape[0], hidden_states.shape[2])
    x_TC = hidden_states.squeeze(0).transpose(0, 1)
    convolve: Callable[..., Any] = short_convolution
    if plan.group is not None:
        convolve = partial(context_parallel_convolution, group=plan.group)
    result_TC, _ = convolve(x_TC, weight, plan.cu_seqlens, bias=bias, activation=activation)
    return result_TC.transpose(0, 1).unsqueeze(0)


def packed_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Apply the gated delta rule within the segments of the batch's plan, each from a state of zero.

    Args:
        query: `[1, T, K, D]`.
        key: `[1, T, K, D]`.
        value: `[1, T, V, E]`; V is a multiple of K.
        g: The log of the decay, `[1, T, V]`, or `[1, T, V, D]` with a gate per channel.
        beta: `[1, T, V]`.
        initial_state: None.
        output_final_state: False.
        use_qk_l2norm_in_kernel: Normalise queries and keys.
        kwargs: The keywords of the call; one of them is the plan.

    Returns:
        `[1, T, V, E]` and None.

    Raises:
        ValueError: The plan of the batch is missing, or a state is passed or asked for.
    """
    plan = required_plan("the delta rule", kwargs, key.shape[0], key.shape[1])
    _refuse_states(initial_state, output_final_state)
    q, k, v, decay, beta = (x.squeeze(0) for x in (query, key, value, g, beta))
    recur: Callable[..., Any] = gated_delta_rule
    if plan.group is not None:
        recur = partial(context_parallel_delta_rule, group=plan.group)
    output_TVE, _ = recur(q, k, v, decay, beta, plan.cu_seqlens, normalize=use_qk_l2norm_in_kernel)
    return output_TVE.unsqueeze(0), None


def packed_state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Apply the recurrence of Mamba-2 within the segments of the batch's plan, each from a state of zero.

    Args:
        hidden_states: `[1, T, V, E]`.
        dt: The steps, `[1, T, V]`, before bias, softplus and limits.
        A: `[V]`.
        B: `[1, T, G, D]`; G divides V.
        C: `[1, T, G, D]`.
        chunk_size: Without effect.
        D: The share of the input in the output, `[V]`.
        dt_bias: Added to dt, `[V]`.
        initial_states: None.
        dt_softplus: Apply softplus to dt.
        dt_limit: The smallest and the largest step.
        return_final_states: False.
        kwargs: The keywords of the call; one of them is the plan.

    Returns:
        `[1, T, V, E]`.

    Raises:
        ValueError: The plan of the batch is missing, or a state is passed or asked for.
    """
    plan = required_plan("the state space", kwargs, hidden_states.shape[0], hidden_states.shape[1])
    _refuse_states(initial_states, return_final_states)
    steps = dt.squeeze(0).to(torch.promote_types(dt.dtype, torch.float32))
    steps = steps if dt_bias is None else steps + dt_bias.to(steps.dtype)
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    recur: Callable[..., Any] = state_space_dual
    if plan.group is not None:
        recur = partial(context_parallel_state_space, group=plan.group)
    x, b, c = (tensor.squeeze(0) for tensor in (hidden_states, B, C))
    output_TVE, _ = recur(x, steps, A, b, c, plan.cu_seqlens, D_V=D)
    return output_TVE.unsqueeze(0)


def _refuse_states(initial: Tensor | None, final: bool) -> None:
    if initial is not None or final:
        raise ValueError("the recurrence of a packed batch starts from zero and keeps no state; pass no cache")


def _unfused(*args: Any, **kwargs: Any) -> None:
    """Return None, which transformers' mixers take for a missing fused kernel of convolution, recurrence and norm."""


# The functions that mixers of transformers call, and the functions that take their place.
_PACKED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": packed_convolution,
    "torch_chunk_gated_delta_rule": packed_delta_rule,
    "chunk_kimi_delta_attention": packed_delta_rule,
    "mamba2_chunk_scan": packed_state_space,
    "mamba2_split_conv1d_scan_combined": _unfused,
}


class PackedMixer:
    """Replaces the `forward` of a recurrent token mixer.

    Raises:
        ValueError: The `forward` of the mixer is not its class's.
    """

    def __init__(self, mixer: nn.Module) -> None:
        if "forward" in mixer.__dict__:
            raise ValueError(
                f"this {type(mixer).__name__} has another forward than its class (accelerate's hooks?), which the "
                "patch cannot take apart; patch the model before anything replaces forwards"
            )
        self.mixer = mixer
        names = [name for name in called_names(mixer) if name in _PACKED]
        self.packed = rebound(mixer, {name: _PACKED[name] for name in names})
        # transformers' functions in plain torch, without the kernels around them.
        self.single = rebound(mixer, {name: inspect.unwrap(own_function(mixer, name)) for name in names})

    def __repr__(self) -> str:
        return f"the packed form of {type(self.mixer).__name__}"

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the output `[1, T, H]` of the mixer for a packed batch."""
        output: Tensor = self.packed(hidden_states, **kwargs)
        plan: BatchPlan = kwargs[PLAN_KEYWORD]
        if (trace := plan.trace) is not None:
            operands = hidden_states.squeeze(0), output.squeeze(0)
            trace.record(self.mixer, lambda: self._prove(trace, *operands, plan, kwargs))
        return output

    def _prove(self, trace: Trace, x_TH: Tensor, output_TH: Tensor, plan: BatchPlan, kwargs: dict[str, Any]) -> float:
        """Compare the output with transformers' own code on each sequence alone; return the leak between sequences."""
        sequences = plan.gather(x_TH).tensor_split(plan.cu_seqlens[1:].tolist())
        alone = [self.single(x.unsqueeze(0), **kwargs).squeeze(0) for x in sequences if len(x)]
        trace.compare(self, plan.gather(output_TH), torch.cat(alone))

        def mix(x_TH: Tensor) -> Tensor:
            mixed: Tensor = self.packed(x_TH.unsqueeze(0), **kwargs)
            return mixed.squeeze(0)

        return measure_leak(mix, [x_TH], plan, gradients=True)


def find_mixers(backbone: nn.Module, npu: bool = False) -> list[nn.Module]:
    """Return the submodules whose `forward` calls a convolution or a recurrence that the patch replaces.

    Raises:
        ValueError: There are such modules, and the operators of an NPU are asked for.
    """
    mixers = [module for module in backbone.modules() if any(name in _PACKED for name in called_names(module))]
    if mixers and npu:
        raise ValueError(f"npu=True has no operator for {type(mixers[0]).__name__}; leave it out")
    return mixers
