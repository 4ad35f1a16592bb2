"""Linear layers divided over a tensor-parallel group.

`layers` has the modules, and `operators` their forward and backward. `products` says how operands are multiplied, and
`transports` how tokens are sent. `execution` has the two objects that configure a layer.
"""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
