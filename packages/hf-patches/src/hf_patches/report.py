"""What a patch says about itself."""

from dataclasses import dataclass

import torch

from hf_patches.journal import Change


@dataclass(frozen=True)
class KeyValues:
    """What one token leaves for later ones in a layer: heads, sizes of a key's and a value's head, and their type."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ProbeResult:
    """The start-up probe: how far perturbing one segment moved that segment, and everything it must not move.

    `leak` is the largest change of a log-prob (or whatever the model returns; what its heads read, where their weights
    are all zero) of another segment, or of an earlier token of the same one; `allowed` is what it may be, 0 wherever
    rows are computed independently of each other.
    `key_values` are those that every layer's attention saw; None if layers differ. So many `kernels` ran in place of
    the model's own code; `kernel_error` is the largest difference between the two, in units of the type's epsilon times
    the largest element.
    """

    attention_layers: int
    moved: float
    leak: float
    allowed: float
    key_values: KeyValues | None = None
    kernels: int = 0
    kernel_error: float = 0.0


@dataclass(frozen=True)
class Report:
    """The model, the changes made to it, each with its place, and the result of the probe (None: not yet run)."""

    model: str
    model_type: str
    settings: dict[str, str]
    changes: tuple[Change, ...]
    probe: ProbeResult | None

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.model_type})", *(f"  {name}: {value}" for name, value in self.settings.items())]
        whats = dict.fromkeys(change.what for change in self.changes)
        for what in whats:
            places = [change.where or "(the model)" for change in self.changes if change.what == what]
            shown = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
            lines.append(f"  changed {shown}: {what}")
        if self.probe is None:
            lines.append("  probe: not run yet; call Patch.probe() once the parameters have values")
        else:
            probe = self.probe
            lines.append(
                f"  probe: {probe.attention_layers} attention layers took part; perturbing one segment moved it "
                f"by {probe.moved:.3g}, everything else by {probe.leak:.3g} (allowed {probe.allowed:.3g})"
            )
            if probe.kernels:
                lines.append(
                    f"  probe: {probe.kernels} kernels ran in place of the model's own code and differ from it by "
                    f"{probe.kernel_error:.3g} roundings at most"
                )
        return "\n".join(lines)
