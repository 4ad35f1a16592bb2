"""`with_float8`: GEMMs in FP8, of linears by Transformer Engine (the extra `te`), of experts by `moe.float8`.

Shape suffixes: T tokens, I input features, O output features.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel_layers.kernels.float8 import FLOAT8, PADDING
from parallel_layers.kernels.runtime import device_type, planning
from parallel_layers.linear.block_scaled import SCALES
from parallel_layers.linear.layers import ColumnLinear, LinearLayer, RowParallelLinear
from parallel_layers.linear.products import Product
from parallel_layers.module.shared_weights import Model, view_of
from parallel_layers.moe.experts import GroupedExperts
from parallel_layers.moe.float8 import float8_grouped_linear, why_not_float8_experts


class _Recipe(NamedTuple):
    name: str  # of the class in `transformer_engine.common.recipe`
    available: str  # the function of `transformer_engine.pytorch` that says whether the GPU can
    multiple: int  # divisor of every dim of a GEMM


# Recipes without a history: with a history, a GEMM would depend on earlier GEMMs.
RECIPES = {
    "current": _Recipe("Float8CurrentScaling", "is_fp8_available", 16),
    "block": _Recipe("Float8BlockScaling", "is_fp8_block_scaling_available", 128),
    "mxfp8": _Recipe("MXFP8BlockScaling", "is_mxfp8_available", 32),
}


def why_not_float8(recipe: str) -> str | None:
    """Return why this process cannot compute in FP8; None when it can. Imports Transformer Engine."""
    if find_spec("transformer_engine") is None:
        return "it needs the transformer-engine package (extra parallel-layers[te])"
    try:
        import transformer_engine.pytorch as te  # an optional extra
    except (ImportError, OSError) as error:  # libraries of versions that do not match
        return f"the transformer-engine package does not load: {type(error).__name__}: {error}"
    able, reason = getattr(te, RECIPES[recipe].available)(return_reason=True)
    return None if able else str(reason)


def require_float8(recipe: str) -> None:
    """Raise ValueError if a recipe is unknown, or this process cannot compute in it."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; use one of {', '.join(RECIPES)}")
    if (reason := why_not_float8(recipe)) is not None:
        raise ValueError(f"recipe={recipe!r} cannot be used: {reason}")


def with_float8(
    model: Model, recipe: str = "current", *, where: Callable[[str, nn.Module], bool] | None = None
) -> Model:
    """Return the same model with the GEMMs of its parallel linears and experts in FP8: forward, dx and dW.

    The parameters stay in their dtype and are rounded to FP8 for each GEMM. Collectives, biases and sums over the
    ranks are as without FP8, with parts in the activations' dtype. Tokens are padded with zeros to a multiple that the
    recipe needs.

    The result is a view (`shared_weights.view_of`), for training and inference, which shares the parameters of `model`.
    `model` is not changed. Each linear says in `float8` whether it computes in FP8, and so do `GroupedExperts`. Linears
    stay in their dtype when `where` excludes them, when their sizes do not divide by the recipe's 16 ("current"), 32
    ("mxfp8") or 128 ("block"), when they have key-value heads on several ranks, when their weight is frozen in FP8
    (`linear.block_scaled`), or when they decide the decay of a state (`keeps_dtype`).

    With every recipe, experts have scales for each row (`moe.float8`). They stay in their dtype on GPUs other than
    Hopper, when their weights are frozen in FP8, when `where` excludes them, and when FP8 would not be faster: on a GPU
    experts need sizes of at least 1024 that divide by 128, on a CPU sizes that divide by 16.

    Communication: as without FP8; in the backward the sums do not overlap with the GEMMs.

    Args:
        model: Any module.
        recipe: How numbers are scaled to FP8. "current": one scale a tensor, from its own maximum (Ada, Hopper or
            newer). "block": one for each 128 numbers, or 128 x 128 of a weight (Hopper or newer). "mxfp8": one for each
            32 numbers (Blackwell).
        where: Function of the name and the module of each linear and each `GroupedExperts`; False excludes the module
            (default: none).

    Raises:
        ValueError: The recipe is unknown; Transformer Engine is missing or does not load, or the GPU cannot (says why);
            or no linear and no experts are left.
    """
    if not planning():
        require_float8(recipe)
    multiple = RECIPES[recipe].multiple
    chosen = {
        module
        for name, module in model.named_modules()
        if isinstance(module, _CHANGED)
        and (_experts_can(module) if isinstance(module, GroupedExperts) else _linear_can(module, multiple))
        and (where is None or where(name, module))
    }
    if not chosen:
        raise ValueError(
            f"no linear or experts of the model can be in FP8: recipe={recipe!r} needs multiples of {multiple}"
        )

    def change(module: nn.Module, view: nn.Module) -> None:
        if isinstance(module, _CHANGED):
            view.__dict__["float8"] = module in chosen
        if module not in chosen:
            return
        if isinstance(module, GroupedExperts):
            view.__dict__["product"] = float8_grouped_linear
        elif isinstance(module, LinearLayer):
            product = Float8Product(module.weight, RECIPES[recipe])
            view.__dict__["execution"] = replace(module.execution, product=product)

    return view_of(model, change)


_CHANGED = (ColumnLinear, RowParallelLinear, GroupedExperts)


def _linear_can(linear: LinearLayer, multiple: int) -> bool:
    divides = all(size % multiple == 0 for size in linear.weight.shape)
    whole = getattr(linear, "shared_rows", None) is None and linear.weight_scale_inv is None
    return divides and whole and not linear.keeps_dtype


def _experts_can(experts: GroupedExperts) -> bool:
    weights = [getattr(experts, name) for name in experts.projections]
    frozen = any(getattr(experts, f"{name}{SCALES}") is not None for name in experts.projections)
    return not frozen and all(why_not_float8_experts(weight) is None and _gains(weight) for weight in weights)


def _gains(weight_eNK: Tensor) -> bool:
    """Return whether GEMMs in FP8 are faster on a GPU: quantising the operands costs passes over memory.

    `benchmarks/moe.py` on one H200: 1.3 times as fast as bf16 at the sizes of Mixtral 8x7B and DeepSeek-V3, 0.98 at
    Qwen3-30B-A3B (experts of width 768), 0.43 at gpt-oss (2880, no multiple of the kernels' tiles).
    """
    sizes = weight_eNK.shape[1:]
    return device_type(weight_eNK.device) == "cpu" or (
        min(sizes) >= 1024 and all(size % PADDING == 0 for size in sizes)
    )


def round_again_(model: nn.Module) -> None:
    """Let the backward of a model of `with_float8` round the linears' weights again; experts always do.

    Otherwise Transformer Engine keeps two rounded copies of each weight, of its rows and of its columns, from each
    forward to its backward: whole copies also where FSDP2 divides the weights, and separate copies for each
    micro-batch of a pipeline. Rounding again takes 1 to 3 % of a step.
    """
    for module in model.modules():
        product = getattr(getattr(module, "execution", None), "product", None)
        if isinstance(product, Float8Product):
            vars(product.linear)["_is_fsdp2"] = True  # as the engine sets it on modules that FSDP2 wraps


class Float8Product(Product):
    """`x W^T` by `transformer_engine.pytorch.Linear`, with a parameter of `weight`'s shape and dtype from elsewhere."""

    differentiable: ClassVar[bool] = True

    def __init__(self, weight: Tensor, recipe: _Recipe) -> None:
        self.multiple = recipe.multiple
        self.linear: nn.Module
        self.autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if planning():
            self.linear = _PlannedLinear()
            return
        import transformer_engine.pytorch as te  # an optional extra
        from transformer_engine.common import recipe as recipes

        self.autocast = partial(te.autocast, enabled=True, recipe=getattr(recipes, recipe.name)())
        # On the meta device: this weight is never used.
        outputs, inputs = weight.shape
        self.linear = te.Linear(inputs, outputs, bias=False, params_dtype=weight.dtype, device="meta")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return `x W^T`, `[T, ..., I]` -> `[T, ..., O]`, in the dtype of Transformer Engine's linear."""
        if x.numel() == 0 or not isinstance(weight, nn.Parameter):
            return F.linear(x, weight)
        self.linear.weight = weight
        rows = x.reshape(-1, x.shape[-1])
        padding = -rows.shape[0] % self.multiple
        with self.autocast():
            y: Tensor = self.linear(F.pad(rows, (0, 0, 0, padding)) if padding else rows)  # F.pad always copies
        return (y[:-padding] if padding else y).unflatten(0, x.shape[:-1])


class _PlannedLinear(nn.Module):
    """Allocates on the meta device what Transformer Engine's linear does.

    The input stays in FP8 for the backward; so do the weight's rounded rows and columns, unless they are rounded again.
    """

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _PlannedProduct.apply(x, self.weight, not vars(self).get("_is_fsdp2", False))
        return y


class _PlannedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keeps_weight: bool) -> Tensor:
        rounded = [each.new_empty(each.shape, dtype=FLOAT8) for each in (x, x, weight, weight)]
        ctx.save_for_backward(rounded[0], weight, *(rounded[2:] if keeps_weight else ()))
        return x.new_empty(len(x), len(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, *kept = ctx.saved_tensors
        again = () if kept else (weight, weight)
        rounded = [each.new_empty(each.shape, dtype=FLOAT8) for each in (dy, dy, *again)]
        dx, dw = dy.new_empty(x.shape), weight.new_empty(weight.shape) if ctx.needs_input_grad[1] else None
        del rounded
        return dx, dw, None
