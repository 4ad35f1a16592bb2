"""Trading computation for memory: run a function again in the backward instead of saving what is inside it.

`checkpoint` saves a function's inputs only, optionally a shard of them on each rank. `recomputed` also drops the
function's output once it has been used, for cheap functions whose output is large (an activation between two matrix
products).
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
    """Random number streams that can be replayed: `parallel_layers.memory.random_states.RngStates`."""

    def state_dict(self) -> dict[str, Tensor]:
        """A snapshot."""

    def replay(self, state: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Draw as at the snapshot inside the block."""


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    rng: Streams | None = None,
    shard_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """`fn(*args, **kwargs)`, saving only the arguments and running `fn` again in the backward.

    The second run draws the same random numbers and its gradients are bitwise those of a plain call. Non-reentrant:
    it works with `torch.autograd.grad`, with arguments that need no gradient, with structures of tensors, and nested in
    itself.

    Args:
        fn: The function.
        *args: Its arguments.
        rng: Replay these streams; without it only torch's default generators are replayed.
        shard_group: Save `1/size` of each tensor argument on each rank of this group, and gather them for the second
            run. For arguments that are equal on all its ranks (hidden states without sequence parallelism). Leaves,
            which live on anyway, and tensors whose size does not divide, are saved whole.
        **kwargs: Keyword arguments of `fn`.

    Communication: with `shard_group`, one all-gather for each sharded argument in the backward.
    """
    contexts: dict[str, Any] = {}
    if rng is not None:
        snapshot = rng.state_dict()
        # The snapshot holds the default generators' states, too.
        contexts = {
            "preserve_rng_state": False,
            "context_fn": lambda: (contextlib.nullcontext(), _Replay(rng, snapshot)),
        }
    with _sharded_saving(shard_group):
        return torch_checkpoint(fn, *args, use_reentrant=False, **contexts, **kwargs)


@contextlib.contextmanager
def recomputed(fn: Callable[..., Tensor], *args: Any, rng: Streams | None = None) -> Iterator[Tensor]:
    """A `with` block that gives `fn(*args)`, which what runs in the block does not save.

        with recomputed(F.gelu, up) as activation:
            out = down(activation)

    Where an operation in the block would save the output (or a view of it) for its backward it saves the recipe. The
    first that needs it in the backward runs `fn` once more, and from that run also comes what `fn`'s own backward
    needs. So once the caller has dropped the output, nothing of it or of the inside of `fn` is held. Gradients are
    bitwise those of a plain call. Consumers outside the block save the output as always.

    Args:
        fn: A function that returns one tensor.
        *args: Its arguments; they are held for the backward.
        rng: Streams to replay; without it torch's default CPU and CUDA generators.
    """
    recomputation = _Recomputation(fn, args, rng)
    output = recomputation.forward()
    # A number, since autograd keeps the hooks alive; `output` itself is alive as long as the block runs.
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
    """Draw as at the snapshot inside the block, which each backward through a retained graph enters again."""

    def __init__(self, rng: Streams, snapshot: Mapping[str, Tensor]) -> None:
        self._rng, self._snapshot = rng, snapshot
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(self._rng.replay(self._snapshot))
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


class _Recomputation:
    """One function call whose saved tensors, and output, are made again when first asked for."""

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
        """The output, made again."""
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
        # fn's own backward runs after that of everything that has used its output.
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
                f"the second run saved {len(values)} tensors, the first {self._saved}: not the same function"
            )
        self._values = dict(enumerate(values))


class _Autocast(NamedTuple):
    """What torch.autocast does to a device's operations."""

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
    """torch's default generators of the CPU and of the arguments' CUDA devices."""

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
    """Save a chunk on each rank of what torch's checkpoint saves: the arguments. (Its own hooks cover the function.)"""
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
