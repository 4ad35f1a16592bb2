"""`backend="transformers"` over tp and ep: every grid learns, generates, saves and streams as one rank does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from meshes import mesh_of
from packaging.version import Version
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hf_patches.testing import tiny_model
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers cannot shard a model over a mesh of ours before 5.23",
)

# The same as in `test_engine.py`: clips, and the first step is proportional to the clipped gradient.
OPTIMIZER = OptimizerOptions(learning_rate=100.0, eps=100.0, max_grad_norm=0.5)
LENGTHS = (11, 1, 17, 6, 2, 9)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads, tied": ("qwen3", {"tie_word_embeddings": True}),
    "mixture": ("qwen3_moe", {"mlp_only_layers": [1]}),
}
GRIDS = ("tp=2", "dp=2,tp=2", "cp=2,tp=2", "dp=2,replicate=2,tp=2")
DENSE, MIXTURE = MODELS
# hf-patches has dense layers and tied embeddings in every run.
QUICK = {(MIXTURE, GRIDS[1])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint of each model, in several files."""
    folder = tmp_path_factory.mktemp("models")
    for number, (family, overrides) in enumerate(MODELS.values()):
        tiny_model(family, vocab_size=64, **overrides).save_pretrained(folder / str(number), max_shard_size="20KB")
    return {name: folder / str(number) for number, name in enumerate(MODELS)}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(60, (length,), generator=generator) for length in LENGTHS]
    weights = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b")}
    return Batch.from_sequences(rows, **weights)


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"])


def load(path: Path, dims: ParallelDims, device: str = "cpu", **options: Any) -> Actor:
    return Actor.from_pretrained(
        path,
        backend="transformers",
        dims=dims,
        mesh=mesh_of(dims, device),
        device=device,
        max_tokens_per_micro_batch=17,
        **options,
    )


def weights_of(actor: Actor) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in actor.stream_weights()}


def learn(group: ProcessGroup | None, path: Path, dims: ParallelDims, out: Path, device: str = "cpu") -> dict[str, Any]:
    """Score, save, update, save the training state, update again, generate."""
    actor = load(path, dims, device, optimizer=OPTIMIZER)
    batch = make_batch()
    indices = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
    part = batch.select(indices)
    actor.save_pretrained(out / "unchanged")
    scored = actor.log_probs(part)
    norm = actor.update(part, loss)["grad_norm"]
    stepped = weights_of(actor)
    actor.save_training(out / "training")
    actor.offload()
    actor.onload()
    again = actor.update(part, loss)["grad_norm"]
    drawn = actor.generate([[1, 2, 3], [4]], max_new_tokens=4, temperature=0.0)
    return {
        "where": batch.positions(indices),
        "scores": torch.stack([scored.log_probs, scored.entropy]),
        "norms": [norm, again],
        "weights": [stepped, weights_of(actor)],
        "drawn": drawn["log_probs"],
        "held": {
            name: x.to_local().numel() if isinstance(x, DTensor) else x.numel()
            for name, x in actor.engine.module.named_parameters()
        },
    }


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=2e-6)


class Alone(NamedTuple):
    """The results of one rank, and what it saved."""

    folder: Path
    results: dict[str, Any]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    """`alone(name)`: each model runs on one rank once."""

    @cache
    def run(name: str) -> Alone:
        out = tmp_path_factory.mktemp("alone")
        return Alone(out, learn(None, folders[name], ParallelDims(), out))

    return run


def dims_of(name: str, grid: str) -> ParallelDims:
    return ParallelDims.parse(grid + ",ep=2" * (name == MIXTURE))


class Learned(NamedTuple):
    """The results of each rank of a grid, and what the grid saved."""

    folder: Path
    results: list[dict[str, Any]]


@pytest.fixture(scope="module")
def learned(
    ranks: RankPool, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Learned]:
    """`learned(name, grid)`: each model runs on each grid once."""

    @cache
    def run(name: str, grid: str) -> Learned:
        out, dims = tmp_path_factory.mktemp("grid"), dims_of(name, grid)
        return Learned(out, ranks.run(learn, folders[name], dims, out, world=dims.world_size, timeout=180))

    return run


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        pytest.param(name, grid, marks=[] if (name, grid) in QUICK else pytest.mark.slow)
        for name, grid in itertools.product(MODELS, GRIDS)
    ],
)
def test_equal_to_one_rank(
    learned: Callable[[str, str], Learned], alone: Callable[[str], Alone], name: str, grid: str
) -> None:
    dims, expected = dims_of(name, grid), alone(name).results
    folder, results = learned(name, grid)
    for result in results:
        torch.testing.assert_close(result["scores"], expected["scores"][:, result["where"]], rtol=0, atol=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["norms"] == results[0]["norms"]
        for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert_close(actual, wanted)
        torch.testing.assert_close(result["drawn"], expected["drawn"], rtol=0, atol=1e-5)
        for key in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
            assert result["held"][key] * dims.replica_size == expected["held"][key]
    saved = folder / "unchanged" / "model.safetensors"
    assert saved.read_bytes() == (alone(name).folder / "unchanged" / "model.safetensors").read_bytes()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_rank_on_gpus(
    nccl_ranks: RankPool, folders: dict[str, Path], alone: Callable[[str], Alone], tmp_path: Path, name: str
) -> None:
    """Against one rank on a CPU, in fp32: a GPU adds up in another order."""
    dims, expected = ParallelDims.parse("tp=2" + ",ep=2" * (name == "mixture")), alone(name).results
    for result in nccl_ranks.run(learn, folders[name], dims, tmp_path, "cuda", world=2, timeout=180):
        torch.testing.assert_close(result["scores"], expected["scores"], rtol=0, atol=1e-4)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        for actual, wanted in zip(result["weights"], expected["weights"], strict=True):
            assert actual.keys() == wanted.keys()
            for key, tensor in wanted.items():
                torch.testing.assert_close(actual[key].cpu(), tensor, rtol=0, atol=1e-4)


def resume(group: ProcessGroup | None, path: Path, dims: ParallelDims, state: Path) -> dict[str, Tensor]:
    """Return the weights after the second update, from the state after the first one."""
    actor = load(path, dims, optimizer=OPTIMIZER)
    actor.load_training(state)
    batch = make_batch()
    actor.update(batch.select(list(range(actor.grid.rank("dp"), len(batch), dims.dp))), loss)
    return weights_of(actor)


@pytest.mark.slow
def test_the_training_state_moves_to_any_grid(
    ranks: RankPool, folders: dict[str, Path], alone: Callable[[str], Alone], learned: Callable[[str, str], Learned]
) -> None:
    path, (folder, expected), grid = folders[MIXTURE], alone(MIXTURE), "dp=2,tp=2"
    for weights in ranks.run(resume, path, dims_of(MIXTURE, grid), folder / "training", world=4, timeout=180):
        assert_close(weights, expected["weights"][1])
    of_grid = learned(MIXTURE, grid).folder / "training"
    assert_close(resume(None, path, ParallelDims(), of_grid), expected["weights"][1])


def generate_unequally(group: ProcessGroup, path: Path) -> None:
    """One data-parallel rank has no prompts; its ranks share no experts with the other's."""
    actor = load(path, ParallelDims(dp=2, tp=2, ep=2))
    prompts = [[1, 2, 3], [4]] if actor.grid.rank("dp") == 0 else []
    drawn = actor.generate(prompts, max_new_tokens=4, seed=1)
    assert len(drawn) == len(prompts)


@pytest.mark.slow
def test_data_parallel_ranks_generate_different_numbers(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(generate_unequally, folders["mixture"], world=4, timeout=120)


def train_a_critic(group: ProcessGroup | None, path: Path, dims: ParallelDims) -> tuple[Tensor, float]:
    critic = Critic.from_pretrained(
        path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu", optimizer=OPTIMIZER
    )
    batch = make_batch()
    norm = critic.update(batch, lambda inputs: LossTerms((inputs.values - inputs["a"]).square()))["grad_norm"]
    return critic.values(batch), norm


def test_a_critic(ranks: RankPool, folders: dict[str, Path]) -> None:
    path = folders["norms of heads, tied"]
    values, norm = train_a_critic(None, path, ParallelDims())
    for actual, actual_norm in ranks.run(train_a_critic, path, ParallelDims(tp=2), world=2, timeout=120):
        torch.testing.assert_close(actual, values, rtol=0, atol=1e-5)
        assert actual_norm == pytest.approx(norm, rel=1e-5)


def muon(group: ProcessGroup | None, path: Path, dims: ParallelDims) -> dict[str, Tensor]:
    actor = load(path, dims, optimizer=OptimizerOptions(algorithm="muon", learning_rate=1e-2))
    actor.update(make_batch(), loss)
    return weights_of(actor)


@pytest.mark.slow
def test_muon_takes_whole_matrices(ranks: RankPool, folders: dict[str, Path]) -> None:
    path = folders["mixture"]
    expected = muon(None, path, ParallelDims())
    for weights in ranks.run(muon, path, ParallelDims(tp=2, ep=2), world=2, timeout=120):
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-4)


def norm_of_differing_ranks(group: ProcessGroup, path: Path) -> float:
    """Return the norm of an update whose gradients differ between the ranks, as by the last bits of a sum."""
    actor = load(path, ParallelDims(tp=2), optimizer=OPTIMIZER)
    actor.forward_backward(make_batch(), loss)
    for parameter in actor.engine.module.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1.0 + 0.1 * group.rank()
    return actor.optimizer_step()["grad_norm"]


def test_ranks_clip_by_one_norm(ranks: RankPool, folders: dict[str, Path]) -> None:
    """Else the weights that every rank holds, as of norms, would drift apart."""
    first, second = ranks.run(norm_of_differing_ranks, folders["norms of heads, tied"], world=2, timeout=120)
    assert first == second


def norm_of_copies(group: ProcessGroup, path: Path, copies: int) -> float:
    options = {"dtype": torch.bfloat16, "optimizer": OPTIMIZER}
    actor = load(path, ParallelDims(tp=2), **options)
    actor.max_tokens_per_micro_batch = 2
    batch = Batch.from_sequences([torch.tensor([3, 5])] * copies)
    return actor.update(batch, lambda inputs: LossTerms(inputs.log_probs))["grad_norm"]


@pytest.mark.slow
def test_gradients_of_bf16_weights_are_summed_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    """300 equal micro-batches have the mean gradient of one; a sum in bf16 would stop growing at 256."""
    tiny_model("llama", vocab_size=64, num_hidden_layers=1).save_pretrained(tmp_path)
    alone, many = (ranks.run(norm_of_copies, tmp_path, copies, world=2, timeout=180)[0] for copies in (1, 300))
    assert many == pytest.approx(alone, rel=0.01)


def refusals(group: ProcessGroup, path: Path) -> None:
    for dims, options, message in (
        (ParallelDims(tp=2), {"lora": LoraOptions(rank=2)}, r"does not offer lora with tp=2: .*or backend='parallel'"),
        (ParallelDims(dp=2, ep=2), {}, r"experts over the ranks of tp=1, got ep=2; use ep=1"),
        (ParallelDims(tp=2), {}, r"^tp=2 with transformers .* refuses Qwen3MoeForCausalLM .*use ep equal to tp"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, dims, **options)


def test_what_is_not_offered(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(refusals, folders["mixture"], world=2, timeout=120)


def one_rank_lacks_the_files(group: ProcessGroup, path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        load(path if group.rank() else Path("/nowhere"), ParallelDims(tp=2))


def test_no_rank_waits_for_a_rank_that_cannot_read(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(one_rank_lacks_the_files, folders["mixture"], world=2, timeout=60)
