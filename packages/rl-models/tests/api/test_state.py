"""Training checkpoints, offloading and live weights of actors and critics, on every backend and between grids."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

import ckpt
from ckpt.training import latest_step, saved_steps
from hf_patches.testing import tiny_model
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_layers.training import Schedule
from parallel_models import PipelineOptions
from parallel_models.training import release
from rl_models import Actor, Batch, Critic, LossInputs, OptimizerOptions, losses

Options = dict[str, Any]
OPTIMIZER = OptimizerOptions(learning_rate=0.01, schedule=Schedule("cosine", warmup_steps=2, total_steps=6))


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", num_hidden_layers=4, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def moe(tiny: Callable[..., Path]) -> Path:
    return tiny("mixture", num_hidden_layers=4)


@pytest.fixture(scope="session")
def handing_over(tiny: Callable[..., Path]) -> Path:
    return tiny("gemma4-e2b")


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = (9, 5, 12, 7)
    rows = [torch.randint(61, (length,), generator=generator) for length in lengths]
    target = [torch.randn(length, generator=generator) for length in lengths]
    return Batch.from_sequences(rows, target=target)


def policy_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.LossTerms(-inputs["target"] * inputs.log_probs)


def value_loss(inputs: LossInputs) -> losses.LossTerms:
    return losses.LossTerms((inputs.values - inputs["target"]).square())


def make_worker(group: ProcessGroup, path: Path, kind: str, backend: str, dims: ParallelDims, **options: Any) -> Any:
    mesh = mesh_of(dims)
    of = {"actor": Actor, "critic": Critic}[kind]
    options = {"optimizer": OPTIMIZER, **options}
    return of.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, device="cpu", **options)


def update(worker: Any, seed: int) -> dict[str, float]:
    """One step; each data-parallel rank takes its sequences of a batch that is the same on every grid."""
    batch = make_batch(seed)
    dp, rank = worker.grid.dims.dp, worker.grid.rank("dp")
    part = batch.select(range(rank * len(batch) // dp, (rank + 1) * len(batch) // dp))
    return worker.update(part, policy_loss if worker.role == "causal_lm" else value_loss)


def train_and_save(
    group: ProcessGroup, path: Path, kind: str, backend: str, dims: ParallelDims, options: Options, root: Path
) -> list[dict[str, float]]:
    """Two steps, a save, and two steps more."""
    worker = make_worker(group, path, kind, backend, dims, **options)
    curve = [update(worker, seed) for seed in range(2)]
    # A forward pass without a backward leaves FSDP2's root gathered.
    worker.predict(make_batch(0))
    worker.save_training(root, step=7, extra={"prompts": 11})
    return curve + [update(worker, seed) for seed in (2, 3)]


def resume(
    group: ProcessGroup, path: Path, kind: str, backend: str, dims: ParallelDims, options: Options, root: Path
) -> tuple[list[dict[str, float]], Any]:
    worker = make_worker(group, path, kind, backend, dims, **options)
    found = worker.load_training(root)
    assert worker.steps == 2
    return [update(worker, seed) for seed in (2, 3)], found


ONE, DP2, TP2, DP2TP2 = ParallelDims(), ParallelDims(dp=2), ParallelDims(tp=2), ParallelDims(dp=2, tp=2)
PP2, DP2PP2, PP2TP2 = ParallelDims(pp=2), ParallelDims(dp=2, pp=2), ParallelDims(pp=2, tp=2)
DP4, DP4IN2 = ParallelDims(dp=4), ParallelDims(dp=4, replicate=2)
INTERLEAVED: Options = {"pipeline": PipelineOptions(virtual_stages=2)}


@pytest.mark.parametrize(
    ("name", "kind", "saved", "resumed"),
    [
        (
            "model",
            "actor",
            ("parallel", DP2TP2, {}),
            [("parallel", ONE, {}), ("transformers", DP2, {})],
        ),
        pytest.param(
            "model", "actor", ("parallel", DP2TP2, {}), [("transformers", DP4IN2, {})], marks=pytest.mark.slow
        ),
        pytest.param("model", "actor", ("parallel", PP2, INTERLEAVED), [("parallel", TP2, {})], marks=pytest.mark.slow),
        pytest.param(
            "model",
            "critic",
            ("transformers", DP2, {}),
            [("parallel", DP2PP2, INTERLEAVED), ("transformers", ONE, {})],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "handing_over",
            "actor",
            ("parallel", PP2, INTERLEAVED),
            [("parallel", TP2, {}), ("parallel", PP2TP2, {}), ("parallel", ONE, {})],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "moe",
            "actor",
            ("parallel", ParallelDims(dp=2, ep=2), {}),
            [("parallel", PP2, INTERLEAVED), ("parallel", ParallelDims(tp=2, ep=2), {})],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_on_another_grid_and_backend(
    ranks: RankPool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    kind: str,
    saved: Any,
    resumed: list[Any],
) -> None:
    path = request.getfixturevalue(name)
    curve = ranks.run(train_and_save, path, kind, *saved, tmp_path, world=saved[1].world_size)[0]
    assert curve[1]["loss"] != curve[2]["loss"]
    for backend, dims, options in resumed:
        for rest, found in ranks.run(resume, path, kind, backend, dims, options, tmp_path, world=dims.world_size):
            assert (found.step, found.extra) == (7, {"prompts": 11})
            for now, before in zip(rest, curve[2:], strict=True):
                assert now["loss"] == pytest.approx(before["loss"], abs=1e-6), (backend, dims)
                assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)
                assert now["learning_rate"] == before["learning_rate"]


def pass_on(
    group: ProcessGroup, path: Path, dims: ParallelDims, source: Path | None, target: Path
) -> list[dict[str, float]]:
    """Learn from a batch, or load a checkpoint; save, and go on."""
    worker = make_worker(group, path, "actor", "parallel", dims, dtype=torch.bfloat16)
    if source is None:
        update(worker, 0)
    else:
        worker.load_training(source)
    worker.save_training(target)
    return [update(worker, seed) for seed in (1, 2)]


def contents(path: Path, root: Path) -> tuple[int, dict[str, Tensor]]:
    """Return the bytes of a checkpoint's tensors in its files, and the tensors."""
    state = ckpt.load_training(root, ckpt.layout_for(path))
    moments = {f"{slot} of {name}": x for name, slots in state.optimizer.items() for slot, x in slots.items()}
    files = [load_file(file) for file in root.glob("step-*/*.safetensors")]
    return sum(tensor.nbytes for file in files for tensor in file.values()), state.tensors | moments


@pytest.mark.parametrize(
    ("name", "replicas", "plain"),
    [
        ("model", ParallelDims(dp=2, replicate=2), DP2),
        pytest.param("model", DP4IN2, DP4, marks=pytest.mark.slow),
        pytest.param("moe", ParallelDims(dp=4, ep=2, replicate=2), ParallelDims(dp=4, ep=2), marks=pytest.mark.slow),
        pytest.param("moe", ParallelDims(dp=2, tp=2, ep=2, replicate=2), DP2TP2, marks=pytest.mark.slow),
        pytest.param("model", ParallelDims(dp=2, pp=2, replicate=2), PP2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_passes_between_replicas_and_one_to_the_bit(
    ranks: RankPool, request: pytest.FixtureRequest, tmp_path: Path, name: str, replicas: Any, plain: Any
) -> None:
    path, roots = request.getfixturevalue(name), [tmp_path / number for number in "0123"]
    ranks.run(pass_on, path, ONE, None, roots[3], world=1)
    curves = [
        ranks.run(pass_on, path, dims, source, root, world=dims.world_size)[0]
        for dims, source, root in zip((replicas, plain, replicas), (None, *roots[:2]), roots[:3], strict=True)
    ]
    size, first = contents(path, roots[0])
    # Each piece is written by one replica alone.
    assert size == contents(path, roots[3])[0]
    for root in roots[1:3]:
        again = contents(path, root)[1]
        assert again.keys() == first.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in first.items())
    assert curves[2] == curves[0]


def test_a_mixture_of_experts_is_saved_under_its_checkpoints_names(moe: Path, tmp_path: Path) -> None:
    worker = Actor.from_pretrained(moe, backend="transformers", device="cpu", optimizer=OPTIMIZER)
    update(worker, 0)
    worker.save_training(tmp_path)
    expected = update(worker, 1)
    # ckpt's own layout knows the tensors that are in the file.
    state = ckpt.load_training(tmp_path, ckpt.layout_for(moe), ckpt.Place(tp=(0, 2)))
    assert "model.layers.0.mlp.experts.gate_up_proj" in state.optimizer
    again = Actor.from_pretrained(moe, backend="transformers", device="cpu", optimizer=OPTIMIZER)
    assert again.load_training(tmp_path).step == 1
    assert update(again, 1) == pytest.approx(expected, abs=1e-6)


def save_behind(group: ProcessGroup, path: Path, root: Path) -> tuple[float, float, Any, Any]:
    """Saves in the background go on while the next steps run, and keep what they were given."""
    worker = make_worker(group, path, "actor", "parallel", TP2, dtype=torch.bfloat16)
    sync = os.fsync

    def slowly(file: int) -> None:
        time.sleep(0.5)
        sync(file)

    os.fsync = slowly
    try:
        update(worker, 0)
        began = time.monotonic()
        worker.save_training(root, keep=2, asynchronous=True)
        stall = time.monotonic() - began
        expected = update(worker, 1)
        worker.save_training(root, keep=2, asynchronous=True)
        whole = time.monotonic() - began
        update(worker, 2)
        worker.save_training(root, keep=2)
        worker.wait_for_save()
        worker.load_training(root, step=2)
        from_two = update(worker, 2)
    finally:
        os.fsync = sync
    assert from_two["learning_rate"] == OPTIMIZER.learning_rate_at(2)
    return stall, whole, expected, sorted(saved_steps(root))


@pytest.mark.slow
def test_a_save_in_the_background_stalls_for_a_copy_alone(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    for stall, whole, _, steps in ranks.run(save_behind, model, tmp_path, world=2, timeout=60):
        assert stall < 0.4
        assert whole >= 0.5, "the second save waits for the first"
        assert steps == [2, 3]
    assert latest_step(tmp_path) == 3


def test_bf16_goes_on_from_its_masters(model: Path, tmp_path: Path) -> None:
    workers = [
        Actor.from_pretrained(model, device="cpu", dtype=torch.bfloat16, optimizer=OptimizerOptions(1e-5))
        for _ in range(2)
    ]
    for seed in range(3):
        update(workers[0], seed)
    workers[0].save_training(tmp_path)
    workers[1].load_training(tmp_path)
    for seed in (3, 4):
        assert update(workers[0], seed) == update(workers[1], seed)
    first, second = (dict(worker.engine.module.named_parameters()) for worker in workers)
    for name, parameter in first.items():
        masters = [
            worker.optimizer.state(p)["master"] for worker, p in zip(workers, (parameter, second[name]), strict=True)
        ]
        assert torch.equal(*masters), name
        # The updates are below the precision of bf16: they are in the masters alone.
        assert not torch.equal(masters[0], parameter.float()), name


def test_a_run_of_another_model_is_refused(model: Path, moe: Path, tmp_path: Path) -> None:
    actor = Actor.from_pretrained(model, device="cpu")
    with pytest.raises(ValueError, match=r"step=1.5 must be an integer, not float"):
        actor.save_training(tmp_path, step=1.5)  # type: ignore[arg-type]
    actor.save_training(tmp_path, step=np.int64(3))  # type: ignore[arg-type]
    other = Actor.from_pretrained(moe, backend="transformers", device="cpu")
    with pytest.raises(ValueError, match=r"step-\d+ is of another model: it lacks .*; load that model"):
        other.load_training(tmp_path)
    with pytest.raises(ValueError, match="has no training checkpoint; give the folder"):
        other.load_training(tmp_path / "none")


def bits(worker: Any) -> list[Tensor]:
    """All the numbers of a worker: weights and optimizer state."""
    parameters = list(worker.engine.module.parameters())
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return [t.detach().clone() for t in (*local, *worker.optimizer.tensors())]


def offload_and_look(group: ProcessGroup, path: Path, backend: str, dims: ParallelDims) -> None:
    # On one rank transformers maps the files, unless the type is another.
    dtype = None if (backend, dims) == ("transformers", ONE) else torch.bfloat16
    worker = make_worker(group, path, "actor", backend, dims, dtype=dtype)
    update(worker, 0)
    before = bits(worker)
    size = sum(tensor.nbytes for tensor in before)
    # A forward pass without a backward leaves FSDP2's root gathered.
    worker.log_probs(make_batch(1))
    freed = worker.offload()
    assert freed >= size
    held = [p.to_local() if hasattr(p, "to_local") else p for p in worker.engine.module.parameters()]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*held, *worker.optimizer.tensors()))
    assert worker.offload() == 0
    for call in (
        lambda: worker.log_probs(make_batch(1)),
        lambda: update(worker, 1),
        lambda: worker.generate([[1]], max_new_tokens=1),
        lambda: worker.save_pretrained("unused"),
        lambda: worker.save_training("unused"),
        lambda: worker.load_training("unused"),
        lambda: worker.stream_weights(),
        lambda: worker.held_weights(),
    ):
        with pytest.raises(RuntimeError, match=r"needs the weights.* on the device; call onload\(\) first"):
            call()
    worker.onload(weights=True, optimizer=False)
    worker.log_probs(make_batch(1))
    with pytest.raises(RuntimeError, match="an update needs the optimizer state on the device"):
        update(worker, 1)
    worker.onload()
    worker.onload()
    release(worker.engine.module)
    assert all(torch.equal(now, then) for now, then in zip(bits(worker), before, strict=True))
    update(worker, 1)


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ONE),
        pytest.param("parallel", DP2PP2, marks=pytest.mark.slow),
        ("transformers", DP2),
        ("transformers", ONE),
    ],
)
def test_offload_gives_the_memory_up_and_onload_brings_it_back_bit_for_bit(
    ranks: RankPool, model: Path, backend: str, dims: ParallelDims
) -> None:
    ranks.run(offload_and_look, model, backend, dims, world=dims.world_size)


@pytest.mark.gpu(1)
def test_offload_frees_a_gpu(model: Path) -> None:
    worker = Actor.from_pretrained(model, device="cuda", dtype=torch.bfloat16, optimizer=OPTIMIZER)
    update(worker, 0)
    before, held = bits(worker), torch.cuda.memory_allocated()
    freed = worker.offload()
    assert torch.cuda.memory_allocated() <= held - 0.9 * freed
    worker.onload()
    assert all(torch.equal(now, then) for now, then in zip(bits(worker), before, strict=True))
    update(worker, 1)


def stream(
    group: ProcessGroup, path: Path, kind: str, backend: str, dims: ParallelDims, out: Path
) -> dict[str, Tensor]:
    worker = make_worker(group, path, kind, backend, dims)
    loaded = dict(worker.stream_weights(dtype=torch.float32))
    for name, tensor in load_file(path / "model.safetensors").items():
        assert name in loaded or kind == "critic", name
        assert name not in loaded or torch.equal(loaded[name], tensor), name
    update(worker, 0)
    worker.save_pretrained(out)
    received = dict(worker.stream_weights(to=[0], bucket_bytes=4096))
    assert bool(received) == (group.rank() == 0)
    return received


@pytest.mark.parametrize(
    ("name", "kind", "backend", "dims"),
    [
        pytest.param("model", "actor", "parallel", DP2TP2, marks=pytest.mark.slow),
        pytest.param("model", "critic", "parallel", DP2PP2, marks=pytest.mark.slow),
        pytest.param("moe", "actor", "parallel", ParallelDims(dp=2, ep=2), marks=pytest.mark.slow),
        ("moe", "actor", "parallel", ParallelDims(tp=2, ep=2)),  # whole experts, two on each rank
        # Two halves of each, shared out over dp.
        pytest.param("moe", "actor", "parallel", ParallelDims(dp=2, tp=2, ep=2), marks=pytest.mark.slow),
        pytest.param("moe", "actor", "parallel", ParallelDims(pp=2, cp=2, ep=2), marks=pytest.mark.slow),
        pytest.param("model", "actor", "transformers", DP2, marks=pytest.mark.slow),
        ("moe", "actor", "transformers", ONE),
    ],
)
def test_streamed_weights_are_those_that_were_loaded_and_those_that_are_saved(
    ranks: RankPool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    name: str,
    kind: str,
    backend: str,
    dims: ParallelDims,
) -> None:
    out = tmp_path / "out"
    path = request.getfixturevalue(name)
    received = ranks.run(stream, path, kind, backend, dims, out, world=dims.world_size)[0]
    saved = load_file(out / "model.safetensors")
    assert received.keys() == saved.keys()
    for tensor_name, tensor in saved.items():
        assert received[tensor_name].dtype == tensor.dtype
        assert torch.equal(received[tensor_name], tensor), tensor_name


@pytest.mark.parametrize(
    ("family", "backends"),
    [("deepseek_v3", ["transformers", "parallel"]), ("glm4_moe", ["transformers"]), ("deepseek_v2", ["transformers"])],
)
def test_buffers_and_stacked_experts_of_transformers_are_saved_and_streamed_as_in_its_files(
    tmp_path: Path, family: str, backends: list[str]
) -> None:
    path = tmp_path / family
    model = tiny_model(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # by which routers choose
            torch.nn.init.normal_(buffer)
    model.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    worker = Actor.from_pretrained(path, backend="transformers", device="cpu")
    streamed = dict(worker.stream_weights())
    assert streamed.keys() == stored.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in stored.items())
    worker.save_training(tmp_path / "run")
    for backend in backends:
        other = Actor.from_pretrained(path, backend=backend, device="cpu")
        tensors = other.engine.shards().parameters.values()
        for tensor in tensors:
            tensor.detach().zero_()
        other.load_training(tmp_path / "run")
        again = dict(other.stream_weights())
        assert all(torch.equal(again[name], tensor) for name, tensor in stored.items()), backend


def save_without_source(group: ProcessGroup, source: Path, kind: str, backend: str, out: Path) -> None:
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        worker = make_worker(group, source, kind, backend, ONE)
        shutil.rmtree(source)
        worker.save_pretrained(out)


@pytest.mark.parametrize(
    ("family", "kind", "backend"),
    [
        ("llama", "actor", "parallel"),
        ("llama", "critic", "megatron"),
        ("llama", "actor", "transformers"),
        ("gpt2", "actor", "transformers"),  # saved by transformers
        *(("qwen3_vl", "actor", backend) for backend in ("parallel", "megatron", "transformers")),
    ],
)
def test_a_model_is_saved_after_its_folder_is_gone(
    family: str, kind: str, backend: str, ranks: RankPool, tmp_path: Path
) -> None:
    source, kept, out = tmp_path / "source", tmp_path / "kept", tmp_path / "out"
    tiny_model(family).save_pretrained(source)
    companions = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja")
    for name in companions:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    shutil.copytree(source, kept)
    ranks.run(save_without_source, source, kind, backend, out, world=1)
    assert all((out / name).read_text() == name for name in companions)
    stored, saved = (load_file(folder / "model.safetensors") for folder in (kept, out))
    assert stored.keys() - saved.keys() <= ({"lm_head.weight"} if kind == "critic" else set())
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items() if name in saved)


def save_broken(group: ProcessGroup, source: Path, backend: str, out: Path) -> str:
    actor = make_worker(group, source, "actor", backend, DP2)
    for parameter in list(actor.engine.module.parameters())[-1:]:
        parameter.data.fill_(torch.nan)
    try:
        actor.save_pretrained(out)
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(("family", "backend"), [("llama", "parallel"), ("gpt2", "transformers")])
def test_weights_that_are_not_finite_are_not_saved(family: str, backend: str, ranks: RankPool, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "source")
    seen = ranks.run(save_broken, tmp_path / "source", backend, tmp_path / "out", world=2)
    assert all("holds NaN or infinite values, so nothing is saved" in text for text in seen), seen
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
