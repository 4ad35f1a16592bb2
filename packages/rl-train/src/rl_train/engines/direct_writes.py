"""`DirectWrites`: the copies that bring the tensors of a weight sync straight into the parameters of vLLM's model.

vLLM's `reload_weights` takes each tensor through much Python, and copies it three times. But most models hold the
numbers of their files as they are: `load_weights` only chooses rows of a parameter for each tensor, or for a part of a
tensor. These copies are recorded once, and checked against `reload_weights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_layers.device import GPU
from rl_models.calls import checksum

# What layers do with weights after they have been loaded. Experts on a CPU pack theirs.
_PLAIN = {"cpu": {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType"}}
_PLAIN[GPU] = _PLAIN["cpu"] | {"UnquantizedFusedMoEMethod"}

NamedTensors = Iterable[tuple[str, Tensor]]


class _Write(NamedTuple):
    """A view of a parameter, and the part of a contiguous tensor that goes there."""

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: Tensor) -> Tensor:
        """Return the part of the tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class DirectWrites:
    """Load weight syncs into a model of vLLM, by `reload_weights` or by recorded copies.

    The first sync goes by `reload_weights`. Then a call of `load_weights` with tensors on the meta device records the
    copies, which do not run. The second sync goes by `reload_weights`, too, and its bits are compared with the tensors
    that the copies would have written. Later syncs copy. A model with quantized weights, with weights that vLLM keeps
    in another form, or whose loaders compute takes `reload_weights` each time. New memory of parameters begins anew.

    `finish` is called after copies, as vLLM's attention wants after new weights.
    """

    def __init__(
        self, model: nn.Module, reload: Callable[[Iterator[tuple[str, Tensor]]], None], finish: Callable[[], None]
    ) -> None:
        self._model, self._reload, self._finish = model, reload, finish
        self._writes: dict[str, list[_Write]] | None = None
        self._checked = False
        methods = {type(getattr(module, "quant_method", None)).__name__ for module in model.modules()}
        self._refused = not methods.issubset(_PLAIN[next(model.parameters()).device.type])
        self._addresses: list[int] = []

    def load(self, named_tensors: NamedTensors) -> None:
        """Write whole tensors, by Hugging Face name, into the model.

        Raises:
            ValueError: A tensor is new, has another shape, or is missing, since the last weight sync.
        """
        if self._checked and self._addresses == self._storages():
            self._copy(named_tensors)
            return
        shapes, sums, writes = dict[str, Tensor](), list[Tensor](), self._writes or {}

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                shapes[name] = tensor.to("meta")
                parts = ((write.source(tensor), write.target) for write in writes.get(name, ()))
                sums.extend(checksum(part.to(target.dtype)) for part, target in parts)
                # vLLM holds the tensors of one layer until the layer is complete.
                yield name, tensor.clone()

        self._reload(watched())
        if self._refused:
            return
        if self._writes is None or self._addresses != self._storages():
            self._record(shapes)
            return
        targets = [checksum(write.target) for name in shapes for write in writes.get(name, ())]
        same = len(sums) == len(targets) and bool((torch.stack(sums) == torch.stack(targets)).all())
        self._checked, self._refused = same, not same

    def _copy(self, named_tensors: NamedTensors) -> None:
        assert self._writes is not None
        missing = set(self._writes)
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in missing:
                    raise ValueError(f"{name} came twice, or was no part of the last weight sync")
                missing.remove(name)
                for write in self._writes[name]:
                    write.target.copy_(write.source(tensor))
        if missing:
            raise ValueError(f"the weight sync ended without {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
        self._finish()

    def _record(self, shapes: dict[str, Tensor]) -> None:
        """Record the copies of the model's `load_weights`, or refuse; nothing is written."""
        recorder, self._checked = _Recorder(shapes), False
        try:
            with recorder, torch.no_grad():
                self._model.load_weights(iter(shapes.items()))  # type: ignore[operator]
        except Exception as error:  # a loader that computes something, or wants memory, may raise any error
            self._refused = True
            warnings.warn(f"weight syncs keep vLLM's reload_weights, which is slower: {error!r}", stacklevel=2)
            return
        self._writes, self._addresses = recorder.writes, self._storages()
        written = {write.target.untyped_storage().data_ptr() for writes in self._writes.values() for write in writes}
        self._refused = not written.issuperset(self._addresses)

    def _storages(self) -> list[int]:
        """Return the addresses of the parameters' memory."""
        return [weight.untyped_storage().data_ptr() for weight in self._model.parameters() if weight.numel()]


class _Recorder(TorchDispatchMode):
    """Record copies from tensors on the meta device instead of making them; refuse all other changes of tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {_storage_of(tensor): name for name, tensor in tensors.items()}
        self.writes: dict[str, list[_Write]] = {name: [] for name in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            name = self._names[_storage_of(source)]
            if target.is_meta or target.shape != source.shape:
                raise NotImplementedError(f"{name} goes to {list(target.shape)} on {target.device}")
            write = _Write(target, tuple(source.shape), tuple(source.stride()), source.storage_offset())
            self.writes[name].append(write)
            return target
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return args[0]  # padding, which has this value
        if func._schema.is_mutable:
            raise NotImplementedError(f"a loader calls {func}")
        return func(*args, **(kwargs or {}))


def _storage_of(tensor: Tensor) -> int:
    """Return which storage a tensor has; on the meta device storages have no addresses."""
    number: int = tensor.untyped_storage()._cdata
    return number
