"""Linear attention over packed sequences: the gated delta rule, Mamba-2, the short convolution, and their layers."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
