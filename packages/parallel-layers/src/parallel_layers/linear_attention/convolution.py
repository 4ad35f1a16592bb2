"""The short causal convolution of each channel, over packed sequences.

Shape legend: T tokens, N sequences, C channels, W tokens of the window.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from parallel_layers.data.boundaries import check_boundaries
from parallel_layers.distributed.async_collectives import cast
from parallel_layers.linear_attention.backends import choose_backend
from parallel_layers.linear_attention.cache import LayerStates
from parallel_layers.linear_attention.chunks import sequence_of_tokens
from parallel_layers.linear_attention.fla import fla_convolution
from parallel_layers.linear_attention.shared_heads import SharedHeads
from parallel_layers.module.autocast import autocast_off, wide
from parallel_layers.module.initialization import as_linear, fill_parameter_
from parallel_layers.module.parallel_module import WideModule, wide_dtype
from parallel_layers.module.seeds import shared_seed
from parallel_layers.module.sharding import divide_heads, set_sharding, shard_heads, shared_range


def short_convolution(
    x_TC: Tensor,
    weight_CW: Tensor,
    cu_seqlens: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convolve each channel with its own weights, inside each sequence of a packed batch.

        y_t = act(bias + Σ_w weight_w · x_{t - (W - 1) + w}),   w = 0 ... W - 1

    Tokens before a sequence are those of the initial state, or zero. Sequences can be shorter than the window. The sums
    are fp32 (fp64 for fp64 input). No communication, and no read of `cu_seqlens` on the host of a GPU. On CUDA the
    kernels of fla-core compute it where they are installed.

    Args:
        x_TC: `[T, C]`.
        weight_CW: `[C, W]`, any dtype.
        cu_seqlens: `[N+1]` int32 boundaries of the sequences, on the tensors' device.
        bias: `[C]`.
        activation: "silu", or None for none.
        initial_state: `[N, W - 1, C]`, the inputs before each sequence, in order.
        output_state: Return the last inputs of each sequence, the initial state of its continuation.

    Returns:
        The outputs `[T, C]` in x's dtype, and the states `[N, W - 1, C]` with `output_state`, else None.

    Raises:
        ValueError: Shapes disagree, or the activation is unknown.
    """
    check_boundaries(cu_seqlens, len(x_TC), least=2)
    channels, window = weight_CW.shape
    states = (len(cu_seqlens) - 1, window - 1, channels)
    if x_TC.shape[1:] != (channels,):
        raise ValueError(f"x {tuple(x_TC.shape)} must be [T, C] with C = {channels} of the weight [C, W]")
    if initial_state is not None and initial_state.shape != states:
        raise ValueError(f"initial_state {tuple(initial_state.shape)} must be [N, W - 1, C] = {states}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation={activation!r} is unknown; use 'silu' or None")
    with autocast_off(x_TC):
        if initial_state is None and not output_state:
            return _convolve(x_TC, weight_CW, bias, cu_seqlens, activation), None
        x, bounds, places = _with_states(x_TC, initial_state, cu_seqlens, window - 1)
        out = _convolve(x, weight_CW, bias, bounds, activation)[places]
        last = bounds[1:, None] + torch.arange(1 - window, 0, device=x.device)
        return out, x[last] if output_state else None


def _with_states(
    x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Put states in front of their sequences: `[T + N size, C]`, the boundaries, and the place of each token in it."""
    num_tokens, num_sequences = len(x), len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = x.new_zeros(num_sequences, size, x.shape[1])
    bounds = cu_seqlens + size * torch.arange(len(cu_seqlens), dtype=torch.int32, device=x.device)
    rows = torch.arange(num_tokens + num_sequences * size, device=x.device)
    owner = sequence_of_tokens(bounds, len(rows))
    offset = rows - bounds[owner]
    source = torch.where(offset < size, num_tokens + owner * size + offset, rows - (owner + 1) * size)
    tokens = torch.arange(num_tokens, device=x.device)
    places = tokens + size * (sequence_of_tokens(cu_seqlens, num_tokens) + 1)
    return torch.cat([x, initial_state.flatten(0, 1).to(x.dtype)])[source], bounds, places


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str | None) -> Tensor:
    # The convolution of fla needs what fla's forward needs, and its backward works everywhere.
    if len(x) and choose_backend("auto", x.device.type, x.dtype, 1) == "fla":
        return fla_convolution(x, weight, bias, cu_seqlens, activation)
    positions = torch.arange(len(x), device=x.device) - cu_seqlens[sequence_of_tokens(cu_seqlens, len(x))]
    out: Tensor = _Convolution.apply(x, weight, bias, positions[:, None], activation == "silu")
    return out


class _Convolution(torch.autograd.Function):
    """The convolution of tokens at `positions [T, 1]` in their sequences; saves only its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.silu = silu
        out = _sums(x, weight, bias, positions)
        return cast(F.silu(out, inplace=True) if silu else out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight, bias, positions = ctx.saved_tensors
        wide_x, taps = (tensor.to(wide(x.dtype)) for tensor in (x, weight))
        gradient = gradient.to(wide_x.dtype)
        if ctx.silu:
            sums = _sums(x, weight, bias, positions)
            sigmoid = sums.sigmoid()
            gradient = gradient * sigmoid * (1 + sums * (1 - sigmoid))
        d_x = gradient * taps[:, -1]
        d_taps = [(gradient * wide_x).sum(0)]
        for back in range(1, taps.shape[1]):
            of_earlier = gradient[back:].masked_fill(positions[back:] < back, 0)
            earlier = wide_x[: len(of_earlier)]
            d_x[: len(of_earlier)] += of_earlier * taps[:, -1 - back]
            d_taps.append((of_earlier * earlier).sum(0))
        d_bias = None if bias is None else cast(gradient.sum(0), bias.dtype)
        return cast(d_x, x.dtype), cast(torch.stack(d_taps[::-1], 1), weight.dtype), d_bias, None, None


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """Return the convolution before the activation, `[T, C]`, in fp32 or fp64."""
    x, taps = (tensor.to(wide(x.dtype)) for tensor in (x, weight))
    out = x * taps[:, -1]
    if bias is not None:
        out += bias
    for back in range(1, taps.shape[1]):
        later = out[back:]
        later += (x[: len(later)] * taps[:, -1 - back]).masked_fill_(positions[back:] < back, 0)
    return out


class ShortConvolution(WideModule):
    """`short_convolution` with parameters: `weight [C/tp, 1, W]` and with `bias` `bias [C/tp]`, fp32 beside any dtype.

    Args:
        parts: The heads and the head size of consecutive parts, such as queries, keys and values; each is divided over
            the group by its heads. With more ranks than heads of a part several ranks hold the channels of a head, and
            the backward all-reduces their gradients.
        window: W.
        bias: The convolution has a bias.
        activation: See `short_convolution`.
        convolve: `short_convolution`, or its form over context-parallel ranks.
        group: Tensor-parallel group; None: all channels.
        dtype, device: Of the layer; the parameters are at least fp32.

    Raises:
        ValueError: The group's size does not divide the heads of a part, or is not divided by them.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        window: int,
        *,
        bias: bool = False,
        activation: str | None = None,
        convolve: Callable[..., tuple[Tensor, Tensor | None]] = short_convolution,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.convolve = activation, convolve
        tp = 1 if group is None else group.size()
        self.shared = shared_range(parts, tp)
        self.shared_heads = SharedHeads(group, tp if self.shared is None else tp // self.shared[2])
        channels = sum(divide_heads(heads, heads, tp, "heads") * size for heads, size in parts)
        sharding = shard_heads(parts, group, 0)
        self.weight = nn.Parameter(torch.empty(channels, 1, window, dtype=wide_dtype(dtype), device=device))
        set_sharding(self, "weight", sharding)
        bias_C = nn.Parameter(torch.empty(channels, dtype=wide_dtype(dtype), device=device)) if bias else None
        self.register_parameter("bias", bias_C)
        set_sharding(self, "bias", sharding if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as torch's convolution does, the same on ranks with equal seeds, and set the bias to 0."""
        fill_parameter_(self, "weight", shared_seed(), as_linear(self.weight.shape[-1]))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, cu_seqlens: Tensor, states: LayerStates | None = None) -> Tensor:
        """`[T, C/tp]` -> `[T, C/tp]`; tokens go on with `states`."""
        weight = self._with_shared_gradient(self.weight)
        bias = None if self.bias is None else self._with_shared_gradient(self.bias)
        convolve = self.convolve if states is None else states.convolve
        out, _ = convolve(x, weight.squeeze(1), cu_seqlens, bias=bias, activation=self.activation)
        return out

    def _with_shared_gradient(self, parameter: Tensor) -> Tensor:
        """Return a parameter whose gradient is summed over the ranks that hold the same channels."""
        if self.shared is None:
            return parameter
        first, stop, _ = self.shared
        shared = self.shared_heads.copy(parameter[first:stop])
        return torch.cat([parameter[:first], shared, parameter[stop:]])
