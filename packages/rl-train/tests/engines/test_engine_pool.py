"""Engines in processes of their own: weight sync, balance, and what happens when one ends, hangs or refuses."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import SamplingOptions
from rl_models import Actor, Batch
from rl_train.cluster.addresses import listen_on
from rl_train.engines import EngineOnRanks, EnginePool, process, processes
from rl_train.engines.in_flight import InFlightPool
from rl_train.engines.interface import Request, Response, WeightsLostError
from rl_train.engines.process import device_groups
from rl_train.processes.errors import ProcessLost
from rl_train.processes.host import Call
from rl_train.weight_sync import sender
from rl_train.weight_sync.buckets import Bucket, BucketEntry, NamedTensors, in_buckets
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.transport import LOOPBACK, BucketMissed, Peer, Rendezvous, WeightMessage

from .stub import Fragile, Stub

PROMPTS = [[1, number] for number in range(2, 14)]
SAMPLING = SamplingOptions(3, n=2, seed=1)


class Group:
    """Engines on `devices` devices that do what the file `mark` asks for; `told` says which of them were lost."""

    def __init__(self, mark: Path, devices: int) -> None:
        self.mark, self.told = mark, list[str]()
        engines = processes(partial(Fragile, mark), [""] * devices, silence=2.0)
        self.engines = EnginePool(engines, bucket_bytes=8192, check=True, tell=self.told.append, max_responses=8)

    def on_ranks(self, actor: Any, model: Path) -> EngineOnRanks:
        return EngineOnRanks(actor, model, lambda: self.engines, bucket_bytes=8192)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two engines; each test leaves them whole."""
    group = Group(tmp_path_factory.mktemp("two") / "mark", 2)
    yield group
    group.engines.close()


@pytest.fixture(scope="module")
def actor(model: Path) -> Actor:
    return Actor.from_pretrained(model, device="cpu")


@pytest.fixture(scope="module")
def expected(actor: Actor, model: Path) -> Batch:
    """The responses of an engine in this process, with version 1 of the weights."""
    engine = EngineOnRanks(actor, model, Stub)
    engine.update_weights(actor, 1)
    return engine.generate(PROMPTS, SAMPLING)


def same(found: Batch, expected: Batch) -> bool:
    return torch.equal(found.tokens, expected.tokens) and torch.equal(found["log_probs"], expected["log_probs"])


KILL, HANG = int(signal.SIGKILL), int(signal.SIGSTOP)
SAID = {KILL: "(exit status -9)", HANG: "gave no sign of life for 2 s"}


@pytest.mark.parametrize("number", [KILL, pytest.param(HANG, marks=pytest.mark.slow)])
def test_lost_requests_are_repeated(actor: Actor, model: Path, two: Group, expected: Batch, number: int) -> None:
    """The other engine answers them; the lost one takes part again from the next update on."""
    engine, before = two.on_ranks(actor, model), len(two.told)
    engine.update_weights(actor, 1)
    two.mark.write_text(f"begin {number}")
    begun = time.monotonic()
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert time.monotonic() - begun < 15
    assert SAID[number] in two.told[-1]
    assert len(two.engines.current) == 1
    engine.update_weights(actor, 2)
    assert two.engines.current == {0, 1}
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert len(two.told) == before + 1


@pytest.mark.slow
@pytest.mark.parametrize(("method", "number"), [("load", KILL), ("load", HANG), ("begin", KILL)])
def test_the_only_engine_gets_the_weights_anew(
    actor: Actor, model: Path, tmp_path: Path, expected: Batch, method: str, number: int
) -> None:
    """It is lost in the middle of a weight sync, or while it generates."""
    group = Group(tmp_path / "mark", 1)
    engine = group.on_ranks(actor, model)
    if method == "begin":
        engine.update_weights(actor, 1)
    group.mark.write_text(f"{method} {number}")
    if method == "load":
        engine.update_weights(actor, 1)
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert len(group.told) == 1
    assert SAID[number] in group.told[0]
    assert engine.version == 1
    engine.close()


class Scripted:
    """An engine that is lost at its first `generate`."""

    name, silence, lost = "scripted", 1.0, True

    def start(self) -> None:
        pass

    ready = close = restart = start

    def call(self, method: str, *args: Any) -> Any:
        if method == "generate" and self.lost:
            self.lost = False
            raise ProcessLost("gone")
        return [[] for _ in args[0]]


class Remembering(Scripted):
    """An engine that counts the prompt tokens behind the longest of its own sequences; one of two is lost on demand."""

    def __init__(self, both: Barrier) -> None:
        self.both, self.lost, self.sequences, self.computed = both, False, list[list[int]](), list[int]()

    def call(self, method: str, requests: list[Request], sampling: SamplingOptions) -> list[list[Response]]:
        if self.lost:
            self.lost, self.sequences = False, []
            raise ProcessLost("gone")
        if not self.sequences:
            self.both.wait(10)  # each draws some of the first turn
        for prompt in (request.prompt for request in requests):
            begun = [len(row) for row in self.sequences if prompt[: len(row)] == row]
            self.computed.append(len(prompt) - max(begun, default=0))
        answers = [[Response([row, 3], [0.0, 0.0]) for row in range(sampling.n)] for _ in requests]
        rows = [
            request.prompt + response.tokens for request, row in zip(requests, answers, strict=True) for response in row
        ]
        self.sequences += rows
        return answers


@pytest.mark.parametrize("loses", [False, True])
def test_a_turn_goes_to_the_engine_that_has_its_conversation(loses: bool) -> None:
    """Conversations that end leave no turn to the wrong engine; those of a lost engine go on at the other one."""
    both = Barrier(2)
    engines = [Remembering(both), Remembering(both)]
    pool = EnginePool(engines, tell=lambda text: None)  # type: ignore[arg-type]
    prompts = [[9] * 70 + [number] for number in range(8)]
    for turn in range(4):
        engines[1].lost = loses and turn == 2
        sampling = SamplingOptions(2, n=2 if turn == 0 else 1)
        answers = pool.begin([Request(prompt, seed=turn) for prompt in prompts], sampling)()
        drawn = [prompt + response.tokens for prompt, row in zip(prompts, answers, strict=True) for response in row]
        prompts = [row + [5] * 10 for row in drawn[1 + turn :][::-1]]
        first, second = (engine.computed[-len(drawn) :] for engine in engines)
        if turn and not engines[1].lost:
            moved = [number for number in [*first, *second] if number > 10]
            assert (first != [], second != []) == (True, not (loses and turn > 1))
            assert bool(moved) == (loses and turn == 2), "what is new alone"
        for engine in engines:
            engine.computed.clear()
    pool.close()


def test_requests_of_older_weights_are_not_drawn_with_newer_ones() -> None:
    """Two batches are in flight when the only engine is lost; after the weight sync for the first, both begin anew."""
    engines = EnginePool([Scripted()], tell=lambda text: None)  # type: ignore[list-item]
    requests = [Request([1], number) for number in range(3)]
    first, second = engines.begin(requests, SAMPLING), engines.begin(requests, SAMPLING)
    with pytest.raises(WeightsLostError):
        first()
    engines.load_by(lambda engines: None)
    with pytest.raises(WeightsLostError):
        second()
    assert engines.begin(requests, SAMPLING)() == [[], [], []]
    engines.close()


class Doomed(Scripted):
    """An engine that is lost in each draw, as long as `lost` says so."""

    def call(self, method: str, *args: Any) -> Any:
        return self.submit(method, *args).result()

    def submit(self, method: str, *args: Any, on_part: Any = None) -> Call:
        call = Call(method, 1.0)
        if method in ("generate", "draw") and self.lost:
            call.set_exception(ProcessLost("engine 0 ended its process"))
        else:
            call.set_result([] if method == "draw" else [[]])
        return call


@pytest.mark.parametrize("kind", [EnginePool, InFlightPool])
def test_an_engine_that_is_lost_again_and_again_ends_the_run(kind: type[EnginePool]) -> None:
    """Two losses are mended by a weight sync each, also after further answers; the third one in a row is named."""
    engine, told = Doomed(), list[str]()
    pool = kind([engine], tell=told.append)  # type: ignore[list-item]

    def draw(losses: int) -> Any:
        for _ in range(losses):
            engine.lost = True
            with pytest.raises(WeightsLostError):
                pool.begin([Request([1], 0)], SAMPLING)()
            pool.load_by(lambda engines: None)
        engine.lost = False
        return pool.begin([Request([1], 0)], SAMPLING)()

    assert draw(2) == draw(2) == [[]]
    assert len(told) == 4
    with pytest.raises(ProcessLost, match="engine 0 ended its process; it was lost 3 times without an answer in betw"):
        draw(3)
    pool.close()


def test_chunks_have_about_equal_tokens(two: Group) -> None:
    """Two engines draw at most 8 responses each at a time, so 24 responses take two rounds."""
    requests = [Request([1] * (60 if number < 2 else 3), number) for number in range(12)]
    chunks, of_engines = two.engines._queues(requests, SAMPLING)
    assert not any(of_engines)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(12))
    assert len(chunks) == 4
    assert max(map(len, chunks)) <= 5
    assert len(two.engines._queues(requests[:3], SAMPLING)[0]) == 2
    assert not two.engines._queues([], SAMPLING)[0]


def test_an_engine_in_a_process_reads_sequences(two: Group) -> None:
    (result,) = two.engines.engines[0].call("read", [[1, 2, 3]], 1)
    assert result.log_probs.tolist() == [0, -1, -1]
    assert result.top_ids.tolist() == [[-1, -1], [2, -3], [3, -4]]


def test_it_works_in_the_background(actor: Actor, model: Path, two: Group, expected: Batch) -> None:
    engine = two.on_ranks(actor, model)
    engine.update_weights(actor, 1)
    two.mark.write_text("begin wait")
    future = engine.generate_async(PROMPTS, SAMPLING)
    assert not future.done()
    two.mark.unlink()
    assert same(future.result(), expected)


def test_a_refusal_and_an_update_that_succeeds(actor: Actor, model: Path, two: Group, expected: Batch) -> None:
    engine, before = two.on_ranks(actor, model), len(two.told)
    two.mark.write_text("load refuse")
    with pytest.raises(RuntimeError, match="update to version 1 failed: no room for the sixth tensor"):
        engine.update_weights(actor, 1)
    with pytest.raises(RuntimeError, match="does not generate"):
        engine.generate(PROMPTS, SAMPLING)
    engine.update_weights(actor, 2)
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert len(two.told) == before


def test_a_flipped_bit_is_seen(actor: Actor, model: Path, two: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(*args: Any, **kwargs: Any) -> Iterator[Bucket]:
        for bucket in in_buckets(*args, **kwargs):
            bucket.data[0] ^= 1
            yield bucket

    monkeypatch.setattr(sender, "in_buckets", flip)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight arrived with other bits than were sent"):
        two.on_ranks(actor, model).update_weights(actor, 1)


@pytest.mark.parametrize(
    ("devices", "ways"),
    [
        (["gpu 0"], ["in place"]),
        (["gpu 1", "gpu 0", "gpu 2"], ["nccl", "in place", "nccl"]),
        (["gpu 1", "gpu 1"], ["gloo", "gloo"]),
        (["gpu 0", ""], ["in place", "gloo"]),
    ],
)
def test_nccl_needs_a_gpu_for_each_engine(monkeypatch: pytest.MonkeyPatch, devices: list[str], ways: list[str]) -> None:
    """The weights are on GPU 0; an engine there reads them in place."""
    monkeypatch.setattr(sender, "device_id", lambda device: "gpu 0")
    sending = sender.WeightSender()
    sending._engines = [Scripted() for _ in devices]  # type: ignore[misc]
    sending._connect([[(device, "a process")] for device in devices], torch.device("cuda"))
    assert sending.ways == ways
    assert sending._peers.keys() == set(ways)
    for way, peer in sending._peers.items():
        assert peer.rendezvous.size == 1 + ways.count(way)
        assert peer.rendezvous.backend == ("nccl" if way == "nccl" else "gloo")
    sending._connect([[(device, "a worker") for device in devices]], torch.device("cuda"))  # of one engine
    assert sending.ways == ways
    sending.close()


class OnCuda(Stub):
    """Takes nothing but CUDA tensors."""

    def load(self, named_tensors: NamedTensors) -> None:
        super().load(named_tensors)
        assert all(tensor.is_cuda for tensor in self.weights.values())


@pytest.mark.parametrize("device", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.gpu(2))])
def test_an_engine_on_the_device_of_the_weights_reads_them_in_place_and_another_by_nccl(
    device: int, model: Path, expected: Batch
) -> None:
    """The checksums are those of the sender."""
    actor = Actor.from_pretrained(model, device="cuda:0")
    engines = EnginePool(processes(OnCuda, [str(device)]), check=True, bucket_bytes=8192)
    engine = EngineOnRanks(actor, model, lambda: engines, bucket_bytes=8192)
    for version in range(1, 4):
        engine.update_weights(actor, version)
        assert same(engine.generate(PROMPTS, SAMPLING), expected)
    assert engines.ways == ["nccl" if device else "in place"]
    engine.close()


class ScriptedCalls(list[Any]):
    """Calls of a script, as (method, argument), and the answers to them."""

    waiting = False

    def __init__(self, *script: tuple[str, Any]) -> None:
        super().__init__(script)
        self.answers = list[tuple[str, Any]]()

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        method, argument = self.pop(0)

        def answer(value: Any = None) -> None:
            self.answers.append((method, value))

        return SimpleNamespace(method=method, arguments=lambda: (argument,), answer=answer, fail=answer)


def test_a_sender_that_asks_before_the_start_of_an_engine_is_answered_after_it() -> None:
    """On Ray another process than the one that starts an engine sends weights."""
    calls = ScriptedCalls(("ready", None), ("start", Stub), ("ready", None))
    process.EngineServer(calls).serve()  # type: ignore[arg-type]
    assert [method for method, _ in calls.answers] == ["ready", "start", "ready"]
    assert calls.answers[0] == calls.answers[2]


@pytest.mark.parametrize(("device", "users", "threads"), [("0", None, "2"), ("0", "7", "7"), ("", None, None)])
def test_an_engine_on_a_gpu_has_few_threads(
    monkeypatch: pytest.MonkeyPatch, device: str, users: str | None, threads: str | None
) -> None:
    variables = dict[str, str]()
    monkeypatch.setattr(process, "Child", lambda *_, env, **options: variables.update(env))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    (engine,) = processes(Stub, [device])
    engine._launch()
    assert variables["CUDA_VISIBLE_DEVICES"] == device
    assert variables.get("OMP_NUM_THREADS") == threads


def test_an_engine_without_its_gpus_does_not_take_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong id would run it there, and slowly."""
    for seen, devices, refused in ((1, "0", False), (0, "", False), (0, "99", True), (1, "0,99", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        monkeypatch.setattr(torch.cuda, "device_count", partial(int, seen))
        calls = ScriptedCalls(("start", Stub))
        process.EngineServer(calls).serve()  # type: ignore[arg-type]
        ((_, answer),) = calls.answers
        assert (answer is not None) == refused
        if refused:
            assert str(answer) == (
                f"an engine gets the GPUs {devices}, and torch finds {seen} of them; give ids of GPUs of this "
                "machine, each once, or cpu"
            )


def test_an_engine_has_gpus_or_cpus() -> None:
    dims = ParallelDims(tp=2)
    assert device_groups(["4", "5", "7", "6"], dims) == ["4,5", "7,6"]
    assert device_groups(["", ""], dims) == [""]
    assert device_groups(["4", "", "4"], ParallelDims()) == ["4", "", "4"], "two engines may share a GPU"
    for devices, named in ((["4", ""], "4,cpu"), (["4", "5", "6", "6"], "6,6")):
        with pytest.raises(ValueError, match=f"the devices {named} of an engine of .*tp=2.* must be 2 GPUs, each once"):
            device_groups(devices, dims)


def test_an_engine_that_does_not_start_is_named() -> None:
    with pytest.raises((ValueError, RuntimeError), match="no engine in this place"):
        EnginePool(processes(partial(int, "no engine in this place"), [""]))


def with_an_engine(group: ProcessGroup, model: Path, mark: Path) -> list[list[int]]:
    """An actor on 4 ranks; rank 0 has the engine, which ends while it generates."""
    actor = Actor.from_pretrained(model, dims=ParallelDims(dp=2, tp=2), device="cpu")

    def start() -> EnginePool:
        return EnginePool(processes(partial(Fragile, mark), [""], silence=20.0), tell=lambda text: None)

    engine = EngineOnRanks(actor, model, start, ranks=[0])
    engine.update_weights(actor, 1)
    found = engine.generate(PROMPTS, SAMPLING)
    engine.close()
    assert not mark.exists()
    return [found.tokens.tolist(), found["log_probs"].tolist()]


@pytest.mark.slow
def test_all_ranks_stream_anew(ranks: RankPool, model: Path, tmp_path: Path, expected: Batch) -> None:
    mark = tmp_path / "mark"
    mark.write_text("begin 9")
    for tokens, log_probs in ranks.run(with_an_engine, model, mark):
        assert tokens == expected.tokens.tolist()
        assert log_probs == expected["log_probs"].tolist()


class Saving(Stub):
    """Writes what arrives to a file; all engines of a test write the same, so each file has an engine's own name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load(self, named_tensors: NamedTensors) -> None:
        super().load(named_tensors)
        save_file(self.weights, self.folder / f"{os.getpid()}.safetensors")


def sent_to_engines(group: ProcessGroup, model: Path, dims: ParallelDims, out: Path) -> None:
    """Hand a changed model from four ranks to two engines, and save it."""
    actor = Actor.from_pretrained(model, dims=dims, device="cpu")
    for parameter in actor.engine.module.parameters():
        parameter.data.mul_(1.5)
    (out / "arrived").mkdir(exist_ok=True)

    def start() -> EnginePool:
        return EnginePool(processes(partial(Saving, out / "arrived"), ["", ""]), check=True, bucket_bytes=4096)

    engine = EngineOnRanks(actor, model, start, ranks=[0], bucket_bytes=4096)
    engine.update_weights(actor, 1)
    engine.close()
    actor.save_pretrained(out / "saved")


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(tp=2, pp=2), ParallelDims(dp=2, cp=2)], ids=str)
def test_what_arrives_in_other_processes_is_what_would_be_saved(
    ranks: RankPool, model: Path, tmp_path: Path, dims: ParallelDims
) -> None:
    ranks.run(sent_to_engines, model, dims, tmp_path)
    files = list((tmp_path / "arrived").iterdir())
    assert len(files) == 2
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for file in files:
        arrived = load_file(file)
        assert arrived.keys() == saved.keys()
        for name, tensor in saved.items():
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, HANG])
def test_the_other_engine_gets_all_weights(actor: Actor, model: Path, two: Group, expected: Batch, number: int) -> None:
    """One engine is lost in the middle of a weight sync, which is repeated for the other engine."""
    engine, before = two.on_ranks(actor, model), len(two.told)
    two.mark.write_text(f"load {number}")
    begun = time.monotonic()
    engine.update_weights(actor, 1)
    assert time.monotonic() - begun < 15
    assert SAID[number] in two.told[-1]
    assert len(two.told) == before + 1
    assert len(two.engines.current) == 1
    assert same(engine.generate(PROMPTS, SAMPLING), expected)
    engine.update_weights(actor, 2)
    assert two.engines.current == {0, 1}


def test_a_group_that_breaks_is_seen_by_both_sides(two: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are alive and no byte arrives: the error says so within the time limit, and the next group works."""

    def silent(*args: Any) -> None:
        raise BucketMissed("the cable is cut")

    with monkeypatch.context() as patch:
        patch.setattr(Peer, "broadcast", silent)
        with pytest.raises(RuntimeError, match=r"the cable is cut|a bucket did not reach all engines: "):
            two.engines.load((f"w{number}", torch.ones(1 << 10)) for number in range(3))
    two.engines.load((f"w{number}", torch.ones(1 << 10)) for number in range(3))
    assert two.engines.current == {0, 1}


def test_an_engine_waits_for_a_bucket_within_the_time_limit() -> None:
    """The sender meets the engine, and then sends nothing, as a sender that hangs."""
    listener = listen_on(LOOPBACK)
    rendezvous = Rendezvous("gloo", LOOPBACK, listener.getsockname()[1], 0, 2, 0.5, "key")
    sending = Peer(rendezvous, listener)
    receiver = WeightReceiver()
    entry = BucketEntry("w", torch.float32, torch.Size([2]), 0, 0, 2, False)
    message = WeightMessage(rendezvous._replace(rank=1), None, "plan")
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(list, receiver.receive(message))
        sending.publish("plan 0", [entry])
        sending._joined(lambda: False)
        with pytest.raises(BucketMissed, match=r"(?i)did not reach all engines: not within 0.5 s|timed? ?out"):
            received.result(10)
    sending.close()


def test_the_extra_memory_of_a_transfer_is_two_buckets(two: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a bucket begins, the sender holds none of the tensors before."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    buffers: set[int] = set()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(10):
            alive.append(sum(reference() is not None for reference in made))
            tensor = torch.zeros(1 << 10)
            made.append(weakref.ref(tensor))
            yield f"v{number}", tensor
            del tensor

    def watching(named_tensors: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Iterator[Bucket]:
        for bucket in in_buckets(named_tensors, *args, **kwargs):
            assert bucket.ring.untyped_storage().nbytes() == 2 * 8192
            buffers.add(bucket.data.data_ptr())
            yield bucket

    monkeypatch.setattr(sender, "in_buckets", watching)
    two.engines.load(tensors())
    assert max(alive) <= 1
    assert len(buffers) == 2
