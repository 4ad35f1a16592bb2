"""Types of options, what a file or a command line may give for them, and the parsing of options that are texts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from ckpt.files import Store
from parallel_layers.model import ALL_LINEAR

if TYPE_CHECKING:
    import torch

    from parallel_layers.memory import Recompute

T = TypeVar("T")

# Options are checked strictly: "3" is no number, and 1 is no flag.
# The validators are built when they are first used, which `--help` never does.
CONFIG = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    defer_build=True,
)


class MayChange:
    """Mark an option that may change when a run is resumed."""


class Repeats:
    """Mark an option that may be given several times on the command line."""


def as_text(value: Any) -> Any:
    """Return the text of a grid or of ids that a file gives as a mapping or a list, such as {tp: 2} or [2, 7]."""
    if isinstance(value, dict):
        return ",".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


def _as_number(value: Any) -> Any:
    """Return the number of a text: YAML reads 1e-5 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class UrlPath(type(Path())):  # type: ignore[misc]  # the class of this platform
    """A path or a list of paths with URLs; its text, and those of its parents and children, have the URLs' slashes."""

    def __str__(self) -> str:
        return _SLASHES.sub(lambda url: url[0].rstrip("/") + ("///" if "file:" in url[0] else "//"), super().__str__())


# The beginning of a URL in the text of a `Path`, which has one slash where the URL has two or three.
_SLASHES = re.compile(r"(?:^|(?<=,)) *[a-z][a-z0-9+]+:/+")


def as_path(path: str | Path) -> Path:
    """Return a path whose text has all slashes of a URL."""
    return UrlPath(path) if _SLASHES.search(str(path)) else Path(path)


def runs_folder() -> Path:
    """Return the folder with the working copies of runs whose --out is a URL."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-train" / "runs"


def working_copy(out: Path) -> Path:
    """Return the folder on this machine of a run whose --out is a URL, such as s3://bucket/run; other paths stay."""
    if (store := Store.of(out)) is None:
        return out
    scheme, _, path = store.url.partition("://")
    return runs_folder() / scheme / path.lstrip("/")


def place_of(path: Path) -> str:
    """Return the URL of a folder that `working_copy` has returned, or of a file in it; the text of another path."""
    if not path.is_relative_to(runs_folder()):
        return str(path)
    scheme, *names = path.relative_to(runs_folder()).parts
    return str(UrlPath(f"{scheme}://{'/'.join(names)}"))


Free = Annotated[T, MayChange]
Text = Annotated[str, BeforeValidator(as_text)]
Folder = Annotated[Path, Field(strict=False), AfterValidator(as_path)]
Out = Annotated[Path, Field(strict=False), AfterValidator(working_copy)]
Sources = Annotated[Path, BeforeValidator(as_text), Field(strict=False), AfterValidator(as_path)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_as_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]


def parse_recompute(text: str | None) -> Recompute:
    """Parse "full", "selective" or numbers of layers with commas for `Actor.from_pretrained(recompute=...)`."""
    words: dict[str | None, Recompute] = {None: None, "full": "full", "selective": "selective"}
    return words[text] if text in words else numbers(text or "", "full, selective, or ")


def numbers(text: str, other_values: str = "") -> tuple[int, ...]:
    """Parse the numbers of a text such as "2,7" or "0-5,8"; `other_values` names the option's other values."""
    values: list[int] = []
    try:
        for entry in text.split(","):
            if span := re.fullmatch(r"\s*(\d{1,6})-(\d{1,6})\s*", entry):
                first, last = map(int, span.groups())
                if last < first:
                    raise ValueError(entry)
                values += range(first, last + 1)
            elif entry.strip():
                values.append(int(entry))
    except ValueError:
        raise ValueError(f"must be {other_values}numbers with commas, such as 2,7 or 0-5,8") from None
    return tuple(values)


def text_of_numbers(text: str) -> str:
    """Return a text of numbers as it is; ValueError for another text."""
    numbers(text)
    return text


def text_of_devices(text: str) -> str:
    """Return a text of devices as it is; ValueError for another text."""
    if not all(re.fullmatch(r"\s*(cpu|\d+|(GPU|MIG)-[\w/-]+)\s*", device) for device in text.split(",")):
        raise ValueError("must be ids of devices with commas, such as 4,5, or cpu")
    return text


def text_of_grid(text: str) -> str:
    """Return a text of a grid's sizes as it is; ValueError for another text."""
    from parallel_layers import ParallelDims  # imports torch, and `--help` does not

    try:
        ParallelDims.parse(text)
    except ValueError as error:
        raise ValueError(f"is no grid: {error}") from None
    return text


Dims = Annotated[Text, AfterValidator(text_of_grid)]


def device_ids(text: str | None) -> list[str] | None:
    """Return the ids of devices as in CUDA_VISIBLE_DEVICES, "" for a CPU, of a text such as "4,5" or "cpu"."""
    return None if text is None else [device.strip().replace("cpu", "") for device in text.split(",")]


def parse_betas(text: str) -> tuple[float, ...]:
    """Parse the numbers of a text such as "0.9,0.95"."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError("must be numbers with commas, such as 0.9,0.95") from None


def lora_targets(text: str) -> str | list[str]:
    """Return the targets of adapters as a command line has them: "all-linear", names or an expression."""
    names = re.fullmatch(r"[\w.-]+(,[\w.-]+)*", text) is not None and text != ALL_LINEAR
    return text.split(",") if names else text


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a name on the command line."""
    import torch  # takes seconds; `--help` does not import it

    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype={name!r} must be float32 or bfloat16")
    return known[name]
