"""Activation recomputation: run a function again in the backward instead of saving its intermediate tensors.

`checkpoint` saves only a function's inputs, optionally a shard of them on each rank. `recomputed` also drops the
output, for cheap functions with a large output (an activation between two GEMMs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from parallel_layers.distributed.equal_parts import flat_chunk, gather_flat


class Streams(Protocol):
    """Random number streams that can be replayed, such as `parallel_layers.memory.random_states.RngStates`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return a snapshot."""

    def replay(self, state: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Draw as at the snapshot inside the block."""


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    rng: Streams | None = None,
    shard_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """Return `fn(*args, **kwargs)`, save only the arguments, and run `fn` again in the backward.

    The second run draws the same random numbers, and gradients are bitwise those of a plain call. The function is
    torch's non-reentrant checkpoint: it works with `torch.autograd.grad`, arguments without gradient, structures of
    tensors, and nested.

    Args:
        fn: The function.
        *args: Positional arguments of `fn`.
        rng: Streams to replay; without them only torch's default generators are replayed.
        shard_group: Save one shard of each tensor argument on each rank of this group, and gather them for the second
            run. The arguments must be equal on all its ranks (hidden states without sequence parallelism). Leaves, and
            tensors whose size does not divide, are saved whole.
        **kwargs: Keyword arguments of `fn`.

    Communication: with `shard_group`, one all-gather for each sharded argument in the backward.
    """
    contexts: dict[str, Any] = {}
    if rng is not None:
        snapshot = rng.state_dict()
        # The snapshot includes the default generators.
        contexts = {
            "preserve_rng_state": False,
            "context_fn": lambda: (contextlib.nullcontext(), _Replay(rng, snapshot)),
        }
    with _sharded_saving(shard_group):
        return torch_checkpoint(fn, *args, use_reentrant=False, **contexts, **kwargs)


@contextlib.contextmanager
def recomputed(fn: Callable[..., Tensor], *args: Any, rng: Streams | None = None) -> Iterator[Tensor]:
    """Yield `fn(*args)` to a `with` block whose operations do not save it for their backward.

        with recomputed(F.gelu, up) as activation:
            out = down(activation)

    The backward runs `fn` once more when it first needs the output, and takes the tensors for `fn`'s own backward from
    the same run. Neither the output nor intermediate tensors of `fn` are kept until then. Gradients are bitwise those
    of a plain call. Operations outside the block save the output as usual.

    Args:
        fn: A function that returns one tensor.
        *args: Arguments of `fn`; they are kept for the backward.
        rng: Streams to replay; default: torch's default CPU and CUDA generators.
    """
    recomputation = _Recomputation(fn, args, rng)
    output = recomputation.forward()
    # The address, not the tensor: autograd keeps the hooks alive, and with them what they refer to.
    address = output.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if not tensor.numel() or tensor.untyped_storage().data_ptr() != address:
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else recomputation.output().as_strided(*saved)

    with saved_tensors_hooks(pack, unpack):
        yield output


class _Replay(contextlib.AbstractContextManager[None]):
    """Draw as at the snapshot inside the block; backwards through a retained graph enter the block again."""

    def __init__(self, rng: Streams, snapshot: Mapping[str, Tensor]) -> None:
        self._rng, self._snapshot = rng, snapshot
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._rng.replay(self._snapshot))
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


class _Recomputation:
    """One function call whose output and saved tensors are recomputed when they are first needed."""

    def __init__(self, fn: Callable[..., Tensor], args: tuple[Any, ...], rng: Streams | None) -> None:
        self._fn, self._args = fn, args
        self._rng: Streams = _DefaultStreams(args) if rng is None else rng
        self._snapshot = self._rng.state_dict()
        self._autocast = [_Autocast.now(device) for device in ("cpu", "cuda")]
        self._saved = 0
        self._values: dict[int, Tensor] = {}
        self._output: Tensor | None = None

    def forward(self) -> Tensor:
        """Run `fn`, saving numbers instead of tensors."""
        with saved_tensors_hooks(self._number, self._take):
            return self._fn(*self._args)

    def output(self) -> Tensor:
        """Return the recomputed output."""
        if self._output is None:
            self._recompute()
        assert self._output is not None
        return self._output

    def _number(self, tensor: Tensor) -> int:
        self._saved += 1
        return self._saved - 1

    def _take(self, number: int) -> Tensor:
        if number not in self._values:
            self._recompute()
        # The backward of `fn` runs after all backwards that need its output.
        self._output = None
        return self._values.pop(number)

    def _recompute(self) -> None:
        values: list[Tensor] = []
        detached = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in self._args]
        with (
            contextlib.ExitStack() as modes,
            torch.enable_grad(),
            self._rng.replay(self._snapshot),
            saved_tensors_hooks(lambda tensor: values.append(tensor.detach()), lambda _: None),  # type: ignore[arg-type, return-value]
        ):
            for autocast in self._autocast:
                modes.enter_context(autocast.again())
            self._output = self._fn(*detached).detach()
        if len(values) != self._saved:
            raise RuntimeError(
                f"the second run saved {len(values)} tensors, the first {self._saved}; fn must do the same in both runs"
            )
        self._values = dict(enumerate(values))


class _Autocast(NamedTuple):
    """The state of torch.autocast for a device."""

    device: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def now(cls, device: str) -> _Autocast:
        dtype = torch.get_autocast_dtype(device)
        return cls(device, torch.is_autocast_enabled(device), dtype, torch.is_autocast_cache_enabled())

    def again(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self.device, self.dtype, self.enabled, self.caches)


class _DefaultStreams:
    """The default generators of the CPU and of the arguments' CUDA devices."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._devices = sorted({a.get_device() for a in args if isinstance(a, Tensor) and a.is_cuda})

    def state_dict(self) -> dict[str, Tensor]:
        cuda = {str(device): torch.cuda.get_rng_state(device) for device in self._devices}
        return {"cpu": torch.get_rng_state()} | cuda

    @contextlib.contextmanager
    def replay(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(state["cpu"])
            for device in self._devices:
                torch.cuda.set_rng_state(state[str(device)], device)
            yield


def _sharded_saving(group: ProcessGroup | None) -> contextlib.AbstractContextManager[None]:
    """Shard over `group` the arguments that torch's checkpoint saves."""
    if group is None or group.size() == 1:
        return contextlib.nullcontext()

    def pack(tensor: Tensor) -> Any:
        if tensor.is_leaf or tensor.numel() % group.size() or not tensor.numel():
            return tensor
        return flat_chunk(tensor.detach(), group), tensor.shape

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        chunk, shape = saved
        return gather_flat(chunk, group).view(shape)

    return saved_tensors_hooks(pack, unpack)
