"""`RankHost`: the Ray actor that holds one rank. This file imports no torch: torch must see the rank's environment."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel_layers.device import VISIBLE_DEVICES
from rl_train.cluster.addresses import interface_of, listen_on
from rl_train.cluster.kernels import keep_compiled_kernels
from rl_train.cluster.resources import import_ray
from rl_train.processes.errors import Raised, portable


@dataclass(frozen=True)
class Seat:
    """The place of a rank's process: Ray's id of the node, the node's IP address, the id of the device and the process.

    `device` is "" on the CPU. The process listens on `port`; only the port of rank 0 is used.
    """

    node: str
    address: str
    device: str
    port: int
    pid: int


@dataclass(frozen=True)
class FailedCall:
    """The number and the method of a call that raised on one rank, also in answer to later calls, and the exception."""

    number: int
    method: str
    raised: Raised


class RankHost:
    """Hold an `Actor` or `Critic` and run its methods, as the Ray actor of one device."""

    def __init__(self, accelerator: str) -> None:
        self._accelerator = accelerator
        self._failure: FailedCall | None = None
        self._worker: Any = None
        # Keep the socket open and hand it to the store: no other process can take the port.
        self._address = import_ray().util.get_node_ip_address()
        self._listener = listen_on(self._address)

    def seat(self) -> Seat:
        """Return the place of this process."""
        context = import_ray().get_runtime_context()
        devices = context.get_accelerator_ids().get(self._accelerator, [])
        port = self._listener.getsockname()[1]
        return Seat(context.get_node_id(), self._address, devices[0] if devices else "", port, os.getpid())

    def prepare(self, env: Mapping[str, str], collective_timeout: float) -> None:
        """Set the variables of torchrun, before torch is imported; a network interface that the user chose stays."""
        self._timeout = collective_timeout
        if self._accelerator == "CPU":
            os.environ[VISIBLE_DEVICES] = ""
        os.environ.update(env)
        keep_compiled_kernels()
        if (interface := interface_of(self._address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def call(
        self, number: int, settled: int, method: str, payload: bytes, batch_part: Any = None, reply: bool = True
    ) -> Any:
        """Call a method of the actor or critic; return its result on the CPU if asked to reply, or a `FailedCall`.

        Args:
            number: The number of the call.
            settled: All ranks have ended the calls up to this number. After a later failure the ranks are out of step,
                and this call is refused: collectives of different calls would meet.
            method: The name of the method; "load" makes the worker, "apply" calls a function with it.
            payload: `(args, kwargs)`, pickled: unpickling may import torch, and its errors are reported.
            batch_part: This rank's part of the batch, the first argument.
            reply: Whether to return the result.
        """
        if self._failure is not None and self._failure.number > settled:
            return self._failure
        # Imported after `prepare`: torch reads the environment at import.
        from rl_models.calls import on_cpu

        try:
            args, kwargs = pickle.loads(payload)
            if batch_part is not None:
                args = (batch_part, *args)
            if method == "load":
                result: Any = self._load(*args, **kwargs)
            elif method == "apply":
                function, *rest = args
                # Pickled here to report a result that cannot be pickled; Ray would end the process.
                result = import_ray().cloudpickle.dumps(on_cpu(function(self._worker, *rest, **kwargs)))
            else:
                result = getattr(self._worker, method)(*args, **kwargs)
            return on_cpu(result) if reply else None
        except Exception as error:
            self._failure = FailedCall(number, method, portable(error))
            return self._failure

    def _load(self, kind: Any, path: str, **options: Any) -> tuple[int, str]:
        """Join the other ranks and load the model; return the vocabulary size and the device."""
        device = self._join()
        self._worker = kind.from_pretrained(path, device=device, **options)
        return self._worker.engine.vocab_size, str(device)

    def _join(self) -> Any:
        import datetime

        import torch
        import torch.distributed as dist

        from rl_train.cluster.launch import Devices

        devices = Devices.find("cpu" if self._accelerator == "CPU" else None)
        if devices.type == "cpu" and self._accelerator != "CPU":
            raise ValueError(
                f"Ray gave this rank a {self._accelerator}, but torch {torch.__version__} cannot use it; "
                "install a build of torch for it on every node, or ask for Resources(device='cpu')"
            )
        device = devices.take(self.seat().device)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0,
            timeout=datetime.timedelta(seconds=self._timeout),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach() if rank == 0 else None,
        )
        self._listener.close()
        devices.join(device, rank, world_size, self._timeout, store=store)
        return device
