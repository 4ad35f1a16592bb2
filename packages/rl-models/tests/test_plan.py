"""The memory plan against the live bytes of the real engine, which a dispatch mode counts."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, OptimizerOptions, losses
from rl_models.cli import app
from rl_models.plan import Memory, MemoryOptions, Planned, fitting, plan_memory

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def hold(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            self.alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.hold(*(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)))
        # FSDP2 gives memory up by resizing storages, so each is asked again.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.alive.values())))
        return out


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return path


def measure(
    group: ProcessGroup, path: Path, dims: ParallelDims, dtype: torch.dtype, kind: Any, tokens: int, recompute: bool
) -> int:
    """The peak of an update of two micro-batches, the second with all gradients there already."""
    mesh = dims.build_mesh("cpu", list(range(group.size()))) if group.size() > 1 else None
    options: dict[str, Any] = {"optimizer": OptimizerOptions(), "max_tokens_per_micro_batch": tokens, "dtype": dtype}
    options["recompute"] = "full" if recompute else None
    worker = kind.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", **options)
    batch = Batch.from_sequences([torch.randint(1000, (128,)) for _ in range(2 * tokens // 128)])

    def loss(*arguments: Any) -> losses.LossTerms:
        return losses.LossTerms(-arguments[0])

    worker.update(batch, loss)
    with LiveBytes() as live:
        live.hold(*worker.engine.module.parameters(), *worker.optimizer.tensors())
        worker.update(batch, loss)
    return live.peak


@pytest.mark.parametrize(
    ("dims", "dtype", "kind", "tokens", "recompute"),
    [
        (ParallelDims(), torch.float32, Actor, 1024, False),
        (ParallelDims(), torch.float32, Actor, 2048, True),
        (ParallelDims(), torch.bfloat16, Critic, 2048, False),
        (ParallelDims(tp=2), torch.float32, Actor, 1024, False),
        (ParallelDims(dp=2), torch.float32, Actor, 512, False),
    ],
)
def test_the_plan_is_within_a_tenth_of_the_measured_peak(
    ranks: RankPool, model: Path, dims: ParallelDims, dtype: torch.dtype, kind: Any, tokens: int, recompute: bool
) -> None:
    given = (model, dims, dtype, kind, tokens, recompute)
    measured = max(ranks.run(measure, *given, world=dims.world_size, timeout=120))
    options = MemoryOptions(dims, tokens, dtype, recompute=recompute, device="cpu")
    role = kind.role
    (planned,) = plan_memory(model, options, role=role, trained=True)
    assert planned.total == pytest.approx(measured, rel=0.1), planned


@pytest.mark.gpu(1)
def test_the_plan_is_no_less_than_the_peak_of_a_gpu(model: Path) -> None:
    worker = Actor.from_pretrained(model, device="cuda", dtype=torch.bfloat16, max_tokens_per_micro_batch=2048)
    batch = Batch.from_sequences([torch.randint(1000, (128,)) for _ in range(32)])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        worker.update(batch, lambda log_probs, entropy, part: losses.LossTerms(-log_probs))
    options = MemoryOptions(ParallelDims(), 2048, torch.bfloat16)
    (planned,) = plan_memory(model, options, role="causal_lm", trained=True)
    assert torch.cuda.max_memory_allocated() <= 1.1 * planned.total


def test_models_on_the_same_devices_rest_while_one_works() -> None:
    options = MemoryOptions(ParallelDims(), 1)
    actor = Memory(weights=10, optimizer=60, gradients=20, activations=5)
    models = {"actor": [actor], "critic": [Memory(9, 50, 18, 0, 4)], "reference": [Memory(10, activations=1)]}
    assert Planned(options, models).peak == 70 + 59 + 10 + 25
    assert Planned(options, models, offload=True).peak == actor.total == 95


def test_weights_are_those_of_the_layout(model: Path) -> None:
    whole = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(model).parameters())
    options = MemoryOptions(ParallelDims(dp=2, tp=2, pp=2), 64, torch.bfloat16)
    first, second = plan_memory(model, options, role="causal_lm", trained=True)
    norms = 2 * 2 * 128 + 64
    assert first.weights + second.weights == 2 * (whole - 9 * 128) // 4 + 2 * (8 * 128 + 128) // 2, norms
    assert (first.optimizer, first.gathered > 0) == (6 * first.weights, True)
    assert first.activations > second.activations, "the first stage of a pipeline has more micro-batches in flight"
    (reference,) = plan_memory(model, MemoryOptions(ParallelDims(), 64), role="causal_lm", trained=False)
    assert (reference.optimizer, reference.gradients) == (0, 0)


def test_the_command_says_what_fits(model: Path) -> None:
    command = ["plan", "--model", str(model), "--dims", "tp=2", "--tokens", "4096", "--critic", "--reference"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["models"]) == {"actor", "critic", "reference"}
    alone = max(memory["total"] for stages in found["models"].values() for memory in stages)
    assert alone < found["peak"]
    smaller = json.loads(CliRunner().invoke(app, [*command, "--json", "--offload"]).stdout)
    assert smaller["peak"] == alone
    limit = found["peak"] / 2**30 * 0.7
    result = CliRunner().invoke(app, [*command, "--gpu-gib", str(limit)])
    assert "does not fit" in result.stdout
    assert "fits" in result.stdout
    for arguments, message in (
        (["--dims", "tp=3"], "is not divisible by"),
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--model", str(model / "none")], "config.json"),
    ):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_grids_that_fit_have_the_fewest_ranks(model: Path) -> None:
    options = MemoryOptions(ParallelDims(), 4096)
    alone = plan_memory(model, options, role="causal_lm", trained=True)[0].total
    (only,) = fitting(model, options, alone, critic=False, reference=False)
    assert only.options.dims == ParallelDims()
    grids = [found.options.dims for found in fitting(model, options, int(0.75 * alone), critic=False, reference=False)]
    assert grids
    assert len({dims.world_size for dims in grids}) == 1
    assert grids[0].world_size > 1
