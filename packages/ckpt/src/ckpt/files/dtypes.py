"""The element types of safetensors files, by their name in a header."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a torch dtype's name in a safetensors header."""
    if dtype not in NAMES:
        raise ValueError(f"{dtype} cannot be stored in safetensors; cast to one of {sorted(NAMES.values())}")
    return NAMES[dtype]


def dtype_of_name(name: str) -> torch.dtype | None:
    """Return the dtype that a text such as "torch.bfloat16" names; None where files have no such dtype."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype in NAMES else None


def config_dtype(config: Mapping[str, object]) -> torch.dtype:
    """Return the dtype that a configuration names; float32 without a name.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = dtype_of_name(str(name))
    if dtype is None:
        raise ValueError(f"the config's dtype={name!r} is not a type of torch")
    return dtype


def check_cast(dtype: torch.dtype | None) -> None:
    """Refuse to cast weights to integers, to booleans, or to a value that is no `torch.dtype`."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r:.100} must be a torch.dtype, such as torch.bfloat16")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} cannot hold weights; cast to a floating-point type such as torch.bfloat16")


def refuse_overflow(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Refuse to cast finite values to a dtype in which they become infinite or NaN.

    Only types of a narrower range are looked at: bfloat16 has float32's exponents.
    """
    if not (values.is_floating_point() and dtype.is_floating_point and values.numel()):
        return
    largest = torch.finfo(dtype).max
    if torch.finfo(values.dtype).max < 2 * largest:
        return
    # A type of one byte has no arithmetic.
    wide = values.float() if values.element_size() == 1 else values
    if wide.abs().amax() <= largest:
        return
    lost = wide.isfinite() & ~values.to(dtype).float().isfinite()
    if lost.any():
        worst = float(wide.abs().where(lost, 0).amax())
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} has a value of magnitude {worst:.6g}, which {kind} cannot hold (at most {largest:.6g}); cast to a "
            "wider type such as bfloat16"
        )


def is_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite; integers are finite."""
    if not values.is_floating_point() or not values.numel():
        return True
    # The extremes need no memory; a type of one byte has none.
    wide = values.float() if values.element_size() == 1 else values
    return bool(torch.stack(wide.aminmax()).isfinite().all())


def non_finite(names: Collection[str]) -> str:
    """Return a text that says that tensors of these names hold NaN or infinite values."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    verb = "holds" if len(names) == 1 else "hold"
    return f"{', '.join(sorted(names)[:3])}{more} {verb} NaN or infinite values"
