"""Huawei Ascend: fused operators of torch_npu replace a model's own arithmetic, one instance at a time.

`patch(model, npu=True)` swaps RMSNorm (`npu_rms_norm`), the gate of SwiGLU MLPs (`npu_swiglu`), the half-rotation of
rotary embeddings (`npu_rotary_mul`), the GEMMs of routed experts (`npu_grouped_matmul`) and packed attention
(`npu_fusion_attention`). Only this option imports torch_npu. Norms, gates and rotations are compared with the code that
they replace on random numbers first. Other forms (an interleaved rotation, experts with biases) keep their own code.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.integrations.moe import ExpertsInterface

from hf_patches.backbone import compute_device
from hf_patches.batch import BatchPlan
from hf_patches.swaps import ROTATE, Swap, called_names, own_function, rebound

EXPERTS_NAME = "hf_patches_npu"
_OPERATORS = ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_grouped_matmul", "npu_fusion_attention")
# The causal mask of the attention operator, in one size for all lengths; True hides an entry.
_MASK_SIZE = 2048


def load_torch_npu() -> Any:
    """Return the torch_npu module; raise ImportError if it is absent or lacks an operator."""
    try:
        module = importlib.import_module("torch_npu")  # only on Ascend machines
    except ImportError as error:
        raise ImportError("npu=True needs the package torch_npu (Huawei Ascend), which is not installed") from error
    if missing := [name for name in _OPERATORS if not hasattr(module, name)]:
        raise ImportError(f"torch_npu has no {', '.join(missing)}; install a newer torch_npu for npu=True")
    return module


def find_swaps(backbone: nn.Module) -> Iterator[Swap]:
    """Yield the replacements for one text backbone, whose parameters need values on the device of the operators.

    Raises:
        RuntimeError: An operator differs from the code that it replaces.
    """
    ops, device = load_torch_npu(), compute_device(backbone)
    if device.type == "meta":
        raise ValueError("npu=True compares its operators with the model: give the parameters values first")
    for module in backbone.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), Tensor):
            norm = _RMSNorm(module, ops, unit_offset=kind.startswith("Gemma"))
            _prove(module, norm.forward)
            yield Swap(module, norm.forward, "npu_rms_norm")
        elif kind.endswith("MLP") and _is_swiglu(module):
            mlp = _SwiGLU(module, ops)
            _prove(module, mlp.forward)
            yield Swap(module, mlp.forward, "npu_swiglu")
        elif (forward := _rotated(module, ops, device)) is not None:
            yield Swap(module, forward, "npu_rotary_mul")


def _prove(module: nn.Module, swapped: Callable[[Tensor], Tensor]) -> None:
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor):  # this rank has a part only
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, parameter.shape[-1], generator=generator).to(parameter)
    with torch.no_grad():
        expected, actual = module(x), swapped(x)
    tolerance = 64 * torch.finfo(parameter.dtype).eps * expected.abs().max().item()
    error = (actual - expected).abs().max().item()
    if not error <= tolerance:
        raise RuntimeError(f"the NPU operator for {type(module).__name__} is off by {error:.3g} from the model's own")


@dataclass
class _RMSNorm:
    module: Any
    ops: Any
    unit_offset: bool

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.module.weight if self.unit_offset else self.module.weight
        epsilon = getattr(self.module, "variance_epsilon", None) or self.module.eps
        normalized: Tensor = self.ops.npu_rms_norm(x, weight.to(x.dtype), epsilon=epsilon)[0]
        return normalized


def _is_swiglu(module: nn.Module) -> bool:
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    fused = isinstance(getattr(module, "gate_up_proj", None), nn.Linear)
    separate = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj"))
    return isinstance(module.down_proj, nn.Linear) and (fused or separate) and _is_silu(activation)


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


@dataclass
class _SwiGLU:
    module: Any
    ops: Any

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.module, "gate_up_proj"):
            gate_and_up = self.module.gate_up_proj(x)
        else:
            gate_and_up = torch.cat([self.module.gate_proj(x), self.module.up_proj(x)], dim=-1)
        result: Tensor = self.module.down_proj(self.ops.npu_swiglu(gate_and_up, dim=-1))
        return result


@dataclass
class _Rotation:
    """Rotate the first C dims of query and key, C being the size of cos and sin, as `apply_rotary_pos_emb` does."""

    ops: Any

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        rotated = self.ops.npu_rotary_mul(x[..., :size], cos.to(x.dtype), sin.to(x.dtype))
        return torch.cat([rotated, x[..., size:]], dim=-1) if size < x.shape[-1] else rotated


def _rotated(module: nn.Module, ops: Any, device: torch.device) -> Callable[..., Any] | None:
    """Return the module's forward with the operator's rotation, if it calls the half-rotation of transformers."""
    if ROTATE not in called_names(module):
        return None
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 5, 8), (1, 2, 5, 8), (1, 5, 4))
    q, k, angles = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    angles = torch.cat([angles, angles], dim=-1)
    rotation, arguments = _Rotation(ops), (q, k, angles.cos(), angles.sin())
    expected, results = own_function(module, ROTATE)(*arguments), rotation(*arguments)
    if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, results, strict=True)):
        return None
    return rebound(module, {ROTATE: rotation})


def register_experts() -> None:
    """Enter the function for routed experts into the registry of transformers."""
    ExpertsInterface.register(EXPERTS_NAME, experts_forward)


def can_group(experts: nn.Module) -> bool:
    """Return whether routed experts have the form of `experts_forward`: gate and up side by side, no biases, SiLU."""
    flags = {"is_concatenated": True, "has_gate": True, "has_bias": False, "is_transposed": False}
    return all(getattr(experts, name, None) is value for name, value in flags.items()) and _is_silu(
        getattr(experts, "act_fn", None)
    )


def experts_forward(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute routed experts by two grouped GEMMs: hidden `[T, H]`, choices and weights `[T, k]` to `[T, H]`."""
    ops = load_torch_npu()
    count, choices = top_k_index.shape[-1], top_k_index.reshape(-1)
    order = choices.argsort(stable=True)
    sizes = torch.bincount(choices, minlength=experts.num_experts)
    gate_and_up = _GroupedMatmul.apply(hidden[order // count], experts.gate_up_proj.transpose(1, 2), sizes, ops)
    out = _GroupedMatmul.apply(ops.npu_swiglu(gate_and_up, dim=-1), experts.down_proj.transpose(1, 2), sizes, ops)
    weighted = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, order // count, weighted.to(hidden.dtype))


class _GroupedMatmul(torch.autograd.Function):
    """Compute y = x W_e for the rows of each group e: x `[N, A]`, W `[E, A, B]`, group sizes `[E]` to `[N, B]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(x, weight, sizes)
        ctx.ops = ops
        return _grouped(ops, x, weight, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        d_x = _grouped(ctx.ops, grads[0], weight.transpose(1, 2), sizes)
        # group_type 2 groups the summed dim: one GEMM per group, of the transposed rows and their gradients.
        options = {"group_list": sizes, "group_list_type": 1, "split_item": 3, "group_type": 2}
        d_weight = ctx.ops.npu_grouped_matmul([x.T], [grads[0]], bias=None, **options)[0]
        return d_x, d_weight, None, None


def _grouped(ops: Any, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    options = {"group_list": sizes, "group_list_type": 1, "split_item": 2, "group_type": 0}
    product: Tensor = ops.npu_grouped_matmul([x], [weight], bias=None, **options)[0]
    return product


def npu_attention(
    q_TQD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    plan: BatchPlan,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute causal attention within the segments of a plan by `npu_fusion_attention` in packed layout ("TND")."""
    if softcap is not None or sinks is not None:
        raise ValueError("npu_fusion_attention has neither soft-cap nor sinks; patch this model with npu=False")
    ops = load_torch_npu()
    size, value_size = q_TQD.shape[-1], v_TKD.shape[-1]
    hidden = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=q_TQD.device).triu(1)
    ends_q, ends_k = plan.segment_ends
    # Mode 3 aligns the causal mask to the last key; mode 4 adds a band of earlier keys.
    band = {"sparse_mode": 3} if window is None else {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    output: Tensor = ops.npu_fusion_attention(
        q_TQD,
        k_TKD,
        functional.pad(v_TKD, (0, size - value_size)),
        q_TQD.shape[1],
        "TND",
        atten_mask=hidden,
        scale=size**-0.5 if scale is None else scale,
        keep_prob=1.0,
        actual_seq_qlen=ends_q,
        actual_seq_kvlen=ends_k,
        **band,
    )[0]
    return output[..., :value_size]
