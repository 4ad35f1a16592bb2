"""`Report`: the changes, settings and proof of a patch."""

from dataclasses import dataclass

import torch

from hf_patches.journal import Change


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of one token in a layer: number of heads, head sizes of key and value, and dtype."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ProbeResult:
    """The result of the start-up probe, which perturbs one segment of a batch.

    `moved` is the largest change in the perturbed segment. `leak` is the largest change of an output elsewhere: in
    another segment, or at an earlier token (for heads with all-zero weights, the change of their inputs). `allowed` is
    the bound on `leak`; it is 0 if rows are computed independently.
    `key_values` describes the keys and values of every attention layer.
    `kernels` counts the kernels and recurrences that ran in place of the model's own code, and `kernel_error` is the
    largest difference from that code, in units of the dtype's epsilon times the largest element.
    """

    attention_layers: int
    recurrent_layers: int
    moved: float
    leak: float
    allowed: float
    key_values: tuple[KeyValues, ...] = ()
    kernels: int = 0
    kernel_error: float = 0.0


@dataclass(frozen=True)
class Proof:
    """The comparison of a copy with `layers` layers, packed and patched, with the unpatched copy, sequence by sequence.

    `output_error` is the largest difference of log-probs and entropies (or values), in parts of the largest value.
    `gradient_error` is the largest difference of a parameter's gradient, in parts of its largest element.
    """

    layers: int
    tokens: int
    output_error: float
    gradient_error: float

    def __str__(self) -> str:
        return (
            f"proof: a copy with {self.layers} layers, packed and patched, agreed with the unpatched copy on "
            f"{self.tokens} tokens: outputs to {self.output_error:.1g} of the largest, gradients to "
            f"{self.gradient_error:.1g}"
        )


@dataclass(frozen=True)
class Report:
    """The model, each change with its place, and the result of the probe (None before the probe has run).

    `proof` is the comparison that let a model type outside the table of families be patched.
    """

    model: str
    model_type: str
    settings: dict[str, str]
    changes: tuple[Change, ...]
    probe: ProbeResult | None
    proof: Proof | None = None

    def __str__(self) -> str:
        lines = [f"{self.model} ({self.model_type})", *(f"  {name}: {value}" for name, value in self.settings.items())]
        whats = dict.fromkeys(change.what for change in self.changes)
        for text in whats:
            sites = [change.where or "(the model)" for change in self.changes if change.what == text]
            shown = sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more"
            lines.append(f"  changed {shown}: {text}")
        if self.proof is not None:
            lines.append(f"  {self.proof}")
        if self.probe is None:
            lines.append("  probe: not run yet; call Patch.probe() once the parameters have values")
        else:
            probe = self.probe
            kinds = f"{probe.attention_layers} attention"
            kinds += f" and {probe.recurrent_layers} recurrent" if probe.recurrent_layers else ""
            lines.append(
                f"  probe: {kinds} layers took part; perturbing one segment moved it by {probe.moved:.3g}, everything "
                f"else by {probe.leak:.3g} (allowed {probe.allowed:.3g})"
            )
            if probe.kernels:
                lines.append(
                    f"  probe: {probe.kernels} kernels ran in place of the model's own code and differ from it by "
                    f"{probe.kernel_error:.3g} roundings at most"
                )
        return "\n".join(lines)
