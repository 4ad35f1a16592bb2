"""`EngineOnRay`: a `RolloutEngine` for a group on a Ray cluster; its engines are Ray actors on separate devices."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from ckpt.transfer import rank_in
from parallel_layers.device import VISIBLE_DEVICES
from rl_models import Actor
from rl_train.cluster.group import RayModelGroup
from rl_train.cluster.placement import Share
from rl_train.cluster.ranks import kill
from rl_train.cluster.resources import import_ray
from rl_train.engines.engine_on_ranks import EngineOnRanks, stream_to_engine
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.interface import LocalEngine
from rl_train.engines.process import EngineServer, engine_process
from rl_train.processes.host import Process
from rl_train.processes.times import LIFE_SECONDS
from rl_train.processes.worker import Calls
from rl_train.weight_sync.buckets import BUCKET_BYTES, WeightFormat
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.shard_sender import NoShards, ShardSender
from rl_train.weight_sync.transport import BucketMissed


class EngineOnRay(EngineOnRanks):
    """A `RolloutEngine` of a program whose actor is a `RayModelGroup`: a group of engines, each a Ray actor.

    The group's ranks send the weights; no tensor passes the program. See `EnginePool` for the division of requests, and
    for engines that are lost.

    Args:
        actor: The `RayModelGroup` of an `Actor`.
        model: See `EngineOnRanks`; every node must see this folder.
        make: Makes an engine in its process, such as `partial(Vllm, model)`; pickled by cloudpickle.
        share: The devices, one engine on each bundle of the placement: `Placement(4).share(1.0)` for engines apart,
            `Placement(8, per_bundle=2)` for engines over two devices each, or a share of the placement that the actor
            has, too.
        sleeps, weight_format: See `EngineOnRanks`.
        silence, timeout: See `processes`.
        changed_only: See `ShardSender`.
        check, bucket_bytes, **options: See `EnginePool`.
        in_flight: Take requests and weights while the engines draw, see `InFlightPool`.

    Raises:
        ValueError: The placement has less room than the share, or see `EnginePool`.
    """

    def __init__(
        self,
        actor: RayModelGroup,
        model: str | Path,
        make: Callable[[], LocalEngine],
        share: Share,
        *,
        sleeps: bool = False,
        weight_format: WeightFormat | None = None,
        silence: float = 60.0,
        timeout: float = 1800.0,
        check: bool = False,
        bucket_bytes: int | None = None,
        changed_only: bool = False,
        in_flight: bool = False,
        **options: Any,
    ) -> None:
        self._share, self._limits = share, (silence, timeout)
        self._sending: dict[str, Any] = {"check": check, "bucket_bytes": bucket_bytes, "changed_only": changed_only}
        self._bundles = share.take(len(share.placement), [1])
        # The newest Ray actor of each engine, by name.
        self._actors: dict[str, Any] = {}
        engines = []
        for number, bundle in enumerate(self._bundles):
            launch = partial(self._launch, name := f"engine {number}", bundle)
            engines.append(engine_process(name, launch, (make,), *self._limits, dumps=_cloudpickled))

        def start() -> EnginePool:
            self._pool = (InFlightPool if in_flight else EnginePool)(engines, **options)
            return self._pool

        try:
            super().__init__(actor, model, start, sleeps=sleeps, weight_format=weight_format)
        except BaseException:
            self._give_back()
            raise

    def close(self) -> None:
        """See `RolloutEngine`."""
        super().close()
        self._give_back()

    def _launch(self, name: str, bundle: int) -> RayTransport:
        self._actors[name] = self._share.start(RayHost, name, bundle, concurrency_groups={"answers": 8})
        return RayTransport(self._actors[name], owns=True)

    def _give_back(self) -> None:
        self._share.give_back(self._bundles)
        self._bundles = []

    def _stream(self) -> None:
        """Have the group's ranks stream their weights into the engines."""
        group = self._actor
        if not isinstance(group, RayModelGroup):
            raise ValueError(f"an engine on Ray takes the weights of a RayModelGroup, not of {type(group).__name__}")

        def send(engines: Sequence[Process]) -> None:
            actors = {engine.name: self._actors[engine.name] for engine in engines}
            failures = group.apply(_send, actors, self._limits, self._weight_format, **self._sending)
            # A bucket that did not arrive is the consequence of another rank's error, if there is one.
            errors = sorted(filter(None, failures), key=lambda error: isinstance(error, BucketMissed))
            if errors:
                raise errors[0]

        self._pool.load_by(send)


# The senders of each actor with a rank in this process: their groups stay for the next weight sync.
_SENDERS: WeakKeyDictionary[Actor, tuple[ShardSender, WeightSender]] = WeakKeyDictionary()


def _send(
    actor: Actor,
    engine_actors: Mapping[str, Any],
    limits: tuple[float, float],
    weight_format: WeightFormat,
    *,
    check: bool,
    bucket_bytes: int | None,
    changed_only: bool,
) -> Exception | None:
    """Send a rank's weights to the engines in Ray actors; return the error of an engine, or a bucket that was missed.

    Native engines get boxes of shards from all ranks, others whole tensors from the first rank.
    """
    options = check, bucket_bytes, import_ray().util.get_node_ip_address()
    if actor not in _SENDERS or _SENDERS[actor][1].options != options:
        _SENDERS[actor] = ShardSender(*options, changed_only=changed_only), WeightSender(*options)
    shards, sender = _SENDERS[actor]
    with ExitStack() as stack:
        engines: list[Process] | None = None
        if rank_in(actor.grid.everyone) == 0:
            engines = []
            for name, engine_actor in engine_actors.items():
                engine = engine_process(name, partial(RayTransport, engine_actor), None, *limits, dumps=_cloudpickled)
                engines.append(stack.enter_context(closing(engine)))
                engine.start()
        if not weight_format.stream_options:
            try:
                shards.sync(actor, engines)
                return None
            except NoShards:
                pass
            except Exception as error:
                return error
        load = None if engines is None else partial(sender.sync, engines)
        return stream_to_engine(actor, load, weight_format, to=[0], bucket_bytes=bucket_bytes or BUCKET_BYTES)


def _cloudpickled(value: Any) -> bytes:
    pickled: bytes = import_ray().cloudpickle.dumps(value)
    return pickled


class RayTransport:
    """A `Transport` to a `RayHost`; `end` kills the actor only if the transport `owns` it."""

    def __init__(self, actor: Any, owns: bool = False) -> None:
        self._actor, self._owns, self.place = actor, owns, ""
        self._next = actor.next_answer.options(concurrency_group="answers")
        self._client, self._asked, self._failure = uuid4().hex, None, ""
        # The number of calls without a result: an idle transport asks Ray for nothing.
        self._waiting = threading.Semaphore(0)

    def send(self, message: Any) -> None:
        """See `Transport`."""
        self._actor.take.remote(self._client, message)
        self._waiting.release()

    def receive(self, limit: float) -> Any:
        """See `Transport`."""
        if not self._waiting.acquire(timeout=limit):
            raise TimeoutError("no call waits")
        message = None
        try:
            message = self._receive(limit)
        finally:
            if message is None or message[1] == "part":
                self._waiting.release()
        return message

    def _receive(self, limit: float) -> Any:
        ray = import_ray()
        self._asked = self._asked or self._next.remote(self._client)
        if not ray.wait([self._asked], timeout=limit)[0]:
            raise TimeoutError(f"no message for {limit:g} s")
        try:
            self.place, message = ray.get(self._asked)
        except ray.exceptions.RayError as failure:
            self._failure = f"({type(failure).__name__}: {str(failure).strip().splitlines()[0]})"
            raise EOFError("the process has ended") from failure
        self._asked = None
        return message

    def status(self) -> str:
        """See `Transport`."""
        return self._failure

    def end(self) -> None:
        """See `Transport`."""
        if self._owns:
            kill([self._actor])


class RayHost:
    """The Ray actor of an engine: a thread holds the engine, and answers wait here until their caller asks for them."""

    def __init__(self, accelerator: str) -> None:
        if accelerator == "CPU":
            os.environ[VISIBLE_DEVICES] = ""
        ray = import_ray()
        ids = ray.get_runtime_context().get_accelerator_ids().get(accelerator, [])
        node = ray.util.get_node_ip_address()
        self._place = f" ({', '.join([f'node {node}', *(f'{accelerator} {id}' for id in ids)])})"
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._answers: defaultdict[str, SimpleQueue[Any]] = defaultdict(SimpleQueue)
        threading.Thread(target=EngineServer(Calls(self)).serve, daemon=True).start()

    def take(self, client: str, message: Any) -> None:
        """Take a call."""
        self._calls.put((client, message))

    def next_answer(self, client: str) -> tuple[str, Any]:
        """Return the place of this process and the next answer to a caller, or after LIFE_SECONDS a sign of life."""
        try:
            return self._place, self._answers[client].get(timeout=LIFE_SECONDS)
        except Empty:
            return self._place, None

    def recv(self) -> Any:
        """Return the next call to the engine's thread; the number of a call begins with the caller."""
        client, (number, *call) = self._calls.get()
        return ((client, number), *call)

    def poll(self) -> bool:
        """Say whether a call waits."""
        return not self._calls.empty()

    def send(self, message: Any) -> None:
        """Keep an answer of the engine's thread."""
        (client, number), *answer = message
        self._answers[client].put((number, *answer))
