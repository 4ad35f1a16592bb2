"""Muon against torch's own on whole matrices, on every grid; and the moments in less memory against fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_layers.testing import RankPool
from parallel_layers.training import Schedule
from parallel_models import PipelineOptions
from parallel_models.optimizers import Optimizer, ShardOptimizer, is_hidden_matrix, orthogonalised
from rl_models import Actor, Batch, OptimizerOptions, losses

ONE, DP2, TP2, DP2TP2 = ParallelDims(), ParallelDims(dp=2), ParallelDims(tp=2), ParallelDims(dp=2, tp=2)
PP2, DP2EP2, TP2EP2 = ParallelDims(pp=2), ParallelDims(dp=2, ep=2), ParallelDims(tp=2, ep=2)
INTERLEAVED = {"pipeline": PipelineOptions(virtual_stages=2)}
# AdamW divides by the root of a tiny second moment, which a last bit decides, plus eps.
RATE, DECAY, EPS, STEPS = 0.01, 0.1, 1e-3, 3
# The gradient's norm is above 1: it is clipped.
MUON = OptimizerOptions(
    RATE, eps=EPS, weight_decay=DECAY, schedule=Schedule("cosine", warmup_steps=2, total_steps=6), algorithm="muon"
)


def update(worker: Actor, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(61, (length,), generator=generator) for length in (9, 5, 12, 7)]
    target = [100 * torch.randn(len(row), generator=generator) for row in rows]
    dp, rank = worker.grid.dims.dp, worker.grid.rank("dp")
    own = slice(rank * len(rows) // dp, (rank + 1) * len(rows) // dp)
    batch = Batch.from_sequences(rows[own], target=target[own])
    return worker.update(batch, lambda inputs: losses.LossTerms(-inputs["target"] * inputs.log_probs))


def make(path: Path, dims: ParallelDims, optimizer: OptimizerOptions, **options: Any) -> Actor:
    return Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu", optimizer=optimizer, **options)


def learn(
    group: ProcessGroup, path: Path, dims: ParallelDims, optimizer: OptimizerOptions, options: Any, out: Path
) -> list[float]:
    worker = make(path, dims, optimizer, **options)
    norms = [update(worker, seed)["grad_norm"] for seed in range(STEPS)]
    worker.save_pretrained(out)
    return norms


class TorchMuon(Optimizer):
    """torch's Muon on each matrix of a transformers model, in fp32, and torch's AdamW on the other parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.matrices, others = model, dict[Tensor, tuple[Tensor, tuple[slice, ...]]](), []
        for name, parameter in model.named_parameters():
            whole = slice(None)
            if parameter.dim() == 3:  # experts, the two halves of gate_up_proj each
                parts = 2 if name.endswith("gate_up_proj") else 1
                rows = parameter.shape[1] // parts
                places = [
                    (slice(e, e + 1), slice(n * rows, (n + 1) * rows))
                    for e in range(len(parameter)) for n in range(parts)
                ]  # fmt: skip
            elif "proj" in name:
                places = [(whole,)]
            else:
                others.append(parameter)
                continue
            for place in places:
                matrix = parameter.detach()[place]
                self.matrices[matrix.squeeze(0) if matrix.dim() == 3 else matrix] = parameter, place
        self.muon = torch.optim.Muon(self.matrices, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
        vectors = [parameter for parameter in others if parameter.dim() == 1]
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0},
        ]
        self.adamw = torch.optim.AdamW(groups, RATE, (0.9, 0.999), EPS)

    def step(self, learning_rate: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for matrix, (parameter, place) in self.matrices.items():
            assert parameter.grad is not None
            matrix.grad = parameter.grad[place].view(matrix.shape)
        for group in self.muon.param_groups + self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with pytest.MonkeyPatch.context() as patch:  # torch calls the one or, in 2.15, the other
            patch.setattr(Tensor, "bfloat16", Tensor.clone)
            patch.setattr(torch, "bfloat16", torch.float32)
            self.muon.step()
        self.model.zero_grad()
        return float(norm)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def tensors(self) -> Any:
        raise NotImplementedError


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def expected(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Tensor]]:
    """The weights after some steps of torch's optimizers, whose Newton-Schulz steps compute in fp32 here, not bf16."""
    found: dict[str, dict[str, Tensor]] = {}

    def of(name: str) -> dict[str, Tensor]:
        if name not in found:
            worker = make(tiny(name), ONE, MUON, backend="transformers")
            worker.__dict__["optimizer"] = TorchMuon(worker.engine.module)
            norms = [update(worker, seed)["grad_norm"] for seed in range(STEPS)]
            assert min(norms) > 1
            folder = tmp_path_factory.mktemp(name) / "out"
            worker.save_pretrained(folder)
            found[name] = weights(folder)
        return found[name]

    return of


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "dims", "options"),
    [
        pytest.param("llama", DP2TP2, {}, marks=SLOW),
        pytest.param("mixture", DP2EP2, {}, marks=SLOW),
        ("mixture", ParallelDims(dp=4, ep=2, replicate=2), {}),
        pytest.param("llama", ParallelDims(dp=2, tp=2, replicate=2), {}, marks=SLOW),
        pytest.param("llama", ParallelDims(dp=4, replicate=2), {"backend": "transformers"}, marks=SLOW),
        pytest.param("llama", TP2, {"sequence_parallel": False}, marks=SLOW),
        pytest.param("llama", DP2, {}, marks=SLOW),
        pytest.param("llama", PP2, {}, marks=SLOW),
        pytest.param("llama", ParallelDims(dp=2, pp=2), {}, marks=SLOW),
        pytest.param("mixture", ONE, {}, marks=SLOW),
        pytest.param("mixture", TP2EP2, {}, marks=SLOW),
        pytest.param("mixture", PP2, {}, marks=SLOW),
        pytest.param("llama", DP2, {"backend": "transformers"}, marks=SLOW),
        pytest.param("mixture", DP2, {"backend": "transformers"}, marks=SLOW),
        # More ranks than key-value heads.
        pytest.param("llama", ParallelDims(tp=4), {}, marks=SLOW),
    ],
    ids=str,
)
def test_muon_is_torchs_on_whole_matrices_on_every_grid(
    ranks: RankPool,
    tiny: Callable[..., Path],
    expected: Callable[[str], dict[str, Tensor]],
    tmp_path: Path,
    name: str,
    dims: ParallelDims,
    options: Any,
) -> None:
    ranks.run(learn, tiny(name), dims, MUON, options, tmp_path / "out", world=dims.world_size, timeout=120)
    found = weights(tmp_path / "out")
    assert found.keys() == expected(name).keys()
    for key, tensor in expected(name).items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_muon_of_an_fp64_model(
    tiny: Callable[..., Path], expected: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    learn(None, tiny("llama"), ONE, MUON, {"dtype": torch.float64}, tmp_path / "out")  # type: ignore[arg-type]
    for key, tensor in weights(tmp_path / "out").items():
        torch.testing.assert_close(tensor.float(), expected("llama")[key], rtol=0, atol=1e-5)


def test_singular_values_come_close_to_one() -> None:
    for shape in ((3, 20, 50), (3, 50, 20)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        found = orthogonalised(matrices.clone())
        values = torch.linalg.svdvals(found)
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.25
        # The singular vectors stay: U^T X V is diagonal.
        inner = u.mT @ found @ v.mT
        torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.experts.2.up_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.experts.gate_up_proj", (4, 8, 8), True),
        ("model.layers.3.mlp.gate_proj.weight", (8, 8), True),
        ("model.layers.3.mlp.gate.weight", (8, 8), False),
        ("model.layers.3.mlp.router.weight", (8, 8), False),
        ("model.layers.3.block_sparse_moe.router.layer.weight", (8, 8), False),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (4, 8), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 8), False),
        ("model.layers.3.input_layernorm.weight", (8,), False),
        ("model.layers.3.linear_attn.in_proj_qkvz.weight", (24, 8), True),
        ("model.layers.3.linear_attn.conv1d.weight", (8, 1, 4), False),
        ("model.layers.3.linear_attn.A_log", (8,), False),
        ("model.layers.3.mamba.in_proj.weight", (40, 8), True),
        ("model.layers.3.mamba.conv1d.bias", (8,), False),
        ("model.layers.3.mamba.D", (8,), False),
        ("model.layers.3.self_attn.A_log", (1, 1, 8, 1), False),
        ("model.layers.3.self_attn.q_conv1d.weight", (8, 1, 4), False),
        ("model.layers.61.embed_tokens.weight", (60, 8), False),
        ("model.layers.61.shared_head.head.weight", (60, 8), False),
        ("model.embed_tokens.weight", (60, 8), False),
        ("lm_head.weight", (60, 8), False),
        ("score.weight", (1, 8), False),
    ],
)
def test_the_weight_matrices_of_layers_alone_are_orthogonalised(
    name: str, shape: tuple[int, ...], hidden: bool
) -> None:
    assert is_hidden_matrix(name, shape) is hidden


def save_and_go_on(
    group: ProcessGroup, path: Path, dims: ParallelDims, optimizer: OptimizerOptions, options: Any, root: Path
) -> list[float]:
    worker = make(path, dims, optimizer, **options)
    for seed in range(2):
        update(worker, seed)
    worker.save_training(root)
    return [update(worker, seed)["loss"] for seed in range(2, 4)]


def resume(
    group: ProcessGroup, path: Path, dims: ParallelDims, optimizer: OptimizerOptions, options: Any, root: Path
) -> list[float]:
    worker = make(path, dims, optimizer, **options)
    worker.load_training(root)
    return [update(worker, seed)["loss"] for seed in range(2, 4)]


@pytest.mark.parametrize(
    ("name", "moments", "first", "second"),
    [
        ("llama", "bfloat16", TP2, (ONE, {})),
        pytest.param("llama", "bfloat16", DP2TP2, (ONE, {}), marks=SLOW),
        pytest.param("mixture", "float32", DP2EP2, (PP2, INTERLEAVED), marks=SLOW),
        pytest.param("llama", "int8", TP2, (DP2, {"backend": "transformers"}), marks=SLOW),
        pytest.param("llama", "int8", ParallelDims(dp=4, replicate=2), (DP2, {}), marks=SLOW),
    ],
)
@pytest.mark.parametrize("algorithm", ["muon", pytest.param("adamw", marks=SLOW)])
def test_a_run_goes_on_on_another_grid(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, algorithm: Any, name: str, moments: Any,
    first: ParallelDims, second: tuple[ParallelDims, Any],
) -> None:  # fmt: skip
    optimizer = OptimizerOptions(RATE, weight_decay=DECAY, algorithm=algorithm, moments=moments)
    path = tiny(name, num_hidden_layers=4)
    before = ranks.run(save_and_go_on, path, first, optimizer, {}, tmp_path, world=first.world_size, timeout=120)
    dims, options = second
    after = ranks.run(resume, path, dims, optimizer, options, tmp_path, world=dims.world_size, timeout=120)
    # Blocks of 8 bits are those of a rank's part.
    assert after[0] == pytest.approx(before[0], rel=1e-2 if moments == "int8" else 1e-4)


def refused(group: ProcessGroup, path: Path, root: Path) -> str:
    worker = make(path, TP2, MUON)
    with pytest.raises(ValueError, match="resume with") as found:
        worker.load_training(root)
    return str(found.value)


def test_the_state_of_another_algorithm_is_refused_on_every_rank(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    save_and_go_on(None, tiny("llama"), ONE, OptimizerOptions(RATE), {}, tmp_path)  # type: ignore[arg-type]
    for message in ranks.run(refused, tiny("llama"), tmp_path, world=2):
        assert (
            "the optimizer state exp_avg, exp_avg_sq, step of a weight whose optimizer keeps momentum_buffer" in message
        )
        assert "OptimizerOptions(algorithm='adamw')" in message


def test_adapters_and_megatron_have_adamw_alone(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="algorithm='muon' orthogonalises whole weight matrices, and low-rank"):
        make(tiny("llama"), ONE, MUON, lora=LoraOptions(rank=2))
    for options in ({"algorithm": "muon"}, {"moments": "int8"}):
        (entry,) = options.items()
        with pytest.raises(ValueError, match=f"'megatron' has no optimizer with {entry[0]}='{entry[1]}'"):
            make(tiny("llama"), ONE, OptimizerOptions(RATE, **options), backend="megatron")  # type: ignore[arg-type]


@pytest.mark.parametrize(("moments", "share"), [("bfloat16", 0.01), ("int8", 0.06)])
def test_moments_in_less_memory_take_nearly_the_same_way(moments: Any, share: float) -> None:
    """40 steps of noisy gradients: the weights' distance from those of fp32 moments, beside the way they went."""

    def run(moments: Any) -> Tensor:
        module = nn.Linear(64, 48, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = ShardOptimizer(module, OptimizerOptions(0.01, (0.9, 0.99), moments=moments))
        generator = torch.Generator().manual_seed(0)
        scale = 10 ** (0.3 * torch.randn(48, 64, generator=generator))
        for _ in range(40):
            module.weight.grad = scale * (1 + torch.randn(48, 64, generator=generator))
            optimizer.step(0.01)
        return module.weight.detach()

    exact, found = run("float32"), run(moments)
    assert float((found - exact).norm() / exact.norm()) < share


def learn_by_parts(group: ProcessGroup, path: Path, dims: ParallelDims, out: Path) -> None:
    learn(group, path, dims, OptimizerOptions(RATE, moments="bfloat16"), {}, out)


def test_rounding_does_not_depend_on_the_grid(ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path) -> None:
    found = []
    for dims in (ONE, DP2TP2):
        ranks.run(learn_by_parts, tiny("llama"), dims, tmp_path / str(dims.tp), world=dims.world_size, timeout=120)
        found.append(weights(tmp_path / str(dims.tp)))
    for name, tensor in found[0].items():
        difference = (tensor - found[1][name]).abs()
        # A gradient's last bit decides a few of the roundings otherwise. Each changes a moment by 2^-7 of itself, and a
        # step by at most 1.5 · RATE · 2^-7; the second step follows one rounding, and the third two.
        assert float(difference.max()) < 3 * 1.5 * RATE * 2**-7, name
        assert float((difference > 1e-6).double().mean()) < 0.02, name


@pytest.mark.gpu(1)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_the_compiled_steps_of_a_gpu_are_those_of_a_cpu(
    tiny: Callable[..., Path], tmp_path: Path, algorithm: Any, moments: Any
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        optimizer = OptimizerOptions(RATE, eps=EPS, weight_decay=DECAY, algorithm=algorithm, moments=moments)
        worker = Actor.from_pretrained(tiny("llama"), device=device, optimizer=optimizer)
        for seed in range(STEPS):
            update(worker, seed)
        worker.save_pretrained(tmp_path / device)
        found.append(weights(tmp_path / device))
    for name, tensor in found[0].items():
        difference = (tensor - found[1][name]).abs()
        # A gradient's last bits decide a few of the roundings otherwise.
        assert float(difference.max()) < 1e-3, name
        assert float((difference > 1e-4).double().mean()) < 0.02, name
