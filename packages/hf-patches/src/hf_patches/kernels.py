"""One kernel instead of a chain of small kernels: RMSNorm, rotary embedding and SwiGLU on CUDA.

transformers computes each by plain torch in several passes over memory; `parallel_layers` has kernels with one pass
each way. `patch(model)` installs the kernels, one instance at a time. They run where Triton takes the tensors: on CUDA,
in fp32, fp16 and bf16. Elsewhere, and for tensors of different dtypes, the model's own code runs.

A kernel stays only if it computes the same as the code that it replaces. First results and gradients are compared in
fp32 on random numbers, for each form of a kernel (a norm with 1 + weight, a rotation of neighbouring dims). The form
that agrees is taken; a module that agrees with no form keeps its own code, and the report names it. Then the start-up
probe computes both on the model's own weights and angles.

Kernel and own code differ by rounding only. The kernels compute in fp32 and round once, which is the smaller error in
bf16: Llama's norm rounds x / rms(x) and then the product with the weight, its rotation rounds both products and their
sum, its MLP rounds silu(gate) and then the product with up.

The decoder layer's own code adds the residual; no kernel fuses that sum with the norm.

Shapes: B batch, S tokens of a row, T = B S; H hidden, Q query and K key heads of D dims, C columns of cos and sin.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hf_patches.backbone import compute_device
from hf_patches.call import CallState
from hf_patches.proofs import ModuleView, agree, normal
from hf_patches.swaps import ROTATE, Swap, called_names, own_function, rebound
from parallel_layers.kernels import fused_swiglu, use_triton
from parallel_layers.mlp import gated
from parallel_layers.norm import rms_norm
from parallel_layers.rotary import rotate_queries_and_keys

_ANY_ROTATION = re.compile(r"^apply_\w*rotary")
_EPSILONS = ("variance_epsilon", "eps")


class _Kernel:
    """Replaces `own`: computes `fused` if its kernel runs on the inputs.

    During the start-up probe, both are computed and their difference is recorded.
    """

    def __init__(self, original: Callable[..., Any], state: CallState) -> None:
        self.original, self.state = original, state

    def __repr__(self) -> str:
        return f"the kernel for {self.original.__qualname__} (which kernels=False leaves out)"

    def takes(self, *inputs: Tensor) -> bool:
        """Return whether the kernel runs on these tensors and returns the dtype of `own`."""
        return use_triton(*inputs) and not any(isinstance(x, DTensor) for x in inputs)

    def fused(self, *inputs: Tensor) -> Any:
        """Compute the result by the kernel."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the result of `own`, by the kernel if it runs on the inputs."""
        if not self.takes(*inputs):
            return self.original(*inputs)
        result = self.fused(*inputs)
        if self.state.trace is not None:
            self.state.trace.compare(self, result, self.original(*inputs))
        return result


class _Norm(_Kernel):
    def __init__(self, module: nn.Module, state: CallState, epsilon: str, unit_offset: bool) -> None:
        super().__init__(MethodType(type(module).forward, module), state)
        self.module: Any = module
        self.epsilon, self.unit_offset = epsilon, unit_offset

    def takes(self, *inputs: Tensor) -> bool:
        weight = self.module.weight
        return weight.dtype == inputs[0].dtype and super().takes(*inputs, weight)

    def fused(self, *inputs: Tensor) -> Tensor:
        epsilon = getattr(self.module, self.epsilon)
        return rms_norm(inputs[0], self.module.weight, eps=epsilon, unit_offset=self.unit_offset)


class _SwiGLU(_Kernel):
    def __init__(self, module: nn.Module, state: CallState) -> None:
        super().__init__(MethodType(type(module).forward, module), state)
        self.module: Any = module

    def fused(self, *inputs: Tensor) -> Any:
        return _swiglu(self.module, inputs[0])


def _swiglu(mlp: Any, x: Tensor) -> Any:
    if hasattr(mlp, "gate_up_proj"):
        return mlp.down_proj(gated("silu", mlp.gate_up_proj(x)))
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(fused_swiglu(gate, up) if use_triton(gate, up) else functional.silu(gate) * up)


def _identity(x: Tensor) -> Tensor:
    return x


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)


def _spread(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)


def _gathered(x: Tensor) -> Tensor:
    return _twice(x[..., ::2])


@dataclass(frozen=True)
class _Form:
    """A form of rotation: the dims that make a pair, and the order of the pairs' angles in cos and sin `[..., C]`.

    `table` turns one number per pair into such a row. `halves` turns such a row into the row that the kernel reads,
    with each number in both halves.
    """

    interleaved: bool
    table: Callable[[Tensor], Tensor]
    halves: Callable[[Tensor], Tensor]


_FORMS = (
    _Form(interleaved=False, table=_twice, halves=_identity),  # Llama and most others
    _Form(interleaved=False, table=_identity, halves=_twice),  # gpt-oss
    _Form(interleaved=True, table=_twice, halves=_identity),  # GLM-4
    _Form(interleaved=True, table=_spread, halves=_gathered),  # Cohere 2, GLM-4V
)


def _rotate(form: _Form, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`: q [B, Q, S, D], k [B, K, S, D], cos and sin [B or 1, S, C]."""
    rows = [form.halves(x).expand(len(q), -1, -1).flatten(0, 1) for x in (cos, sin)]
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    turned = rotate_queries_and_keys(tokens[0], tokens[1], rows[0], rows[1], interleaved=form.interleaved)
    q, k = (x.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2) for x in turned)
    return q, k


class _Rotation(_Kernel):
    def __init__(self, original: Callable[..., Any], state: CallState, form: _Form, device: torch.device) -> None:
        super().__init__(original, state)
        self.form = form
        # Some models keep cos and sin in fp32 and still return the dtype of queries and keys.
        narrow = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16, device=device)
        wide = form.table(torch.zeros(1, 1, 2, dtype=torch.float32, device=device))
        self.keeps_dtype: bool = original(narrow, narrow, wide, wide)[0].dtype == torch.bfloat16

    def takes(self, *inputs: Tensor) -> bool:
        q, k, cos, _ = inputs
        return q.dtype == k.dtype and (self.keeps_dtype or cos.dtype == q.dtype) and super().takes(*inputs)

    def fused(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _rotate(self.form, *inputs)


@dataclass(frozen=True)
class UnfusedModule:
    """A module that keeps its own code, and a description of that code."""

    module: nn.Module
    what: str


def find_kernels(backbone: nn.Module, state: CallState) -> Iterator[Swap | UnfusedModule]:
    """Yield a replacement, or the kept code, for each norm, MLP and rotation of a text backbone.

    Only shapes of parameters are read, so parameters may be sharded or on the meta device.
    """
    proofs = _Proofs(compute_device(backbone))
    for module in backbone.modules():
        kind = type(module).__name__
        if "Norm" in kind and isinstance(getattr(module, "weight", None), Tensor):
            yield _replace_norm(module, state, proofs)
        elif kind.endswith("MLP") and isinstance(getattr(module, "down_proj", None), nn.Module):
            yield _replace_mlp(module, state, proofs)
        elif any(_ANY_ROTATION.match(name) for name in called_names(module)):
            yield _replace_rotation(module, state, proofs)


def _replace_norm(module: nn.Module, state: CallState, proofs: "_Proofs") -> Swap | UnfusedModule:
    operation = "RMSNorm"
    epsilon = next((name for name in _EPSILONS if hasattr(module, name)), None)
    takes_gate = len(inspect.signature(type(module).forward).parameters) > 2
    unit_offset = None if epsilon is None or takes_gate or _is_replaced(module) else proofs.unit_offset(module, epsilon)
    if epsilon is None or unit_offset is None:
        return UnfusedModule(module, operation)
    return Swap(module, _Norm(module, state, epsilon, unit_offset).forward, f"{operation} in one kernel on CUDA")


def _replace_mlp(module: nn.Module, state: CallState, proofs: "_Proofs") -> Swap | UnfusedModule:
    operation = "SwiGLU"
    if _is_replaced(module) or not proofs.is_swiglu(module):
        return UnfusedModule(module, operation)
    return Swap(module, _SwiGLU(module, state).forward, f"{operation} in one kernel on CUDA")


def _replace_rotation(module: nn.Module, state: CallState, proofs: "_Proofs") -> Swap | UnfusedModule:
    operation = "rotary embedding"
    other_rotations = [name for name in called_names(module) if _ANY_ROTATION.match(name) and name != ROTATE]
    form = None if other_rotations or _is_replaced(module) else proofs.rotation(module)
    if form is None:
        return UnfusedModule(module, operation)
    # A deep copy of the model shares this object, as it shares the function that this object replaces.
    rotation = _Rotation(own_function(module, ROTATE), state, form, proofs.device)
    return Swap(module, rebound(module, {ROTATE: rotation.forward}), f"{operation} in one kernel on CUDA")


def _is_replaced(module: nn.Module) -> bool:
    """Return whether this instance has another `forward` than its class."""
    return "forward" in module.__dict__


class _Proofs:
    """Compares candidates with a module's own code, once for each class of modules with equal numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.results: dict[tuple[Any, ...], Any] = {}

    def unit_offset(self, norm: Any, epsilon: str) -> bool | None:
        """Return whether the norm multiplies by 1 + weight instead of weight; None if it is no RMSNorm."""
        eps, shape = getattr(norm, epsilon), norm.weight.shape
        if len(shape) != 1:
            return None
        original = _own_norm(norm)
        inputs = self._random((3, *shape), shape)
        return self._first_agreeing(
            (type(norm), eps, shape),
            (False, True),
            lambda offset: agree(original, lambda x, weight: rms_norm(x, weight, eps=eps, unit_offset=offset), inputs),
        )

    def is_swiglu(self, mlp: Any) -> bool:
        """Return whether the MLP computes down(silu(gate(x)) * up(x)), for any projections."""
        fused = hasattr(mlp, "gate_up_proj")
        if not fused and not (hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj")):
            return False
        inputs = self._random((3, 8), (12, 8), (8, 6))
        activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
        result: bool | None = self._first_agreeing(
            (type(mlp), type(activation)),
            (True,),
            lambda _: agree(_mlp(mlp, type(mlp).forward, fused), _mlp(mlp, _swiglu, fused), inputs),
        )
        return result is not None

    def rotation(self, attention: nn.Module) -> _Form | None:
        """Return the form of the rotation that an attention calls."""
        original = own_function(attention, ROTATE)

        def agrees(form: _Form) -> bool:
            q, k, full_table, partial_table = self._random((2, 3, 5, 8), (2, 2, 5, 8), (1, 5, 4), (2, 5, 2))
            full_table, partial_table = (form.table(angles) for angles in (full_table, partial_table))
            # With fewer angles than pairs the last dims stay unrotated, in models that allow it.
            return agree(
                lambda q, k: original(q, k, full_table.cos(), full_table.sin()),
                lambda q, k: _rotate(form, q, k, full_table.cos(), full_table.sin()),
                [q, k],
            ) and agree(
                lambda q, k: original(q, k, partial_table.cos(), partial_table.sin()),
                lambda q, k: _rotate(form, q, k, partial_table.cos(), partial_table.sin()),
                [q, k],
                unless_refused=True,
            )

        return self._first_agreeing((original,), _FORMS, agrees)

    def _first_agreeing(self, key: tuple[Any, ...], candidates: tuple[Any, ...], agrees: Callable[[Any], bool]) -> Any:
        if key not in self.results:
            self.results[key] = next((candidate for candidate in candidates if agrees(candidate)), None)
        return self.results[key]

    def _random(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [normal(shape, generator).to(self.device) for shape in shapes]


def _own_norm(norm: nn.Module) -> Callable[..., Any]:
    return lambda x, weight: type(norm).forward(ModuleView(norm, weight=weight), x)


def _mlp(mlp: nn.Module, forward: Callable[..., Any], fused: bool) -> Callable[..., Any]:
    """Return a function of x, [gate; up] `[2I, H]` and down `[H, I]` that runs `forward` with these projections."""

    def call(x: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        gate, up = gate_up.chunk(2)
        weights = {"gate_up_proj": gate_up} if fused else {"gate_proj": gate, "up_proj": up}
        weights["down_proj"] = down
        return forward(
            ModuleView(mlp, training=True, **{name: _product(weight) for name, weight in weights.items()}), x
        )

    return call


def _product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.unsqueeze(-2) * weight).sum(-1)  # a GEMM could run in TF32
