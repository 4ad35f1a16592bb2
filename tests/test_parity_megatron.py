"""`backend="megatron"` against one rank of another backend: outputs, gradients, one step, what is decoded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import DeviceMesh, ProcessGroup

from megatron_utils.testing import MIXTURES, cpu_stand_in, tiny_models
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, MegatronOptions, OptimizerOptions, PipelineOptions
from rl_models.losses import LossTerms

MODELS = tiny_models(
    *("llama", "qwen3-tied", "qwen3-moe", "deepseek-v3", "glm4-moe-lite", "gemma2", "gpt_oss", "phi3"),
    initializer_range=0.2,
)
REFERENCES = {
    "llama": "parallel",
    "qwen3-tied": "transformers",
    "qwen3-moe": "transformers",
    "deepseek-v3": "parallel",
    "glm4-moe-lite": "parallel",
    **dict.fromkeys(("gemma2", "gpt_oss", "phi3"), "transformers"),
}
PLACES: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "one": (ParallelDims(), {}),
    "tp2": (ParallelDims(tp=2), {}),
    "tp2 without sp": (ParallelDims(tp=2), {"sequence_parallel": False}),
    "tp4": (ParallelDims(tp=4), {}),
    "dp2": (ParallelDims(dp=2), {}),
    "dp2 undivided": (ParallelDims(dp=2), {"megatron": MegatronOptions(distributed_optimizer=False)}),
    "cp2": (ParallelDims(cp=2), {}),
    "pp2": (ParallelDims(pp=2), {}),
    "pp2 vpp2": (ParallelDims(pp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    "ep2": (ParallelDims(dp=2, ep=2), {}),
    "tp2 ep2": (ParallelDims(tp=2, ep=2), {}),
    "tp2 pp2": (ParallelDims(tp=2, pp=2), {}),
    "tp2 dp2": (ParallelDims(tp=2, dp=2), {}),
    "tp2 cp2": (ParallelDims(tp=2, cp=2), {}),
    "dp2 cp2": (ParallelDims(dp=2, cp=2), {}),
    "pp2 dp2": (ParallelDims(pp=2, dp=2), {}),
    "pp2 cp2": (ParallelDims(pp=2, cp=2), {}),
    "tp2 pp2 ep2": (ParallelDims(tp=2, pp=2, ep=2), {}),
    "pp2 dp2 ep2": (ParallelDims(pp=2, dp=2, ep=2), {}),
}
ON_EIGHT_RANKS: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "tp2 pp2 dp2": (ParallelDims(tp=2, pp=2, dp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    "tp2 cp2 dp2": (ParallelDims(tp=2, cp=2, dp=2), {}),
    "tp2 pp2 dp2 ep2": (ParallelDims(tp=2, pp=2, dp=2, ep=2), {}),
    "tp2 cp2 dp2 ep2": (ParallelDims(tp=2, cp=2, dp=2, ep=2), {}),
}
PLAIN = {("qwen3-moe", "ep2")}


def cases(places: Iterable[str]) -> list[tuple[str, str]]:
    """Every model on every one of these places that it can have."""
    return [
        (name, place)
        for name, config in MODELS.items()
        for place in places
        if config["model_type"] in MIXTURES or "ep" not in place
        # Megatron-Core trains mixtures over tp with sequence parallelism alone.
        if config["model_type"] not in MIXTURES or place != "tp2 without sp"
    ]


def on_cpu(places: Mapping[str, tuple[ParallelDims, dict[str, Any]]]) -> list[tuple[str, str]]:
    """Without what shows nothing more: a grid does not know what is in a layer but its experts, so of the dense models
    and of the mixtures one is on every grid, the other on those of one axis, and on those that divide experts. On
    three axes the mixtures are where experts are divided."""
    return [
        (name, place)
        for name, place in cases(places)
        for axes in [{axis for axis, size in vars(places[place][0]).items() if size > 1}]
        if "ep" in axes or len(axes) < 2 or name == "qwen3-tied" or (name == "qwen3-moe" and len(axes) < 3)
    ]


ALL_CASES = cases(PLACES)
CASES = [pytest.param(*case, marks=() if case in PLAIN else pytest.mark.slow) for case in on_cpu(PLACES)]
GPU_CASES = [pytest.param(*case, marks=pytest.mark.gpu(PLACES[case[1]][0].world_size)) for case in ALL_CASES]


class Tolerance(NamedTuple):
    """For log-probs, entropies and values; and for gradients, of the greatest of each tensor."""

    outputs: float
    gradients: float


# fp32 on both sides; NCCL and CUDA kernels add in other orders than the CPU.
TOLERANCES = {"cpu": Tolerance(1e-5, 1e-5), "cuda": Tolerance(1e-4, 1e-3)}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("megatron")
    for name, values in MODELS.items():
        torch.manual_seed(len(name))
        config = transformers.AutoConfig.for_model(**values, num_labels=1)
        for kind, auto in (
            ("actor", transformers.AutoModelForCausalLM),
            ("critic", transformers.AutoModelForTokenClassification),
        ):
            if kind == "critic" and type(config) not in auto._model_mapping:
                # transformers has no such class of the family.
                model = transformers.AutoModelForCausalLM.from_config(config)
                model.score, model.lm_head = torch.nn.Linear(config.hidden_size, 1), torch.nn.Identity()
            else:
                model = auto.from_config(config)
            model.save_pretrained(folder / name / kind)
    return folder


class Expected(NamedTuple):
    """What one rank of another backend gives, and the folder with the step that it saved."""

    numbers: dict[str, Any]
    folder: Path


@pytest.fixture(scope="session")
def reference(
    ranks: RankPool, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Expected]:
    """`reference("llama")`: of each model once."""

    @cache
    def train_once(name: str) -> Expected:
        folder = tmp_path_factory.mktemp("expected")
        arguments = checkpoints / name, REFERENCES[name], ParallelDims(), {}, folder
        (numbers,) = ranks.run(train, *arguments, world=1)
        return Expected(numbers, folder)

    return train_once


@contextlib.contextmanager
def device_for(backend: str, device: str) -> Iterator[None]:
    with cpu_stand_in() if (backend, device) == ("megatron", "cpu") else contextlib.nullcontext():
        yield


@cache
def mesh_of(dims: ParallelDims, device_type: str) -> DeviceMesh | None:
    """The mesh of a grid on the first ranks, formed once by each rank."""
    return dims.build_mesh(device_type, list(range(dims.world_size))) if dims.world_size > 1 else None


def options(backend: str, dims: ParallelDims, device: str, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "backend": backend,
        "dims": dims,
        "mesh": mesh_of(dims, device.partition(":")[0]),
        "device": device,
        "max_tokens_per_micro_batch": 24,
        **more,
        # So large an epsilon makes AdamW's first step proportional to the gradient. The gradient is read from the step,
        # which is so long that the parameter it begins at, and is rounded with, is nothing beside it.
        "optimizer": OptimizerOptions(learning_rate=1e10, eps=1e5, max_grad_norm=math.inf),
    }


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 23, 8, 2, 13)
    rows = [torch.randint(37, (n,), generator=generator) for n in lengths]
    return Batch.from_sequences(rows, advantages=[torch.randn(n, generator=generator) for n in lengths])


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs["advantages"] * inputs.log_probs - 0.1 * inputs.entropy, {"entropy": inputs.entropy})


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["advantages"]).square(), {})


def train(
    group: ProcessGroup,
    folder: Path,
    backend: str,
    dims: ParallelDims,
    more: dict[str, Any],
    out: Path,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return what actor and critic give before a step, what the actor generates, and the step, which they save."""
    tolerance = TOLERANCES[device].outputs
    # Megatron-Core computes on the current device, which is each rank's own.
    device = device if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    with device_for(backend, device):
        settings = options(backend, dims, device, more)
        actor = Actor.from_pretrained(folder / "actor", **settings)
        critic = Critic.from_pretrained(folder / "critic", **settings)
        batch = make_batch()
        indices = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
        part = batch.select(indices)
        outputs = torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)])
        generated = actor.generate(
            [[1, 2, 3], [4], [5, 6]][: 3 - actor.grid.rank("dp")], max_new_tokens=4, temperature=0.0
        )
        scored = actor.log_probs(generated).log_probs
        torch.testing.assert_close(
            generated["log_probs"][generated.mask], scored[generated.mask], rtol=0, atol=tolerance
        )
        metrics = [actor.update(part, policy_loss, temperature=1.3), critic.update(part, value_loss)]
        actor.save_pretrained(out / "actor")
        critic.save_pretrained(out / "critic")
    return {
        "where": batch.positions(indices),
        "outputs": outputs,
        "metrics": metrics,
        "generated": generated.responses(),
    }


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_megatron_backend_computes_what_the_others_do(
    ranks: RankPool,
    reference: Callable[[str], Expected],
    checkpoints: Path,
    tmp_path: Path,
    name: str,
    place: str,
) -> None:
    dims, more = PLACES[place]
    arguments = checkpoints / name, "megatron", dims, more, tmp_path
    results = ranks.run(train, *arguments, world=dims.world_size, timeout=120)
    assert_equal(results, reference(name), checkpoints / name, tmp_path, TOLERANCES["cpu"])


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), on_cpu(ON_EIGHT_RANKS))
def test_the_megatron_backend_on_eight_ranks(
    eight_ranks: RankPool,
    reference: Callable[[str], Expected],
    checkpoints: Path,
    tmp_path: Path,
    name: str,
    place: str,
) -> None:
    dims, more = ON_EIGHT_RANKS[place]
    results = eight_ranks.run(train, checkpoints / name, "megatron", dims, more, tmp_path, timeout=240)
    assert_equal(results, reference(name), checkpoints / name, tmp_path, TOLERANCES["cpu"])


@pytest.mark.parametrize(("name", "place"), GPU_CASES)
def test_the_megatron_backend_on_gpus(
    four_nccl_ranks: RankPool,
    reference: Callable[[str], Expected],
    checkpoints: Path,
    tmp_path: Path,
    name: str,
    place: str,
) -> None:
    dims, more = PLACES[place]
    arguments = checkpoints / name, "megatron", dims, more, tmp_path, "cuda"
    results = four_nccl_ranks.run(train, *arguments, world=dims.world_size)
    assert_equal(results, reference(name), checkpoints / name, tmp_path, TOLERANCES["cuda"])


def assert_equal(
    results: list[dict[str, Any]], expected: Expected, start: Path, out: Path, tolerance: Tolerance
) -> None:
    numbers = expected.numbers
    for result in results:
        outputs = numbers["outputs"][:, result["where"]]
        torch.testing.assert_close(result["outputs"], outputs, rtol=tolerance.outputs, atol=tolerance.outputs)
        for response, other in zip(result["generated"], numbers["generated"], strict=False):
            assert torch.equal(response, other)
        for own, other in zip(result["metrics"], numbers["metrics"], strict=True):
            assert own == pytest.approx(other, rel=tolerance.gradients, abs=tolerance.outputs)
    for kind in ("actor", "critic"):
        before, after, actual = (
            load_file(folder / kind / "model.safetensors") for folder in (start, expected.folder, out)
        )
        assert before.keys() == after.keys() == actual.keys()
        for key, value in after.items():
            step = (value - before[key]).abs().max().item()
            # Only what chooses experts has none.
            assert step > 100 * before[key].abs().max().item() or key.endswith("e_score_correction_bias"), key
            torch.testing.assert_close(
                actual[key],
                value,
                rtol=0,
                atol=tolerance.gradients * step,
                msg=lambda text, at=(kind, key): f"{at}: {text}",
            )
