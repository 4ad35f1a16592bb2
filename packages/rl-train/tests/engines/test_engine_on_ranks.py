"""Weight sync and generation on the ranks of a grid, with an engine that keeps what arrives."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ckpt.files import in_fp8
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import SamplingOptions
from rl_models import Actor
from rl_models.api import WholeBatches
from rl_train.engines import EngineOnRanks, engine_on_ranks
from rl_train.engines.interface import Request, Responses
from rl_train.engines.process import load_into
from rl_train.engines.vllm_worker import VllmWorker
from rl_train.loop.models import Models
from rl_train.weight_sync.buckets import (
    Bucket,
    WeightFormat,
    checksum,
    complete,
    expected_tensors,
    in_buckets,
    unpack,
)
from rl_train.weight_sync.transport import BucketMissed

from ..conftest import EXPERTS, SIZES
from .stub import Refusing, Stub


def synced_weights_match(
    group: ProcessGroup,
    model: Path,
    dims: ParallelDims,
    out: Path,
    ranks: list[int] | None,
    quantization: Literal["fp8"] | None = None,
) -> bool:
    """Hand a changed model over and save it; say whether this rank has an engine, whose tensors are the saved ones."""
    actor = Actor.from_pretrained(model, dims=dims, device="cpu")
    for parameter in actor.engine.module.parameters():
        parameter.data.mul_(1.5)
    stub = Stub()
    weight_format = WeightFormat.of_weights(model, quantization)
    # Some tensors are larger than a bucket, and others share one.
    engine = EngineOnRanks(actor, model, lambda: stub, ranks=ranks, bucket_bytes=1 << 15, weight_format=weight_format)
    assert bool(stub.weights) == (quantization is not None and group.rank() in (ranks or range(4)))
    engine.update_weights(actor, 3)
    assert engine.version == 3
    actor.save_pretrained(out)
    if not stub.weights:
        return False
    saved = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if quantization is not None:
        saved = dict(in_fp8(saved.items()))
        assert any(tensor.dtype == torch.float8_e4m3fn for tensor in saved.values())
    assert stub.weights.keys() == saved.keys()
    for name, tensor in saved.items():
        assert stub.weights[name].dtype == tensor.dtype
        assert torch.equal(stub.weights[name], tensor), name
    return True


@pytest.mark.parametrize(
    ("model", "dims"),
    [
        # Two key-value heads: each is on two ranks.
        pytest.param("llama", ParallelDims(tp=4), marks=pytest.mark.slow),
        pytest.param("tied", ParallelDims(pp=2, tp=2), marks=pytest.mark.slow),
        ("mixture", ParallelDims(dp=2, tp=2, ep=2)),
        pytest.param("llama", ParallelDims(dp=2, cp=2), marks=pytest.mark.slow),
        pytest.param("tied", ParallelDims(pp=4), marks=pytest.mark.slow),
        pytest.param("mixture", ParallelDims(dp=4, ep=4), marks=pytest.mark.slow),
        pytest.param("mixture", ParallelDims(pp=2, dp=2, ep=2), marks=pytest.mark.slow),
        pytest.param("mixture", ParallelDims(cp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_arrives_is_what_would_be_saved(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path, model: str, dims: ParallelDims
) -> None:
    assert ranks.run(synced_weights_match, folders[model], dims, tmp_path / "all", None) == [True] * 4
    assert ranks.run(synced_weights_match, folders[model], dims, tmp_path / "one", [2]) == [False, False, True, False]


def test_an_engine_in_fp8_has_the_weights_from_its_start_on(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    dims = ParallelDims(dp=2, tp=2, ep=2)
    found = ranks.run(synced_weights_match, folders["mixture"], dims, tmp_path / "fp8", [0, 3], "fp8")
    assert found == [True, False, False, True]


def generated(group: ProcessGroup, model: Path, engines: list[int]) -> list[Any]:
    actor = Actor.from_pretrained(model, dims=ParallelDims(dp=2, tp=2), device="cpu")
    engine = EngineOnRanks(actor, model, Stub, ranks=engines, sleeps=True)
    prompts = [[1], [2, 3], [4, 5, 6], [7], [8]]
    future = engine.generate_async(prompts, SamplingOptions(2, n=2, seed=5))
    batch = engine.generate(prompts, SamplingOptions(2, n=2, seed=5))
    assert torch.equal(future.result().tokens, batch.tokens)
    assert [row.tolist()[:-2] for row in batch.split()] == [row for row in prompts for _ in range(2)]
    assert batch["log_probs"].shape == batch.tokens.shape
    with pytest.raises(ValueError, match=r"prompt 1: .*32"):
        engine.generate([[1], [32]], SamplingOptions(2))
    engine.close()
    return [row.tolist() for row in batch.split()]


def test_each_rank_gets_the_whole_batch_whatever_ranks_have_engines(ranks: RankPool, folders: dict[str, Path]) -> None:
    found = [ranks.run(generated, folders["llama"], engines) for engines in ([0, 1, 2, 3], [0, 2], [1])]
    assert all(tokens == found[0][0] for one in found for tokens in one)
    # The seeds of the five prompts modulo 7, as in earlier releases: the responses of a run do not change.
    assert [row[-1] for row in found[0][0][::2]] == [4, 4, 6, 2, 1]


def broken_off(group: ProcessGroup, model: Path, mark: Path) -> list[str]:
    """An engine on rank 1 refuses a tensor; later a tensor is missing; then a weight sync succeeds."""
    actor = Actor.from_pretrained(model, dims=ParallelDims(tp=2, pp=2), device="cpu")
    engine = EngineOnRanks(actor, model, lambda: Refusing(mark), ranks=[1, 3], bucket_bytes=2048)
    said = []
    if group.rank() == 0:
        mark.touch()
    torch.distributed.barrier(group)
    with pytest.raises(RuntimeError) as update:
        engine.update_weights(actor, 1)
    said.append(str(update.value))
    with pytest.raises(RuntimeError) as generation:
        engine.generate([[1]], SamplingOptions(2))
    said.append(str(generation.value))
    assert engine.version == 0
    torch.distributed.barrier(group)
    if group.rank() == 0:
        mark.unlink()
    torch.distributed.barrier(group)
    with pytest.raises(RuntimeError) as cut:
        engine.update_weights(Cut(actor), 2)
    said.append(str(cut.value))
    engine.update_weights(actor, 3)
    assert len(engine.generate([[1]], SamplingOptions(2))) == 1
    assert engine.version == 3
    return said


class Cut:
    """An actor whose stream lacks the last tensor, on all ranks."""

    def __init__(self, actor: Actor) -> None:
        self.actor, self.grid = actor, actor.grid

    def stream_weights(self, **options: Any) -> Iterator[tuple[str, Tensor]]:
        named_tensors = list(self.actor.stream_weights(**options))
        return iter(named_tensors[:-1])


def test_an_engine_refuses_until_a_whole_update(ranks: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    for said in ranks.run(broken_off, folders["llama"], tmp_path / "mark"):
        update, generation, cut = said
        assert "the update to version 1 failed: " in update
        assert "no room for the fourth tensor" in update
        assert "the engine does not generate: the update to version 1 failed: " in generation
        assert "no room for the fourth tensor" in generation
        assert "the stream ended without" in cut


def failing(named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    yield from itertools.islice(named_tensors, 4)
    raise OSError("the network is down")


def test_a_stream_that_fails(folders: dict[str, Path]) -> None:
    actor, model = Actor.from_pretrained(folders["llama"], device="cpu"), folders["llama"]
    engine = EngineOnRanks(actor, model, Stub)
    stream = actor.stream_weights
    actor.stream_weights = lambda **options: failing(stream(**options))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the update to version 1 failed: the network is down"):
        engine.update_weights(actor, 1)
    with pytest.raises(RuntimeError, match="does not generate: the update to version 1 failed"):
        engine.generate([[1]], SamplingOptions(1))


def test_an_engine_that_misses_a_bucket_refuses_until_a_whole_update(folders: dict[str, Path]) -> None:
    """Though no rank knows of another cause."""
    actor, model, engine = Actor.from_pretrained(folders["llama"], device="cpu"), folders["llama"], Stub()
    on_ranks = EngineOnRanks(actor, model, lambda: engine)

    def late(named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        raise BucketMissed("a bucket was late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", late)
        with pytest.raises(RuntimeError, match="the update to version 1 failed: a bucket was late"):
            on_ranks.update_weights(actor, 1)
    with pytest.raises(RuntimeError, match="does not generate: the update to version 1 failed: a bucket was late"):
        on_ranks.generate([[1]], SamplingOptions(1))
    on_ranks.update_weights(actor, 2)
    assert len(on_ranks.generate([[1]], SamplingOptions(1))) == 1


@pytest.mark.parametrize("place", ["ranks", "process", "worker of vLLM"])
def test_an_engine_that_leaves_tensors_refuses(folders: dict[str, Path], place: str) -> None:
    """In a process of its own and in vLLM's workers they come from a receiver."""
    actor, model, engine = Actor.from_pretrained(folders["llama"], device="cpu"), folders["llama"], Stub()
    engine.load = lambda named_tensors: [next(named_tensors), None][1]  # type: ignore[method-assign]
    second = [name for name, _ in actor.stream_weights()][1]
    if place == "ranks":
        with pytest.raises(RuntimeError, match=f"the engine did not take {second}"):
            EngineOnRanks(actor, model, lambda: engine).update_weights(actor, 1)
        return
    receiver: Any = SimpleNamespace(receive=lambda message: actor.stream_weights())
    if place == "process":
        with pytest.raises(RuntimeError, match=f"the engine did not take {second}"):
            load_into(engine, receiver, SimpleNamespace(shards=False))  # type: ignore[arg-type]
        return
    worker: Any = SimpleNamespace(rank=0, device=torch.device("meta"), _weight_receiver=receiver, _weights=engine)
    error = pickle.loads(VllmWorker.receive_weights(worker, pickle.dumps([None])))
    assert f"the engine did not take {second}" in str(error)


def test_only_the_model_s_own_tensors_pass(folders: dict[str, Path]) -> None:
    expected = expected_tensors(folders["tied"])
    right = [(name, torch.zeros(entry.shape)) for name, entry in expected.items() if not entry.optional]
    assert len(list(complete(right, expected))) == len(right)
    name = right[3][0]
    for wrong, message in [
        ([*right, ("model.other", torch.zeros(1))], "model.other is not one of the model's"),
        ([*right, right[3]], f"{name} came twice"),
        (right[:3] + right[4:], f"without {name}"),
        ([(name, tensor.new_zeros(2)) for name, tensor in right], r"has the shape \[2\], not"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(complete(wrong, expected))


def test_a_checksum_sees_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        tensor = torch.arange(60).reshape(5, 12).to(dtype)
        assert checksum(tensor) == checksum(tensor.t().contiguous().t())
        changed = tensor.clone()
        changed.view(torch.uint8)[4, 5] ^= 1
        swapped = tensor.flip(0)
        assert len({checksum(tensor), checksum(changed), checksum(swapped)}) == 3


@pytest.mark.parametrize("check", [False, True])
def test_tensors_travel_as_the_bytes_of_buckets(check: bool) -> None:
    """The tensors have several dtypes and shapes. Two are larger than a bucket, and one of them is a view."""
    tensors = {
        "matrix": torch.randn(3, 5).bfloat16(), "number": torch.tensor(2.5), "ids": torch.arange(4).reshape(2, 2),
        "nothing": torch.empty(0), "large": torch.randn(40), "view": torch.randn(4, 6).t()[1:],
        "byte": torch.tensor(True),
    }  # fmt: skip
    sizes = []

    def buckets() -> Iterator[Bucket]:
        for bucket in in_buckets(iter(tensors.items()), 64, check=check):
            sizes.append(len(bucket.data))
            yield bucket

    found = {name: tensor.clone() for name, tensor in unpack(buckets())}
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert max(sizes) <= 64
    assert len(sizes) == (10 if check else 7)


def peaks(group: ProcessGroup, model: Path, bucket_bytes: int) -> list[int]:
    """The most bytes of whole tensors that are alive at a time while an engine takes them."""
    actor = Actor.from_pretrained(model, dims=ParallelDims(tp=2, dp=2), device="cpu")

    class Counting(Stub):
        def load(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
            before = [x for x in gc.get_objects() if type(x) is Tensor]  # kept: their addresses stay theirs
            known = {x.untyped_storage().data_ptr() for x in before}
            for _ in named_tensors:
                storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
                alive = {storage.data_ptr(): storage.nbytes() for storage in storages}
                self.peak = max(self.peak, sum(size for where, size in alive.items() if where not in known))

    stub = Counting()
    EngineOnRanks(actor, model, lambda: stub, bucket_bytes=bucket_bytes).update_weights(actor, 1)
    return [stub.peak]


def test_the_extra_memory_is_a_bucket(ranks: RankPool, folders: dict[str, Path]) -> None:
    total = sum(t.nbytes for file in folders["llama"].glob("*.safetensors") for t in load_file(file).values())
    (peak,) = ranks.run(peaks, folders["llama"], 16384)[0]
    # The tensors of a bucket, the two buffers of its exchange, and a few small messages.
    assert peak <= 3 * 16384 + 2048 < total / 1.4


def test_sampling_masks_stand_at_their_tokens(folders: dict[str, Path]) -> None:
    engine = EngineOnRanks(Actor.from_pretrained(folders["llama"], device="cpu"), folders["llama"], Stub)
    batch = engine.generate([[1, 2], [3]], SamplingOptions(3, n=2, top_k=4, keep_sampling_mask=True))
    assert batch.sampling_mask is not None
    kept = [sorted({token, 9}) if drawn else [] for token, drawn in zip(batch.tokens.tolist(), batch.mask, strict=True)]
    assert [sorted({*ids}) for ids in batch.sampling_mask.tolist()] == kept
    assert engine.generate([[1]], SamplingOptions(3)).sampling_mask is None


class Routing(Stub):
    """Reports the experts of all tokens but the last, in all layers; with `last_alone` those of the last response."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.last_alone = layers, False

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        answers = super().begin(requests, sampling)()
        for request, row in zip(requests, answers, strict=True):
            for number, response in enumerate(row):
                if not self.last_alone or response is answers[-1][-1]:
                    experts = self.experts(len(request.prompt) + len(response.tokens) - 1)
                    row[number] = response._replace(routing=experts)
        return lambda: answers

    def experts(self, tokens: int) -> Tensor:
        first = torch.arange(tokens * self.layers).view(tokens, self.layers, 1) % 4
        return torch.cat([first, (first + 1) % 4], dim=2).to(torch.int16)


def test_reported_experts_are_replayed(tmp_path: Path) -> None:
    """The batch has the experts of the routed layers, and none for the last token, for which the router chooses."""
    sizes = SIZES | EXPERTS | {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    actor = Actor.from_pretrained(tmp_path, device="cpu")
    engine = Routing(layers=3)
    batch = EngineOnRanks(actor, tmp_path, lambda: engine).generate([[1, 2], [3, 4, 5]], SamplingOptions(3, n=2))
    for row, tokens in zip(batch.split("routing"), batch.split(), strict=True):
        assert torch.equal(row[:-1], engine.experts(len(tokens) - 1)[:, [0, 2]])
        assert (row[-1] == -1).all()
    plain = replace(batch, fields={})
    recorded = actor.predict(plain, record_routing=True)["routing"]
    complete_routing = plain.with_fields(routing=torch.where(batch["routing"] < 0, recorded, batch["routing"]))
    replayed = actor.log_probs(batch).log_probs
    choices = [
        pair
        for row in zip(batch["routing"].tolist(), recorded.tolist(), strict=True)
        for pair in zip(*row, strict=True)
    ]
    differ = [expert not in own for drew, own in choices for expert in drew if expert >= 0]
    options: Any = SimpleNamespace(sampling=SimpleNamespace(temperature=1.0))
    assert Models(WholeBatches(actor)).routing_difference(batch, options) == pytest.approx(sum(differ) / len(differ))
    assert 0 < sum(differ) < len(differ)
    assert Models(WholeBatches(actor)).routing_difference(plain.with_fields(routing=recorded), options) == 0
    assert torch.equal(replayed, actor.log_probs(complete_routing).log_probs)
    assert not torch.equal(replayed, actor.log_probs(plain).log_probs)
    engine.last_alone = True
    partial = EngineOnRanks(actor, tmp_path, lambda: engine).generate([[1, 2], [3, 4, 5]], SamplingOptions(3, n=2))
    none, *_, last = partial.split("routing")
    assert (none == -1).all()
    assert torch.equal(last, batch.split("routing")[-1])
    for wrong, reported in (
        (engine.experts(9), r"\[9, 3, 2\] for a sequence of 8"),
        (Routing(5).experts(2), "of 3 layers, 2"),
    ):
        with pytest.raises(ValueError, match=reported):
            engine_on_ranks._padded_routing(wrong, 8, [True, False, True])
