"""The element types of safetensors files, by their name in a header."""

import torch

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
    """A torch dtype's name in a safetensors header.

    Raises:
        ValueError: safetensors has no such type.
    """
    if dtype not in NAMES:
        raise ValueError(f"{dtype} cannot be stored in safetensors; cast to one of {sorted(NAMES.values())}")
    return NAMES[dtype]


def check_cast(dtype: torch.dtype | None) -> None:
    """Refuse to cast weights to a type that has no fractions.

    Raises:
        ValueError: the type is one of integers or booleans.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} cannot hold weights; cast to a floating-point type such as torch.bfloat16")
