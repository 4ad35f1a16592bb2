"""An actor and a critic on one backbone: they say what each says alone, and learn by the sum of both gradients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)

import ckpt
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool
from parallel_models import PipelineOptions, RouterLosses
from rl_models import Actor, ActorCritic, Batch, CausalLMWithValue, Critic, LossInputs, ModelConfig, OptimizerOptions
from rl_models.api.worker import Worker
from rl_models.calls.passes import accumulate
from rl_models.losses import LossTerms

VOCAB, HIDDEN = 61, 32
LENGTHS = (12, 1, 5, 7, 3, 4, 9, 2)
VALUE_COEFFICIENT = 0.3


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Causal language models with a value head that is not zero beside their own."""
    plain = {
        "untied": tiny("llama", num_hidden_layers=4),
        "tied": tiny("llama", num_hidden_layers=4, tie_word_embeddings=True),
        "moe": tiny("mixture"),
    }
    folders = {}
    for name, path in plain.items():
        folders[name] = Path(shutil.copytree(path, tmp_path_factory.mktemp("actor-critics") / name))
        torch.manual_seed(len(name))
        head = {"score.weight": torch.randn(1, HIDDEN) / 4, "score.bias": torch.randn(1)}
        file = folders[name] / "model.safetensors"
        save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return folders


def load(group: ProcessGroup, path: Path, kind: type[Worker], dims: ParallelDims, **options: Any) -> Any:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mesh = mesh_of(dims, device)
    return kind.from_pretrained(path, dims=dims, mesh=mesh, device=device, max_tokens_per_micro_batch=12, **options)


def make_batch(dims: ParallelDims, dp_rank: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]
    fields = {name: [torch.randn(length, generator=generator) for length in LENGTHS] for name in ("a", "b", "c")}
    mine = slice(dp_rank, None, dims.dp)
    return Batch.from_sequences(rows[mine], **{name: numbers[mine] for name, numbers in fields.items()})


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(
        inputs.log_probs * inputs["a"] + inputs.entropy * inputs["b"], {"entropy": inputs.entropy.detach()}
    )


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["c"]).square(), {"value": inputs.values.detach()})


def joint_loss(inputs: LossInputs) -> LossTerms:
    return policy_loss(inputs) + VALUE_COEFFICIENT * value_loss(inputs)


LOSSES: dict[type[Worker], Any] = {Actor: policy_loss, Critic: value_loss, ActorCritic: joint_loss}


@dataclass(frozen=True)
class Numbers:
    """What a worker says of its batch, the means of an update's loss and metrics, and the gradient of every tensor."""

    dp_rank: int
    outputs: dict[str, Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


def measure(
    group: ProcessGroup, path: Path, kind: type[Worker], dims: ParallelDims, options: dict[str, Any]
) -> Numbers:
    worker = load(group, path, kind, dims, **options)
    batch = make_batch(dims, worker.grid.rank("dp"))
    outputs = worker.predict(batch, temperature=0.8)
    if isinstance(worker, Critic):  # from a pass of their own
        torch.testing.assert_close(worker.values(batch), outputs["values"], rtol=0, atol=0)
    metrics = accumulate(
        worker.engine, batch, LOSSES[kind], 12, call="update", aggregation="token-mean", temperature=0.8
    )
    shards = worker.engine.shards()
    chunks = [
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in part.items()}
        for _, part in shards.chunks
    ]
    gradients = dict(ckpt.stream_hf(chunks, shards.layout, worker.grid.everyone, shards.places))
    return Numbers(worker.grid.rank("dp"), outputs, metrics, {name: x.detach() for name, x in gradients.items()})


def joined(ranks: RankPool, path: Path, **options: Any) -> Numbers:
    """Return what an actor and a critic of one rank say, and the sum of their gradients under the joint loss."""
    (actor,) = ranks.run(measure, path, Actor, ParallelDims(), options, world=1)
    (critic,) = ranks.run(measure, path, Critic, ParallelDims(), {}, world=1)
    gradients = dict(actor.gradients)
    for name, gradient in critic.gradients.items():
        gradients[name] = gradients.get(name, 0) + VALUE_COEFFICIENT * gradient
    loss = actor.metrics["loss"] + VALUE_COEFFICIENT * critic.metrics["loss"]
    return Numbers(0, {**actor.outputs, **critic.outputs}, {**critic.metrics, **actor.metrics, "loss": loss}, gradients)


@pytest.fixture(scope="module")
def expected(ranks: RankPool, models: dict[str, Path]) -> Callable[..., Numbers]:
    return cache(lambda name, **options: joined(ranks, models[name], **options))


def check(found: Numbers, expected: Numbers, dims: ParallelDims) -> None:
    mine = list(range(len(LENGTHS)))[found.dp_rank :: dims.dp]
    everything = make_batch(ParallelDims(), 0).with_fields(**expected.outputs)
    assert list(found.outputs) == ["log_probs", "entropy", "values"]
    for name, output in found.outputs.items():
        torch.testing.assert_close(output, everything.select(mine)[name], rtol=0, atol=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(
            gradient, expected.gradients[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


GRIDS: list[Any] = [
    pytest.param("tied", ParallelDims(tp=2), {}, id="tp2"),
    pytest.param("tied", ParallelDims(pp=2), {"pipeline": PipelineOptions(virtual_stages=2)}, id="pp2-vpp2"),
    pytest.param("tied", ParallelDims(dp=2), {"backend": "transformers"}, id="transformers-dp2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow, id=name)
        for name, case in {
            "one": ("untied", ParallelDims(), {}),
            "one-tied-recompute": ("tied", ParallelDims(), {"recompute": "full"}),
            "dp2": ("untied", ParallelDims(dp=2), {}),
            "transformers-cp2": ("untied", ParallelDims(cp=2), {"backend": "transformers"}),
            "cp2": ("untied", ParallelDims(cp=2), {}),
            "tp2-plain": ("untied", ParallelDims(tp=2), {"sequence_parallel": False}),
            "pp2-tp2": ("untied", ParallelDims(pp=2, tp=2), {}),
            "dp2-pp2": ("tied", ParallelDims(dp=2, pp=2), {}),
            "cp2-tp2-ring": ("tied", ParallelDims(cp=2, tp=2), {"context_parallel": "ring"}),
            "tp4": ("untied", ParallelDims(tp=4), {}),
            "moe": ("moe", ParallelDims(), {}),
            "moe-dp2-tp2-ep2": ("moe", ParallelDims(dp=2, tp=2, ep=2), {}),
            "moe-tp2-ep2": ("moe", ParallelDims(tp=2, ep=2), {}),
            "moe-pp2-cp2-ep2": ("moe", ParallelDims(pp=2, cp=2, ep=2), {}),
        }.items()
    ),
]


@pytest.mark.parametrize(("model", "dims", "options"), GRIDS)
def test_both_heads_say_and_learn_on_every_grid_what_two_models_do_on_one_rank(
    ranks: RankPool,
    models: dict[str, Path],
    expected: Callable[..., Numbers],
    model: str,
    dims: ParallelDims,
    options: dict[str, Any],
) -> None:
    for found in ranks.run(measure, models[model], ActorCritic, dims, options, world=dims.world_size, timeout=120):
        check(found, expected(model), dims)


@pytest.mark.slow
def test_the_routers_losses_count_once(
    ranks: RankPool, models: dict[str, Path], expected: Callable[..., Numbers]
) -> None:
    options = {"router_losses": RouterLosses(balance=3.0, sequence_balance=2.0, z=1.0)}
    dims = ParallelDims(dp=2, tp=2, ep=2)
    for found in ranks.run(measure, models["moe"], ActorCritic, dims, options, world=4, timeout=120):
        check(found, expected("moe", **options), dims)


# With so large an epsilon the first step is proportional to the clipped gradient.
ONE_STEP = OptimizerOptions(learning_rate=100.0, eps=100.0, max_grad_norm=0.5)


@dataclass(frozen=True)
class Update:
    """An update's metrics, how far it moved every tensor from where it stood, and what both heads say after it."""

    dp_rank: int
    metrics: dict[str, float]
    start: dict[str, Tensor]
    steps: dict[str, Tensor]
    outputs: dict[str, Tensor]


def learn_once(group: ProcessGroup, path: Path, dims: ParallelDims) -> Update:
    worker = load(group, path, ActorCritic, dims, optimizer=ONE_STEP)
    batch = make_batch(dims, worker.grid.rank("dp"))
    start = {name: tensor.cpu().clone() for name, tensor in worker.stream_weights(value_head=True)}
    metrics = worker.update(batch, joint_loss, temperature=0.8)
    steps = {name: tensor.cpu() - start[name] for name, tensor in worker.stream_weights(value_head=True)}
    return Update(worker.grid.rank("dp"), metrics, start, steps, worker.predict(batch, temperature=0.8))


UPDATED = {"tp2": ParallelDims(tp=2), "dp2": ParallelDims(dp=2)}


def check_update(pool: RankPool, ranks: RankPool, path: Path, dims: ParallelDims, tolerance: float) -> None:
    """An update on a grid against one on one CPU rank."""
    (expected,) = ranks.run(learn_once, path, ParallelDims(), world=1)
    everything = make_batch(ParallelDims(), 0).with_fields(**expected.outputs)
    assert expected.metrics["grad_norm"] > ONE_STEP.max_grad_norm
    for found in pool.run(learn_once, path, dims, world=dims.world_size, timeout=120):
        assert found.metrics == pytest.approx(expected.metrics, rel=tolerance, abs=tolerance)
        mine = everything.select(list(range(len(LENGTHS)))[found.dp_rank :: dims.dp])
        assert list(found.outputs) == ["log_probs", "entropy", "values"]
        for name, output in found.outputs.items():
            torch.testing.assert_close(output, mine[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert found.steps.keys() == expected.steps.keys()
        for name, step in expected.steps.items():
            assert torch.equal(found.start[name], expected.start[name]), name
            assert step.abs().max() > 10 * tolerance, name
            torch.testing.assert_close(
                found.steps[name], step, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("grid", ["tp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_one_update_moves_every_tensor_as_on_one_rank(ranks: RankPool, models: dict[str, Path], grid: str) -> None:
    check_update(ranks, ranks, models["tied"], UPDATED[grid], tolerance=1e-5)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("grid", UPDATED)
def test_one_update_on_gpus(ranks: RankPool, nccl_ranks: RankPool, models: dict[str, Path], grid: str) -> None:
    """Against one rank on a CPU, in fp32: a GPU adds up in another order."""
    check_update(nccl_ranks, ranks, models["tied"], UPDATED[grid], tolerance=1e-4)


def learn_values(group: ProcessGroup, path: Path, dims: ParallelDims) -> list[float]:
    worker = load(group, path, ActorCritic, dims, optimizer=ONE_STEP)
    rows = [row.tolist() for row in make_batch(ParallelDims(), 0).split()]
    # With dp=2 one rank has no token in its mask.
    responses, mine = [len(row) // 2 * (1 - number % 2) for number, row in enumerate(rows)], worker.grid.rank("dp")
    batch = Batch.from_sequences(rows[mine :: dims.dp], response_lengths=responses[mine :: dims.dp])
    found = [worker.update(batch, lambda inputs: LossTerms((inputs.values - 1).square())) for _ in range(2)]
    return [number for each in found for number in (each["loss"], each["grad_norm"])]


@pytest.mark.parametrize("dims", [ParallelDims(pp=2), ParallelDims(dp=2)])
def test_a_loss_may_ignore_a_head(ranks: RankPool, models: dict[str, Path], dims: ParallelDims) -> None:
    path = models["tied" if dims.pp > 1 else "untied"]
    one, found = (ranks.run(learn_values, path, each, world=each.world_size)[0] for each in (ParallelDims(), dims))
    assert found == pytest.approx(one, rel=1e-5)


def test_both_heads_read_one_pass_through_the_decoder(models: dict[str, Path]) -> None:
    model = CausalLMWithValue(ModelConfig.from_hf(models["tied"]))
    passes: list[int] = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    packed = PackedSequence.from_sequences([torch.arange(7), torch.arange(3)])
    log_probs, entropy, values = model.outputs(packed, temperature=0.7)
    assert len(passes) == 1
    alone = model.log_probs(packed, temperature=0.7)
    assert torch.equal(log_probs, alone.log_probs)
    assert alone.entropy is not None
    assert torch.equal(entropy, alone.entropy)
    torch.testing.assert_close(values, model.score.values(model(packed))[:, 0])


def five_steps(group: ProcessGroup, path: Path) -> tuple[Tensor, Tensor]:
    dims = ParallelDims(tp=2)
    worker = load(group, path, ActorCritic, dims, optimizer=OptimizerOptions(learning_rate=1e-2))
    first = [worker.update(make_batch(dims, 0), joint_loss)["loss"] for _ in range(5)]
    assert first[-1] < first[0] - 0.1
    state = worker.engine.module.state_dict()
    return state["score.weight"], state["score.bias"]


@pytest.mark.slow
def test_five_sequence_parallel_steps_keep_the_value_heads_copies_equal(
    ranks: RankPool, models: dict[str, Path]
) -> None:
    one, other = ranks.run(five_steps, models["tied"], world=2)
    assert all(map(torch.equal, one, other))
    stored = load_file(models["tied"] / "model.safetensors")
    assert not torch.equal(one[0], stored["score.weight"])


def save(
    group: ProcessGroup, path: Path, out: Path, backend: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The tensors and the estimates of what was saved after a step, and what an inference engine is given."""
    dims = ParallelDims(tp=2) if backend == "parallel" else ParallelDims(cp=2)
    options = {"backend": backend, "optimizer": OptimizerOptions(learning_rate=3e-3)}
    worker = load(group, path, ActorCritic, dims, **options)
    batch = make_batch(dims, 0)
    worker.update(batch, joint_loss)
    worker.save_pretrained(out)
    found = worker.predict(batch)
    assert torch.equal(worker.values(batch), found["values"])
    assert torch.equal(worker.log_probs(batch).entropy, found["entropy"])
    again = load(group, out, ActorCritic, dims, **options).predict(batch)
    assert all(torch.equal(value, found[name]) for name, value in again.items())
    tensors = {name: x.clone() for name, x in worker.stream_weights(value_head=True)}
    return tensors, found, [name for name, _ in worker.stream_weights()]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("tied", "parallel"),
        pytest.param("tied", "transformers", marks=pytest.mark.slow),
        *(pytest.param("untied", backend, marks=pytest.mark.slow) for backend in ("parallel", "transformers")),
    ],
)
def test_a_saved_checkpoint_is_read_again_and_by_transformers_as_either(
    name: str, backend: str, ranks: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    tensors, estimates, streamed = ranks.run(save, models[name], tmp_path / "saved", backend, world=2)[0]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys() == load_file(models[name] / "model.safetensors").keys()
    assert all(torch.equal(saved[key], tensor) for key, tensor in tensors.items())
    assert set(streamed) == tensors.keys() - {"score.weight", "score.bias"}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["id2label"] == {"0": "LABEL_0"}

    actor, of_actor = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    critic, of_critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not of_actor["missing_keys"]
    assert not of_critic["missing_keys"]
    batch = make_batch(ParallelDims(), 0).with_fields(**estimates)
    for number, tokens in enumerate(batch.split()):
        part = batch.select([number])
        with torch.no_grad():
            chosen = actor(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            values = critic(tokens[None]).logits[0, :-1, 0]
        torch.testing.assert_close(part["log_probs"][1:], chosen, rtol=0, atol=1e-5)
        torch.testing.assert_close(part["values"][1:], values, rtol=0, atol=1e-5)
    # An actor and a critic each read their own head of it.
    again = Actor.from_pretrained(tmp_path / "saved").log_probs(batch)
    torch.testing.assert_close(again.log_probs, estimates["log_probs"], rtol=0, atol=1e-5)
    values = Critic.from_pretrained(tmp_path / "saved").values(batch)
    torch.testing.assert_close(values, estimates["values"], rtol=0, atol=1e-5)


def test_a_causal_language_model_gets_a_value_head_of_zeros(models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models["untied"], tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("score.")}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    worker, batch = ActorCritic.from_pretrained(folder), make_batch(ParallelDims(), 0)
    found = worker.predict(batch)
    assert not found["values"].any()
    assert not worker.rewards(batch).any()
    actor = Actor.from_pretrained(folder)
    assert torch.equal(found["log_probs"], actor.log_probs(batch).log_probs)
    options: dict[str, Any] = {"max_new_tokens": 5, "n": 2, "seed": 4}
    drawn, expected = (model.generate([[1, 5, 7], [3]], **options) for model in (worker, actor))
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn["log_probs"], expected["log_probs"])


def begin_run(group: ProcessGroup, path: Path, dims: ParallelDims, out: Path) -> list[float]:
    worker = load(group, path, ActorCritic, dims, optimizer=OptimizerOptions(learning_rate=3e-3))
    batch = make_batch(dims, worker.grid.rank("dp"))
    worker.update(batch, joint_loss)
    worker.save_training(out)
    worker.offload()
    worker.onload()
    return [worker.update(batch, joint_loss)["loss"] for _ in range(2)]


def go_on(group: ProcessGroup, path: Path, dims: ParallelDims, out: Path) -> list[float]:
    worker = load(group, path, ActorCritic, dims, optimizer=OptimizerOptions(learning_rate=3e-3))
    worker.load_training(out)
    batch = make_batch(dims, worker.grid.rank("dp"))
    return [worker.update(batch, joint_loss)["loss"] for _ in range(2)]


@pytest.mark.parametrize(
    "dims", [ParallelDims(pp=2), pytest.param(ParallelDims(dp=2), marks=pytest.mark.slow)], ids=str
)
def test_a_run_goes_on_on_another_grid(
    ranks: RankPool, models: dict[str, Path], tmp_path: Path, dims: ParallelDims
) -> None:
    out = tmp_path / "run"
    expected, _ = ranks.run(begin_run, models["tied"], ParallelDims(tp=2), out, world=2)
    for found in ranks.run(go_on, models["tied"], dims, out, world=2):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_backend_without_the_role_refuses_it(models: dict[str, Path]) -> None:
    message = (
        "backend='megatron' does not offer the role 'causal_lm_with_value'.*use backend='parallel' or backend='trans"
    )
    with pytest.raises(ValueError, match=message):
        ActorCritic.from_pretrained(models["tied"], backend="megatron")


def route(group: ProcessGroup, path: Path) -> None:
    """Routing recorded by one forward pass is replayed by another, values included."""
    worker = load(group, path, ActorCritic, ParallelDims(tp=2, ep=2))
    batch = make_batch(ParallelDims(), 0)
    found = worker.predict(batch, record_routing=True)
    again = worker.predict(batch.with_fields(routing=found["routing"]))
    assert all(torch.equal(value, found[name]) for name, value in again.items())
    shuffled = worker.predict(batch.with_fields(routing=(found["routing"] + 1) % 4))
    assert not torch.equal(shuffled["values"], found["values"])


@pytest.mark.slow
def test_routing_is_recorded_and_replayed_for_both_heads(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(route, models["moe"], world=2, timeout=60)


class VocabularyProducts(TorchDispatchMode):
    """Counts the GEMMs with an operand or a result of the vocabulary's size, and the calls of the head's operator."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        multiplies = func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "matmul", "linear")
        of_head = func.overloadpacket == torch.ops.parallel_layers.log_probs
        self.count += of_head or (multiplies and any(self.size in x.shape for x in tensors))
        return result


def test_values_and_states_run_no_product_of_the_vocabulary(models: dict[str, Path]) -> None:
    joint, critic, actor = (kind.from_pretrained(models["tied"], device="cpu") for kind in (ActorCritic, Critic, Actor))
    batch = make_batch(ParallelDims(), 0)
    values = joint.predict(batch)["values"]
    calls: dict[str, tuple[Any, int]] = {
        "log_probs": (lambda: joint.log_probs(batch), 1),
        "values": (lambda: torch.testing.assert_close(joint.values(batch), values, rtol=0, atol=0), 0),
        "rewards": (lambda: joint.rewards(batch), 0),
        "a critic's values": (lambda: critic.values(batch), 0),
        "states": (lambda: actor.states(batch), 0),
    }
    for name, (call, least) in calls.items():
        with VocabularyProducts(VOCAB) as products:
            call()
        assert (products.count >= least) if least else products.count == 0, f"{name}: {products.count} products"
