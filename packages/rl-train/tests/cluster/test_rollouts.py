"""Engines on a Ray cluster: weight sync, balance, and what happens when an engine or a rank ends, hangs or refuses."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_models import SamplingOptions
from rl_models import Actor, OptimizerOptions
from rl_train import Placement, RankDied, RayModelGroup, Resources
from rl_train.engines import EngineOnRay
from rl_train.engines.native_ranks import native_engine
from rl_train.engines.vllm_engine import adapters_of
from rl_train.loop.checked_run import check_run
from rl_train.loop.run import train
from rl_train.options.options import TrainOptions

pytest.importorskip("ray", reason="needs the extra rl-train[ray]")

from .engines import PROMPTS, SAMPLING, Case, stub

pytestmark = pytest.mark.slow

ON_CPUS = Resources(device="cpu", cpus=0.5, strategy="SPREAD")


def change(group: RayModelGroup) -> None:
    def times(worker: Any) -> None:
        for parameter in worker.engine.module.parameters():
            parameter.data.mul_(1.5)

    group.apply(times)


@pytest.fixture(scope="module")
def one_rank(ray_cluster: Any, checkpoint: Path) -> Iterator[RayModelGroup]:
    with RayModelGroup(Actor, ParallelDims(), checkpoint, resources=ON_CPUS) as group:
        yield group


@pytest.fixture(scope="module")
def case(one_rank: RayModelGroup, checkpoint: Path, tmp_path_factory: Any) -> Iterator[Case]:
    """A case that each test leaves whole."""
    with Placement(2, ON_CPUS) as placement:
        made = Case(one_rank, checkpoint, placement, tmp_path_factory.mktemp("case") / "mark", silence=2.0)
        yield made
        made.engine.close()
        assert placement.free == [1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "number"), [("begin", signal.SIGSTOP), ("load", signal.SIGKILL), ("load", signal.SIGSTOP)]
)
def test_a_lost_engine_is_named_and_takes_part_again(case: Case, method: str, number: int) -> None:
    case.engine.update_weights(case.group, 1)
    before, asked = len(case.told), {"begin": "generate", "load": "load"}[method]
    case.mark.write_text(f"{method} {int(number)}")
    if method == "load":
        change(case.group)
        case.engine.update_weights(case.group, 1)
    began = time.monotonic()
    assert case.is_right()
    assert time.monotonic() - began < 15
    assert len(case.told) == before + 1
    lost = "ended its process" if number == signal.SIGKILL else "gave no sign of life for 2 s"
    assert lost in case.told[-1]
    assert f" during {asked}; it starts again" in case.told[-1]
    assert sorted(case.current) == [False, True]
    case.engine.update_weights(case.group, 2)
    assert case.current == [True, True]
    assert case.is_right(2)


def slow_first(folder: Path) -> Callable[[], Any]:
    """Make engines of which the first one to ask is slow; nested, since the nodes cannot import this file."""

    class Timed:
        def __init__(self) -> None:
            self.slow, self.answered = True, 0
            try:
                (folder / "slow").touch(exist_ok=False)
            except FileExistsError:
                self.slow = False

        def begin(self, requests: Any, sampling: SamplingOptions) -> Callable[[], Any]:
            time.sleep((0.2 if self.slow else 0.01) * len(requests))
            self.answered += len(requests)
            (folder / f"answered {self.slow}").write_text(str(self.answered))
            answers = [[([request.prompt[1]], [0.0])] for request in requests]
            from rl_train.engines.interface import Response

            return lambda: [[Response(*one) for one in answer] for answer in answers]

    return Timed


def test_requests_go_to_the_engine_that_is_free(one_rank: RayModelGroup, checkpoint: Path, tmp_path: Path) -> None:
    """Parts of equal tokens; a slow engine answers fewer of them, and the order stays."""
    with Placement(2, ON_CPUS) as placement:
        make = slow_first(tmp_path)
        engine = EngineOnRay(one_rank, checkpoint, make, placement.share(0.5), max_responses=4)
        prompts = [[1, number] for number in range(2, 50)]
        found = engine.generate(prompts, SamplingOptions(4, seed=1))
        assert [response.tolist() for response in found.responses()] == [[number] for number in range(2, 50)]
        slow, fast = (int((tmp_path / f"answered {which}").read_text()) for which in (True, False))
        assert slow + fast == 48
        assert 4 <= slow < 0.4 * fast
        engine.close()


@pytest.fixture(scope="module")
def four_ranks(ray_cluster: Any, checkpoint: Path) -> Iterator[RayModelGroup]:
    dims = ParallelDims(dp=2, tp=2)
    with RayModelGroup(Actor, dims, checkpoint, resources=ON_CPUS, optimizer=OptimizerOptions(0.1)) as group:
        yield group


def test_what_arrives_is_what_would_be_saved(four_ranks: RayModelGroup, tmp_path: Path) -> None:
    """From a grid over two nodes, to an engine on each; and a rank that dies while it sends."""
    four_ranks.save_training(tmp_path / "training")
    change(four_ranks)
    four_ranks.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")

    def compare(self: Any, named_tensors: Any) -> None:
        found = {name: tensor.clone() for name, tensor in named_tensors}
        if mark.exists():
            mark.unlink()
            raise ValueError(f"{sorted(name for name in saved if not torch.equal(found[name], saved[name]))}")
        if (mark.parent / "kill").exists():
            os.kill(int((mark.parent / "kill").read_text()), signal.SIGKILL)

    mark = tmp_path / "mark"
    with Placement(2, ON_CPUS) as placement:
        make = type("Comparing", (stub.Stub,), {"load": compare, "__module__": stub.__name__})
        engine = EngineOnRay(four_ranks, tmp_path / "saved", make, placement.share(1.0), bucket_bytes=4096)
        mark.touch()
        with pytest.raises(RuntimeError, match=r"update to version 1 failed: \[\]"):
            engine.update_weights(four_ranks, 1)
        (tmp_path / "kill").write_text(str(four_ranks.seats[0].pid))
        with pytest.raises(RuntimeError, match=r"update to version 2 failed: rank 0 .* died") as broken:
            engine.update_weights(four_ranks, 2)
        assert isinstance(broken.value.__cause__, RankDied)
        with pytest.raises(RuntimeError, match="does not generate"):
            engine.generate(PROMPTS, SAMPLING)
        (tmp_path / "kill").unlink()
        four_ranks.restart()
        engine.update_weights(four_ranks, 3)
        assert len(engine.generate(PROMPTS, SAMPLING)) == 24
        engine.close()


def test_an_engine_over_two_devices_gets_its_shards_from_every_rank(
    four_ranks: RayModelGroup, checkpoint: Path
) -> None:
    """From two nodes to a rank of tp each; what it draws is what the actor draws."""

    def bytes_sent(worker: Any) -> int:
        from rl_train.engines.engine_on_ray import _SENDERS  # the senders of the rank's process

        return sum(copy.nbytes for part in _SENDERS[worker][0].plan.rounds for copy in part)

    change(four_ranks)
    greedy = SamplingOptions(3, temperature=0.0)
    make = partial(native_engine, str(checkpoint), dims=ParallelDims(tp=2), seconds=60.0)
    with Placement(2, ON_CPUS, per_bundle=2) as placement:
        assert placement.free == [1.0]
        engine = EngineOnRay(four_ranks, checkpoint, make, placement.share(1.0))
        engine.update_weights(four_ranks, 1)
        found, expected = engine.generate(PROMPTS, greedy), four_ranks.generate(PROMPTS, **vars(greedy))
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found["log_probs"], expected["log_probs"], rtol=0, atol=1e-5)
        sent = four_ranks.apply(bytes_sent)
        assert len(sent) == 4
        assert max(sent) <= 1.2 * min(sent)
        engine.close()


def test_adapters_arrive_alone(ray_cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    lora = LoraOptions(rank=4, seed=1)
    weight_format, _ = adapters_of(lora, checkpoint)

    def compare(self: Any, named_tensors: Any) -> None:
        found = {name: tensor.clone() for name, tensor in named_tensors}
        if found.keys() != saved.keys() or not all(torch.equal(found[name], saved[name]) for name in saved):
            raise ValueError(f"other tensors came: {list(found)[:3]}")

    options = {"resources": ON_CPUS, "lora": lora}
    with (
        RayModelGroup(Actor, ParallelDims(tp=2), checkpoint, **options) as group,
        Placement(1, ON_CPUS) as placement,
    ):
        change(group)
        group.save_adapter(tmp_path / "adapter")
        saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        make = type("Comparing", (stub.Stub,), {"load": compare, "__module__": stub.__name__})
        engine = EngineOnRay(group, checkpoint, make, placement.share(1.0), weight_format=weight_format)
        engine.update_weights(group, 1)
        assert engine.version == 1
        engine.close()


ALONE = {"rollouts.adapter": True, "lora_rank": 4}


APART = {"rollouts.devices": "2", "staleness": 1}


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("native", APART),
        pytest.param("native", APART | {"in_flight": True}, marks=pytest.mark.slow),
        pytest.param("native", APART | {"rollouts.dims": "tp=2"}, marks=pytest.mark.slow),
        *(
            pytest.param("vllm", case, marks=pytest.mark.vllm)
            for case in ({}, APART, ALONE, APART | {"rollouts.dims": "tp=2"})
        ),
    ],
    ids=str,
)
def test_train_with_engines(
    ray_cluster: Any, tmp_path: Path, engine: str, settings: dict[str, Any], folder_of_rewards: Path
) -> None:
    """The loop with engines on the devices of the policy, and on two of their own, one step ahead."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"tokens": [1, {token}]}}\n' for token in range(2, 10)))
    options = TrainOptions(
        model=tmp_path / "model", prompts=tmp_path / "prompts.jsonl", reward="rewards:sevens", out=tmp_path / "run",
        device="cpu", ray=True, dims="tp=2", rollouts=engine, steps=3, prompts_per_step=4, samples=2, max_new_tokens=4,
        learning_rate=0.01, save_every=0, **settings,
    )  # fmt: skip
    train(check_run(options))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    if "in_flight" in settings:
        assert all(line["staleness"] <= 1 for line in lines)
    else:
        assert [line["staleness"] for line in lines] == [min(step, settings.get("staleness", 0)) for step in range(3)]
    if "staleness" not in settings:
        assert max(line["rollout_difference"] for line in lines) < (5e-5 if settings else 1e-5)
