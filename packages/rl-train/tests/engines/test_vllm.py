"""The real vLLM: its sampled log-probs are the actor's, before and after weight syncs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.head import SamplingMask
from parallel_layers.inference import sample_with_mask
from parallel_layers.testing import RankPool
from parallel_models import SamplingOptions
from rl_models import Actor, Batch, LoraOptions
from rl_models.api import WholeBatches
from rl_train.engines import EngineOnRanks, EnginePool, Vllm, VllmEngine, processes
from rl_train.loop.checked_run import check_run
from rl_train.loop.run import train
from rl_train.options.options import TrainOptions
from rl_train.weight_sync.buckets import WeightFormat

pytestmark = pytest.mark.vllm

PROMPTS = [[1, 4], [3, 5, 6], [9] * 10]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with heads of 32 numbers, the smallest that vLLM's attention on a CPU takes."""
    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def actor(llama: Path) -> Actor:
    return Actor.from_pretrained(llama, device="cpu")


@pytest.fixture(scope="module")
def engine(actor: Actor, llama: Path) -> Iterator[VllmEngine]:
    # vLLM's CPU build ends where a seeded request is recomputed in two steps: "CPU Generator does not use offset".
    options = SETTINGS | {"max_num_batched_tokens": 2**14}
    engine = VllmEngine(actor, llama, devices=[""], in_flight=True, stale_cache="recompute", **options)
    yield engine
    engine.close()


def change(actor: Actor, part: str = "", scale: float = 0.1) -> None:
    torch.manual_seed(1)
    for name, parameter in actor.engine.module.named_parameters():
        parameter.data.add_(0 if part not in name else torch.randn_like(parameter) * scale)


def difference(actor: Any, engine: EngineOnRanks, **draws: Any) -> float:
    """Return the largest difference between vLLM's log-probs and the actor's."""
    options = SamplingOptions(6, **draws)
    batch = engine.generate(PROMPTS, options)
    assert len(batch) == len(PROMPTS) * options.n
    mine = actor.log_probs(batch, temperature=options.temperature or 1.0).log_probs
    return float((mine - batch["log_probs"]).abs()[batch.mask].max())


def test_log_probs_are_the_actor_s(actor: Actor, engine: VllmEngine) -> None:
    """At the sampling temperature, before the truncation."""
    assert difference(actor, engine, n=2) < 1e-5
    assert difference(actor, engine, temperature=0.7, top_k=5, n=2) < 1e-5
    assert difference(actor, engine, temperature=0.0, n=2) < 1e-5
    before = engine.generate(PROMPTS, SamplingOptions(6, seed=3))
    change(actor)
    assert difference(actor, engine) > 1e-3
    engine.update_weights(actor, 1)
    assert difference(actor, engine, temperature=1.4, top_p=0.8) < 1e-5
    assert difference(actor, engine, n=3) < 1e-5
    after = engine.generate(PROMPTS, SamplingOptions(6, seed=3))
    assert not torch.equal(before.tokens, after.tokens)


@pytest.mark.parametrize("top_k", [0, 4])
def test_it_reads_sequences_as_a_teacher(actor: Actor, engine: VllmEngine, tmp_path: Path, top_k: int) -> None:
    engine.update_weights(actor, 2)
    actor.save_pretrained(tmp_path / "teacher")
    teacher = LlamaForCausalLM.from_pretrained(tmp_path / "teacher")
    assert isinstance(engine._local, EnginePool)
    rows = [*PROMPTS, [7]]
    for tokens, result in zip(rows, engine._local.engines[0].call("read", rows, top_k), strict=True):
        log_probs = teacher(torch.tensor([tokens])).logits[0].detach().log_softmax(-1)
        for place, ids in enumerate(result.top_ids.tolist()):
            listed = [id for id in ids if id >= 0]
            if not place:
                assert listed == []
                continue
            row = log_probs[place - 1]
            assert set(listed) == {tokens[place], *row.topk(top_k).indices.tolist()}
            torch.testing.assert_close(result.top_log_probs[place, : len(listed)], row[listed], rtol=0, atol=1e-5)
            torch.testing.assert_close(result.log_probs[place], row[tokens[place]], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="64 tokens are too many for vLLM, which reads up to 63"):
        engine._local.engines[0].call("read", [[1] * 64], top_k)


def test_adapters_are_synced_merged_and_alone(llama: Path, actor: Actor, engine: VllmEngine) -> None:
    lora = LoraOptions(rank=4, seed=1)
    adapted = Actor.from_pretrained(llama, device="cpu", lora=lora)
    alone = VllmEngine(adapted, llama, devices=[""], lora=lora, **SETTINGS)
    try:
        assert difference(adapted, alone) < 1e-5
        for version in (1, 2):
            change(adapted, "lora", 0.02)
            for synced in (engine, alone):
                assert difference(adapted, synced) > 1e-3
                synced.update_weights(adapted, version)
                # Sums in another order: 9e-6 at most over twelve draws.
                assert difference(adapted, synced, n=2) < 2e-5
    finally:
        alone.close()
        engine.update_weights(actor, 3)


def test_weights_are_copied_into_the_parameters(llama: Path) -> None:
    """From the third weight sync on, in a process that keeps weights as a GPU does."""
    actor = Actor.from_pretrained(llama, device="cpu")
    worker = f"{__name__.rpartition('.')[0]}.plain_on_cpu.PlainWorker"
    engine = VllmEngine(actor, llama, devices=[""], worker_extension_cls=worker, **SETTINGS)
    try:
        for version in range(1, 5):
            change(actor, scale=0.02 * version)
            assert difference(actor, engine) > 1e-3
            engine.update_weights(actor, version)
            assert difference(actor, engine, n=2) < 1e-5
    finally:
        engine.close()


def test_fp8_weights_are_synced_with_their_scales(tmp_path: Path) -> None:
    """The engine computes with the dequantized weights of the actor, before and after it has learned."""
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).save_pretrained(tmp_path / "model")
    actor = Actor.from_pretrained(tmp_path / "model", device="cpu")
    worker = f"{__name__.rpartition('.')[0]}.fp8_on_cpu.Fp8Worker"
    options = SETTINGS | {"dtype": "float16", "quantization": "fp8", "worker_extension_cls": worker}
    make = partial(Vllm, tmp_path / "model", **options)
    weight_format = WeightFormat.of_weights(tmp_path / "model", "fp8")
    engine = EngineOnRanks(
        actor, tmp_path / "model", lambda: EnginePool(processes(make, [""]), check=True), weight_format=weight_format
    )
    try:
        for version in (1, 2):
            actor.save_pretrained(tmp_path / f"{version}")
            ckpt.merge(tmp_path / f"{version}", tmp_path / f"{version}-fp8", format="fp8")
            dequantized = Actor.from_pretrained(tmp_path / f"{version}-fp8", device="cpu")
            exact = difference(dequantized, engine, n=4)
            assert exact < 5e-2  # float16
            assert difference(actor, engine, n=4) > 3 * exact
            change(actor)
            assert difference(actor, engine, n=4) > 20 * exact
            engine.update_weights(actor, version)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "truncation", [{"top_k": 30, "top_p": 0.6}, {"top_k": 5}, {"top_k": 99, "top_p": 0.9}], ids=str
)
def test_sampling_masks_are_the_actor_s(actor: Actor, engine: VllmEngine, truncation: dict[str, Any]) -> None:
    """The kept tokens are those that the native sampler keeps, and log-probs are normalised over them."""
    masked = {"temperature": 0.7, "n": 2, "keep_sampling_mask": True, **truncation}
    assert difference(actor, engine, **masked) < 1e-5
    batch = engine.generate(PROMPTS, SamplingOptions(6, **masked))
    assert batch.sampling_mask is not None
    found, kept = batch.sampling_mask.split(batch.lengths), list[int]()
    for tokens, mask, response in zip(batch.split(), found, batch.responses(), strict=True):
        ids = mask.tolist()
        for place in range(len(tokens) - len(response), len(tokens)):
            packed = PackedSequence.from_sequences([tokens[:place]])
            logits = actor.engine.module.next_logits(packed, cache=actor.engine.module.new_cache(1, 64))
            *_, expected = sample_with_mask(logits, torch.zeros(1), temperature=0.7, **truncation)
            assert [sorted(ids[place])] == SamplingMask.from_bits(expected).tolist()
            kept.append(len(ids[place]))
        assert not any(ids[: len(tokens) - len(response)])
    assert min(kept) < 64, "the truncation has an effect"
    assert difference(actor, engine, **{**masked, "keep_sampling_mask": False}) < 1e-5


def test_a_sampling_mask_leaves_tokens_out_that_are_as_likely_as_the_last(actor: Actor, engine: VllmEngine) -> None:
    """Equal logits, which are common in 16 bits: vLLM alone would keep all 64 tokens."""
    weight = actor.engine.module.head_weight
    before = weight.detach().clone()
    weight.data.zero_()
    engine.update_weights(actor, 5)
    batch = engine.generate(PROMPTS, SamplingOptions(6, top_k=4, keep_sampling_mask=True))
    weight.data.copy_(before)
    engine.update_weights(actor, 6)
    assert batch.sampling_mask is not None
    mask = batch.sampling_mask[batch.mask]
    assert mask.counts.tolist() == [4] * len(mask)
    mask.check(batch.tokens[batch.mask], 64)
    torch.testing.assert_close(batch["log_probs"][batch.mask], torch.full((len(mask),), 0.25).log())


def test_draws(engine: VllmEngine) -> None:
    """A seed gives the same responses, whatever else is asked; a response ends with a stop token."""
    whole = engine.generate(PROMPTS, SamplingOptions(8, n=2, seed=5))
    assert torch.equal(engine.generate(PROMPTS, SamplingOptions(8, n=2, seed=5)).tokens, whole.tokens)
    assert torch.equal(engine.generate(PROMPTS[:1], SamplingOptions(8, n=2, seed=5)).tokens, whole.tokens[:20])
    responses = whole.responses()
    assert any(not torch.equal(one, other) for one, other in zip(responses[::2], responses[1::2], strict=True))
    stop = int(responses[0][3])
    (stopped, *_) = engine.generate(PROMPTS[:1], SamplingOptions(8, n=2, seed=5, stop_ids=[stop])).responses()
    assert stopped.tolist() == responses[0].tolist()[: responses[0].tolist().index(stop) + 1]
    with pytest.raises(ValueError, match=r"have 70 tokens, more than the longest sequence of vLLM, 64"):
        engine.generate(PROMPTS, SamplingOptions(60))


def test_a_refusal(actor: Actor, engine: VllmEngine) -> None:
    stream = actor.stream_weights
    try:
        actor.stream_weights = lambda **options: iter(list(stream(**options))[:-2])  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="update to version 8 failed: the stream ended without"):
            engine.update_weights(actor, 8)
    finally:
        del actor.stream_weights
    with pytest.raises(RuntimeError, match="does not generate: the update to version 8 failed"):
        engine.generate(PROMPTS, SamplingOptions(4))
    engine.update_weights(actor, 9)
    assert difference(actor, engine) < 1e-5


def test_weights_change_in_flight(actor: Actor, engine: VllmEngine) -> None:
    """Each token's log-prob is that of the version that it names; keys and values of older weights are recomputed."""
    engine.update_weights(actor, 10)
    before = {name: parameter.detach().clone() for name, parameter in actor.engine.module.named_parameters()}
    change(actor)
    future = engine.generate_async(PROMPTS, SamplingOptions(50, n=64, seed=1))
    drawing = future.drawing  # type: ignore[attr-defined]
    while drawing.version() is None:
        time.sleep(1e-3)
    engine.update_weights(actor, 11)
    batch = future.result()
    versions = [row[row >= 0].tolist() for row in batch.split("version")]
    # The first tokens are of version 10; a request that vLLM takes up later may begin with 11.
    assert all(row == sorted(row) and len(row) == 50 and set(row) <= {10, 11} for row in versions)
    assert any(set(row) == {10, 11} for row in versions)
    new = actor.log_probs(batch).log_probs
    for name, parameter in actor.engine.module.named_parameters():
        parameter.data.copy_(before[name])
    old = actor.log_probs(batch).log_probs
    engine.update_weights(actor, 12)
    expected = torch.where(batch["version"] == 10, old, new)
    torch.testing.assert_close(batch["log_probs"][batch.mask], expected[batch.mask], rtol=0, atol=5e-5)
    assert float((old - new).abs()[batch.mask].mean()) > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 9, "top_p": 0.8, "sampling.keep_sampling_mask": True},
        {"dims": "dp=2", "rollouts.devices": "cpu", "staleness": 1, "rollouts.in_flight": True},
    ],
    ids=str,
)
def test_train(llama: Path, tmp_path: Path, settings: dict[str, Any], folder_of_rewards: Path) -> None:
    """The loop with vLLM in the rank's process, and with vLLM apart from two ranks, one step ahead."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"tokens": [1, {token}]}}\n' for token in range(2, 10)))
    options = TrainOptions(
        model=llama, prompts=tmp_path / "prompts.jsonl", reward="rewards:sevens", out=tmp_path / "run", device="cpu",
        rollouts="vllm", steps=3, prompts_per_step=4, samples=2, max_new_tokens=4, learning_rate=0.01, save_every=0,
        **settings,
    )  # fmt: skip
    train(check_run(options))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    if "staleness" not in settings:
        assert max(line["rollout_difference"] for line in lines) < 1e-5


def on_ranks(group: ProcessGroup, llama: Path) -> tuple[float, list[int]]:
    """Four ranks; the first has the engine, in a process of its own."""
    actor = Actor.from_pretrained(llama, dims=ParallelDims(dp=2, tp=2), device="cpu")
    engine = VllmEngine(actor, llama, devices=[""], **SETTINGS)
    change(actor)
    engine.update_weights(actor, 1)
    batch: Batch = engine.generate(PROMPTS, SamplingOptions(6, n=2))
    mine = WholeBatches(actor).log_probs(batch).log_probs
    engine.close()
    return float((mine - batch["log_probs"]).abs()[batch.mask].max()), batch.tokens.tolist()


@pytest.mark.slow
def test_an_engine_beside_four_ranks(ranks: RankPool, llama: Path) -> None:
    found = ranks.run(on_ranks, llama, timeout=600)
    assert max(difference for difference, _ in found) < 1e-5
    assert all(tokens == found[0][1] for _, tokens in found)


def test_a_killed_engine_over_two_devices(actor: Actor, llama: Path) -> None:
    """Each worker takes the weights. A worker is killed: the engine starts again, and its requests are repeated."""
    dims = ParallelDims(tp=2)
    engine = VllmEngine(actor, llama, devices=["", ""], dims=dims, check=True, timeout=600.0, **SETTINGS)
    pool = engine._local
    assert isinstance(pool, EnginePool)
    pool._tell = (lost := list[str]()).append
    engine.update_weights(actor, 1)
    assert pool.ways == ["gloo", "gloo"]
    assert difference(actor, engine, n=2) < 1e-5
    before = engine.generate(PROMPTS, SamplingOptions(6, n=2, seed=2))
    os.kill(worker_of(pool.engines[0]._transport.pid), signal.SIGKILL)  # type: ignore[union-attr]
    again = engine.generate(PROMPTS, SamplingOptions(6, n=2, seed=2))
    assert torch.equal(again.tokens, before.tokens)
    assert len(lost) == 1
    assert "engine 0 (device cpu) ended its process" in lost[0]
    engine.close()


def worker_of(pid: int) -> int:
    """Return the id of the process that was started last below a process: a worker of vLLM."""
    (listed,) = Path(f"/proc/{pid}/task").glob(f"{pid}/children")
    children = [int(child) for child in listed.read_text().split()]
    return worker_of(children[-1]) if children else pid
