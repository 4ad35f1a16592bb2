"""A grid that a model does not fit is refused alike on every rank, and the error names one that fits: it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from meshes import mesh_of
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import PipelineOptions
from rl_models import Actor

ODD = {"hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "heads": ("llama", {}),
    "kv-heads": ("llama", {"num_key_value_heads": 3}),
    "mlp": ("llama", {"intermediate_size": 51}),
    "experts": ("mixture", {"num_experts": 6, "moe_intermediate_size": 15}),
}


@dataclass(frozen=True)
class Grid:
    dims: ParallelDims
    options: dict[str, Any] = field(default_factory=dict)


def grid(*, vpp: int = 1, split: list[int] | None = None, sp: bool | None = None, **sizes: int) -> Grid:
    options: dict[str, Any] = {} if sp is None else {"sequence_parallel": sp}
    if vpp > 1 or split is not None:
        options["pipeline"] = PipelineOptions(virtual_stages=vpp, split=split)
    return Grid(ParallelDims(**sizes), options)


@dataclass(frozen=True)
class Misfit:
    """A model and a grid that does not fit it, what each backend says of that, and a grid that the message names."""

    model: str
    asked: Grid
    parallel: str
    megatron: str
    fits: Grid


TOO_FEW_LAYERS = (
    "num_hidden_layers=3 is fewer than the 4 chunks of the pipeline (pp * virtual stages); every chunk needs a layer: "
    "use at most 3 chunks"
)
MISFITS = {
    "query heads": Misfit(
        "heads",
        grid(tp=4),
        "num_attention_heads=6 is not divisible by tp=4; use tp in {1, 2, 6}",
        "num_attention_heads=6 is not divisible by tp=4; use tp in [1, 2, 6]",
        grid(tp=2),
    ),
    "key-value heads": Misfit(
        "kv-heads",
        grid(tp=2),
        "num_key_value_heads=3 neither divides tp=2 nor is divisible by it; use tp in {1, 3, 6}",
        "num_key_value_heads=3 and tp=2: one must divide the other; use tp in [1, 3, 6]",
        grid(tp=3),
    ),
    "intermediate size": Misfit(
        "mlp",
        grid(tp=2),
        "intermediate_size=51 is not divisible by tp=2; use tp in {1}",
        "intermediate_size=51 is not divisible by tp=2; use tp in [1]",
        grid(),
    ),
    "experts' intermediate size": Misfit(
        "experts",
        grid(tp=2),
        "moe_intermediate_size=15 is not divisible by tp=2; use tp in {1}",
        "experts 15 wide do not divide over expert_tp=2; use expert_tp=1, or tp in [1]",
        grid(),
    ),
    "more stages than layers": Misfit(
        "heads",
        grid(pp=4),
        TOO_FEW_LAYERS,
        TOO_FEW_LAYERS,
        grid(pp=3),
    ),
    "more virtual stages than layers": Misfit(
        "heads",
        grid(pp=2, vpp=2),
        TOO_FEW_LAYERS,
        TOO_FEW_LAYERS,
        grid(pp=2),
    ),
    "a split of other layers": Misfit(
        "heads",
        grid(pp=2, split=[1, 1]),
        "layers=[1, 1] sums to 2; the model has num_hidden_layers=3",
        "layers=[1, 1] sums to 2; the model has num_hidden_layers=3",
        grid(pp=2, split=[1, 2]),
    ),
    "a split into other stages": Misfit(
        "heads",
        grid(pp=2, split=[1, 1, 1]),
        "layers=[1, 1, 1] has 3 entries for pp * vpp = 2 chunks",
        "layers=[1, 1, 1] has 3 entries for pp * vpp = 2 chunks",
        grid(pp=2, split=[2, 1]),
    ),
    "experts over data parallelism": Misfit(
        "experts",
        grid(dp=4, ep=4),
        "num_experts=6 is not divisible by ep=4; use ep in {1, 2, 3, 6}",
        "6 experts do not divide over ep=4; use ep in [1, 2, 3, 6]",
        grid(dp=4, ep=2),
    ),
    "experts over tensor parallelism": Misfit(
        "experts",
        grid(dp=2, tp=2, ep=4),
        "num_experts=6 is not divisible by ep=4; use ep in {1, 2, 3, 6}",
        "6 experts do not divide over ep=4; use ep in [1, 2, 3, 6]",
        grid(tp=2, ep=2),
    ),
    "no experts": Misfit(
        "heads",
        grid(dp=2, ep=2),
        "ep=2 is for a mixture of experts, which llama is not; leave it out",
        "ep=2 is for a mixture of experts, which llama is not; leave it out",
        grid(dp=2),
    ),
    "no tensor parallelism": Misfit(
        "heads",
        grid(sp=True),
        "sequence_parallel=True needs tp > 1; leave it out or set dims=ParallelDims(tp=...)",
        "sequence_parallel=True needs tp > 1; leave it out",
        grid(),
    ),
}


@pytest.fixture(scope="module")
def models(tiny: Callable[..., Path]) -> dict[str, Path]:
    return {name: tiny(kind, **ODD, **changes) for name, (kind, changes) in MODELS.items()}


def load(group: ProcessGroup, path: Path, backend: str, grid: Grid) -> str | None:
    """Return what is said where the model does not fit."""
    dims = grid.dims
    mesh = mesh_of(dims)
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        try:
            actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu", **grid.options)
            actor.generate([[1, 2, 3]], max_new_tokens=1)
        except ValueError as error:
            return str(error)
    return None


SLOW = {
    "key-value heads",
    "more stages than layers",
    "a split into other stages",
    "experts over data parallelism",
    "experts over tensor parallelism",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MISFITS]
)
@pytest.mark.parametrize("backend", ["parallel", "megatron"])
def test_what_is_named_fits(ranks: RankPool, models: dict[str, Path], backend: str, name: str) -> None:
    misfit = MISFITS[name]
    path = models[misfit.model]
    said = ranks.run(load, path, backend, misfit.asked, world=misfit.asked.dims.world_size, timeout=60)
    assert said == [misfit.parallel if backend == "parallel" else misfit.megatron] * len(said)
    assert ranks.run(load, path, backend, misfit.fits, world=misfit.fits.dims.world_size, timeout=60)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["parallel", "megatron"])
@pytest.mark.parametrize("name", ["query heads", "key-value heads"])
def test_every_tp_that_is_named_fits_and_no_other(
    ranks: RankPool, models: dict[str, Path], backend: str, name: str
) -> None:
    misfit = MISFITS[name]
    message = misfit.parallel if backend == "parallel" else misfit.megatron
    named = [int(number) for number in re.findall(r"\d+", message.split("use tp in")[1])]
    for tp in range(1, 5):
        said = ranks.run(load, models[misfit.model], backend, grid(tp=tp), world=tp, timeout=60)
        assert (said == [None] * tp) == (tp in named), (tp, said)


@pytest.mark.slow
def test_megatron_trains_a_mixture_over_tp_with_sequence_parallelism_alone(
    ranks: RankPool, models: dict[str, Path]
) -> None:
    said = ranks.run(load, models["experts"], "megatron", grid(tp=2, ep=2, sp=False), world=2)
    message = (
        "sequence_parallel=False with tp=2: Megatron-Core trains a mixture of experts over tp with sequence "
        "parallelism alone; leave it out, or use backend='parallel'"
    )
    assert said == [message] * 2
    assert ranks.run(load, models["experts"], "megatron", grid(tp=2, ep=2), world=2) == [None, None]
    assert ranks.run(load, models["experts"], "parallel", grid(tp=2, ep=2, sp=False), world=2) == [None, None]


def test_transformers_names_the_axes_that_it_has(ranks: RankPool, models: dict[str, Path]) -> None:
    messages = ranks.run(load, models["heads"], "transformers", grid(pp=2), world=2)
    assert messages == ["backend='transformers' does not offer pp=2; it offers dp, cp, tp, ep, replicate"] * 2
    assert ranks.run(load, models["heads"], "transformers", grid(cp=2), world=2) == [None] * 2
