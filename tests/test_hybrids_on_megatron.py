"""`backend="megatron"` on Nemotron-H, as Megatron-Core's `HybridModel`, beside one rank of `backend="parallel"`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, PipelineOptions
from rl_models.losses import LossTerms

RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))
needs_hybrid = pytest.mark.skipif(RELEASE < (0, 18), reason="needs Megatron-Core 0.18")
# Mamba-2's kernels in plain torch.
KERNELS = Path(__file__).parent.parent / "packages/megatron-utils/tests/kernels"
CONFIG: dict[str, Any] = {
    **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5},
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "time_step_min": 1e-9},
    "initializer_range": 0.3,
}
EXPERTS = {
    **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20},
    "routed_scaling_factor": 1.5,
}
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}
PLACES: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "one": (ParallelDims(), {}),
    "tp2": (ParallelDims(tp=2), {}),
    "tp2 without sp": (ParallelDims(tp=2), {"sequence_parallel": False}),
    "dp2": (ParallelDims(dp=2), {}),
    "pp2": (ParallelDims(pp=2), {}),
    "pp2 vpp2": (ParallelDims(pp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    "ep2": (ParallelDims(dp=2, ep=2), {}),
}
CASES = [("dense", place) for place in PLACES if place != "ep2"] + [
    ("experts", place) for place in ("one", "tp2", "ep2")
]


def save(folder: Path, **changes: Any) -> Path:
    """Save an actor and a critic, whose every parameter differs from others."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("nemotron_h", **CONFIG | changes)
    for kind in ("actor", "critic"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        if kind == "critic":
            model.score, model.lm_head = torch.nn.Linear(config.hidden_size, 1), torch.nn.Identity()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that find kernels of Mamba-2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(KERNELS)])
        with RankPool(2) as ranks:
            yield ranks


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs["advantages"] * inputs.log_probs - 0.1 * inputs.entropy, {})


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["advantages"]).square(), {})


def learn_on(
    group: ProcessGroup, folder: Path, backend: str, dims: ParallelDims, options: dict[str, Any], out: Path
) -> tuple[Tensor, Tensor]:
    """Return this rank's places in the batch, and log-probs, entropies and values, and save a step of both models."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 23, 8, 2, 13)
    batch = Batch.from_sequences(
        [torch.randint(37, (n,), generator=generator) for n in lengths],
        advantages=[torch.randn(n, generator=generator) for n in lengths],
    )
    with cpu_stand_in() if backend == "megatron" else contextlib.nullcontext():
        settings = {
            "backend": backend,
            "dims": dims,
            "mesh": dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None,
            "device": "cpu",
            "max_tokens_per_micro_batch": 24,
            # With so large an epsilon AdamW's first step is proportional to the gradient.
            "optimizer": OptimizerOptions(learning_rate=1e10, eps=1e5, max_grad_norm=math.inf),
            **options,
        }
        actor, critic = (
            kind.from_pretrained(folder / name, **settings) for kind, name in ((Actor, "actor"), (Critic, "critic"))
        )
        rows = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
        part = batch.select(rows)
        outputs = torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)])
        actor.update(part, policy_loss, temperature=1.3)
        critic.update(part, value_loss)
        actor.save_pretrained(out / "actor")
        critic.save_pretrained(out / "critic")
        if backend == "megatron":
            with pytest.raises(ValueError, match="hybrid models on Megatron-Core keep no states between tokens"):
                actor.generate([[1, 2]], max_new_tokens=2)
    return batch.positions(rows), outputs


@pytest.fixture(scope="module")
def expected(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, Path]]:
    """`expected("dense")`: the checkpoints of a model, the outputs, and the folder of the step; made once."""

    @cache
    def learn(name: str) -> tuple[Path, Tensor, Path]:
        folder, out = (tmp_path_factory.mktemp(f"{name}-{kind}") for kind in ("before", "after"))
        arguments = save(folder, **MODELS[name]), "parallel", ParallelDims(), {}, out
        ((_, outputs),) = pool.run(learn_on, *arguments, world=1)
        return folder, outputs, out

    return learn


@needs_hybrid
@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_megatron_backend_learns_what_the_native_layers_learn(
    pool: RankPool, expected: Callable[[str], tuple[Path, Tensor, Path]], tmp_path: Path, name: str, place: str
) -> None:
    folder, outputs, step_folder = expected(name)
    dims, options = PLACES[place]
    results = pool.run(learn_on, folder, "megatron", dims, options, tmp_path, world=dims.world_size, timeout=120)
    for positions, local in results:
        torch.testing.assert_close(local, outputs[:, positions], rtol=1e-5, atol=1e-5)
    for kind in ("actor", "critic"):
        before, after, actual = (load_file(at / kind / "model.safetensors") for at in (folder, step_folder, tmp_path))
        assert before.keys() == after.keys() == actual.keys()
        steps = {name: after[name] - before[name] for name in after}
        largest = max(step.abs().max().item() for step in steps.values())
        for key, step in steps.items():
            assert step.abs().max() > 0 or key.endswith("e_score_correction_bias"), key
            torch.testing.assert_close(
                actual[key] - before[key], step, rtol=0, atol=1e-5 * largest, msg=lambda text, at=key: f"{at}: {text}"
            )


def refuse_on(group: ProcessGroup, folder: Path, dims: ParallelDims, options: dict[str, Any], message: str) -> None:
    mesh = dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None
    with cpu_stand_in(), pytest.raises((ValueError, ImportError), match=message):
        Actor.from_pretrained(folder / "actor", backend="megatron", dims=dims, mesh=mesh, device="cpu", **options)


@needs_hybrid
@pytest.mark.parametrize(
    ("dims", "options", "message"),
    [
        ({"cp": 2}, {}, r"cp=2 is not supported by hybrid models on Megatron-Core; use cp=1"),
        ({}, {"recompute": "full"}, r"backend='megatron' does not offer recompute on nemotron_h, a model of"),
    ],
    ids=["cp", "recompute"],
)
def test_what_a_hybrid_model_cannot_do_is_refused(
    pool: RankPool, tmp_path: Path, dims: Any, options: Any, message: str
) -> None:
    grid = ParallelDims(**dims)
    pool.run(refuse_on, save(tmp_path), grid, options, message, world=grid.world_size)


@pytest.mark.skipif(RELEASE >= (0, 18), reason="Megatron-Core 0.18 and newer have hybrid models")
def test_an_older_core_says_which_version_is_needed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse_on, save(tmp_path), ParallelDims(), {}, "hybrid models need 0.18 or newer: pip install", world=1)


def test_another_hybrid_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    import transformers

    sizes = {name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "num_experts": 0}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
    config = transformers.Qwen3NextConfig(**sizes, linear_value_head_dim=4, full_attention_interval=2)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path / "actor")
    message = (
        "qwen3_next has layers that are no layers of Megatron-Core's HybridModel: each has a mixer and an MLP, .*par"
    )
    pool.run(refuse_on, tmp_path, ParallelDims(), {}, message, world=1)
