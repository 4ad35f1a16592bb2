"""The differences that a comparison finds."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["missing", "unexpected", "shape", "dtype", "values", "config"]


@dataclass(frozen=True)
class Difference:
    """A tensor, or a field of the configurations, that differs.

    Attributes:
        name: The canonical tensor, or "config.json FIELD".
        kind: "missing": only the first has it; "unexpected": only the second has it; "shape"; "dtype"; "values";
            "config": a field that changes what the model computes.
        detail: A text with both sides.
        elements: The number of elements that differ by more than the tolerance.
        worst: The largest absolute difference; infinite where one side is NaN.
        first: The index of the first element that differs.
    """

    name: str
    kind: Kind
    detail: str
    elements: int = 0
    worst: float = 0.0
    first: tuple[int, ...] = ()


@dataclass
class Report:
    """The result of a comparison.

    Attributes:
        tensors: The number of tensors compared.
        elements: The number of elements compared.
        differences: The differences in the configurations, then the differences in the tensors, in the model's order.
    """

    tensors: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    @property
    def worst(self) -> Difference | None:
        """The difference with the largest absolute value."""
        return max(self.differences, key=lambda difference: difference.worst, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        value = {"equal": self.equal, **dataclasses.asdict(self)}
        for entry in value["differences"]:
            if not math.isfinite(entry["worst"]):
                entry["worst"] = None  # JSON has no infinity
        return value
