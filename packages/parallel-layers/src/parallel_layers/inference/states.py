"""States of linear attention for the sequences of a cache, for prompts and for steps.

A state stands for all tokens of its sequence and cannot go back to an earlier one.

Shape legend: R rows of a pool, M sequences of a forward, k tokens of each in a step, C channels, W tokens of the
convolution's window, V heads, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from parallel_layers.linear_attention.cache import LayerStates
from parallel_layers.linear_attention.config import StateShape
from parallel_layers.linear_attention.convolution import short_convolution
from parallel_layers.linear_attention.delta_rule import gated_delta_rule
from parallel_layers.linear_attention.recurrent import convolution_step_, gated_delta_step_, state_space_step_
from parallel_layers.linear_attention.state_space import state_space_dual
from parallel_layers.module.autocast import wide


class StatePool:
    """R rows, each with the states of one sequence in all layers of linear attention; at first zero.

    Args:
        shapes: The shape of each such layer, by the layer's number in the cache.
        num_rows: R.
        dtype: The dtype of the convolutions' inputs; states are fp32 (fp64 for fp64).
        device: The device.
    """

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        self.shapes, self.num_rows, self._dtype = dict(shapes), num_rows, dtype
        self._pools: list[Tensor] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.inference_mode(False):  # later forwards may write outside of inference mode
            for shape in dict.fromkeys(shapes.values()):
                layers = [layer for layer, other in shapes.items() if other == shape]
                window, channels, *state = shape
                inputs = torch.zeros(len(layers), num_rows, window, channels, dtype=dtype, device=device)
                states = torch.zeros(len(layers), num_rows, *state, dtype=wide(dtype), device=device)
                self._pools += inputs, states
                self._layers |= dict(zip(layers, zip(inputs, states, strict=True), strict=True))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return sum(pool[:, :1].nbytes for pool in self._pools)

    def like(self, num_rows: int) -> StatePool:
        """Return a pool for the same layers with another number of rows."""
        device = self._pools[0].device if self._pools else None
        return StatePool(self.shapes, num_rows, self._dtype, device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of a layer's convolution `[R, W - 1, C]` and its states `[R, V, D, E]`."""
        return self._layers[number]

    def copy(self, rows: Sequence[int], source: StatePool, source_rows: Sequence[int]) -> None:
        """Copy rows of a pool for the same layers, or of this pool."""
        if rows and self._pools:
            targets, sources = torch.tensor([rows, source_rows], device=self._pools[0].device)
            for pool, other in zip(self._pools, source._pools, strict=True):
                pool[:, targets] = other[:, sources]

    def clear(self, rows: Sequence[int]) -> None:
        """Set rows to zero."""
        if rows and self._pools:
            targets = torch.tensor(rows, device=self._pools[0].device)
            for pool in self._pools:
                pool.index_fill_(1, targets, 0)


class Checkpoint(NamedTuple):
    """A sequence as it was: the row of its states, its blocks, and its number of tokens."""

    row: int
    blocks: list[int]
    length: int


class Segments(NamedTuple):
    """The segments of a forward that have tokens: their rows `[M]` and boundaries `[M+1]` int32.

    The first `num_sequences` segments belong to sequences, the others are padding, which reads a row of zeros.
    """

    rows: Tensor
    cu_seqlens: Tensor
    num_sequences: int

    @classmethod
    def of(cls, numbers: Sequence[int], cu_seqlens: Tensor, zeros: int) -> Segments:
        """Return the segments of these numbers, from `zeros` on padding; `zeros` is also the row of zeros."""
        if not numbers:  # one segment of padding, without tokens
            return cls(cu_seqlens.new_tensor([zeros]).long(), cu_seqlens.new_zeros(2), 0)
        rows = cu_seqlens.new_tensor([min(n, zeros) for n in numbers]).long()
        return cls(rows, cu_seqlens, sum(n < zeros for n in numbers))


class PromptStates(LayerStates):
    """Any number of tokens for each of M sequences, which go on with the states of their rows."""

    def __init__(self, states: tuple[Tensor, Tensor], segments: Segments) -> None:
        self._inputs, self._states = states
        self._segments = segments

    def convolve(
        self, x: Tensor, weight: Tensor, cu_seqlens: Tensor, *, bias: Tensor | None, activation: str | None
    ) -> tuple[Tensor, None]:
        """See `LayerStates`."""
        return self._run(self._inputs, short_convolution, x, weight, bias=bias, activation=activation)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, *, normalize: bool,
        backend: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """See `LayerStates`."""
        tensors = q, k, v, log_decay, beta
        return self._run(self._states, gated_delta_rule, *tensors, normalize=normalize, backend=backend)

    def state_space(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, *, D_V: Tensor
    ) -> tuple[Tensor, None]:
        """See `LayerStates`."""
        return self._run(self._states, state_space_dual, x, dt, A, B, C, D_V=D_V)

    def _run(
        self, pool: Tensor, operator: Callable[..., tuple[Tensor, Tensor | None]], *tensors: Tensor, **options: object
    ) -> tuple[Tensor, None]:
        rows, bounds, count = self._segments
        out, last = operator(*tensors, bounds, **options, initial_state=pool[rows], output_state=True)
        assert last is not None
        pool[rows[:count]] = last[:count].to(pool.dtype)
        return out, None


# (states `[R, ...]`, tensors `[M, ...]`, first=, live_M=) -> outputs `[M, ...]`
Step = Callable[..., Tensor]


class Trial(NamedTuple):
    """A step of k tokens that has left its states as they were, with its tensors of each token."""

    pool: Tensor
    step: Step
    tokens: list[tuple[Tensor, ...]]


class StepStates(LayerStates):
    """k tokens for each of M sequences, from row `first` on. With k > 1 states stay; see `DecodeSteps.accept`.

    Args:
        states: The layer's part of a pool.
        first: The first of the M rows.
        tokens: k.
        live: `[M]` bool, the rows that change; None: all.
        trials: A list that takes the steps of several tokens.
    """

    def __init__(
        self,
        states: tuple[Tensor, Tensor],
        first: int,
        tokens: int,
        live: Tensor | None,
        trials: list[Trial],
    ) -> None:
        self._inputs, self._states = states
        self._first, self._tokens, self._live, self._trials = first, tokens, live, trials

    def convolve(
        self, x: Tensor, weight: Tensor, cu_seqlens: Tensor, *, bias: Tensor | None, activation: str | None
    ) -> tuple[Tensor, None]:
        """See `LayerStates`."""
        step = partial(convolution_step_, weight_CW=weight, bias=bias, activation=activation)
        return self._run(self._inputs, step, x)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, cu_seqlens: Tensor, *, normalize: bool,
        backend: str,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """See `LayerStates`."""
        return self._run(self._states, partial(gated_delta_step_, normalize=normalize), q, k, v, log_decay, beta)

    def state_space(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, *, D_V: Tensor
    ) -> tuple[Tensor, None]:
        """See `LayerStates`."""

        def step(states: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, **rows: object) -> Tensor:
            return state_space_step_(states, x, dt, A, b, c, D_V=D_V, **rows)  # type: ignore[arg-type]

        return self._run(self._states, step, x, dt, B, C)

    def _run(self, pool: Tensor, step: Step, *tensors: Tensor) -> tuple[Tensor, None]:
        if self._tokens == 1:
            return step(pool, *tensors, first=self._first, live_M=self._live), None
        by_token = [x.unflatten(0, (-1, self._tokens)).transpose(0, 1).contiguous() for x in tensors]
        trial = Trial(pool, step, list(zip(*by_token, strict=True)))
        self._trials.append(trial)
        states = pool[self._first : self._first + by_token[0].shape[1]].clone()
        return torch.stack([step(states, *token) for token in trial.tokens], 1).flatten(0, 1), None
