"""Pipelines and other grids at work: what stages hold, what they refuse, and that they learn and generate alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.data import pad_to
from parallel_layers.testing import RankPool
from parallel_models import MicroBatch, PipelineOptions
from parallel_models.training import why_no_zero_bubble
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

VOCAB = 61
NO_ZERO_BUBBLE = pytest.mark.skipif(why_no_zero_bubble() is not None, reason=str(why_no_zero_bubble()))


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Path]) -> dict[str, Path]:
    return {
        "tied": tiny("llama", num_hidden_layers=4, tie_word_embeddings=True),
        "untied": tiny("llama", num_hidden_layers=4),
        "bf16": tiny("llama", num_hidden_layers=4, hidden_size=16, intermediate_size=24, dtype=torch.bfloat16),
        "moe": tiny("mixture"),
        "handing over": tiny("gemma4-e2b"),
    }


def load(group: ProcessGroup, path: Path, dims: ParallelDims, kind: Any = Actor, **options: Any) -> Any:
    mesh = mesh_of(dims)
    return kind.from_pretrained(path, dims=dims, mesh=mesh, device="cpu", max_tokens_per_micro_batch=12, **options)


def make_batch(dims: ParallelDims, dp_rank: int) -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(VOCAB, (length,), generator=generator) for length in (12, 1, 5, 7, 3, 4, 9, 2)]
    return Batch.from_sequences(rows[dp_rank :: dims.dp])


def push_up(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs + 0.01 * inputs.entropy)


def train(
    group: ProcessGroup, path: Path, dims: ParallelDims, steps: int, options: dict[str, Any]
) -> tuple[list[float], Tensor | None]:
    """The losses of some steps, and the embedding (or its copy in the head) where this rank has one."""
    actor = load(group, path, dims, optimizer=OptimizerOptions(learning_rate=3e-3), **options)
    batch = make_batch(dims, actor.grid.rank("dp"))
    losses = [actor.update(batch, push_up)["loss"] for _ in range(steps)]
    state = actor.engine.module.state_dict()
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in state]
    return losses, state[names[0]] if names else None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="1f1b"),
        pytest.param(
            {"pipeline": PipelineOptions("zero-bubble")}, id="zero-bubble", marks=[NO_ZERO_BUBBLE, pytest.mark.slow]
        ),
    ],
)
def test_tied_embeddings_of_two_stages_stay_equal(
    ranks: RankPool, models: dict[str, Path], options: dict[str, Any]
) -> None:
    (first, _), (last, _) = (results := ranks.run(train, models["tied"], ParallelDims(pp=2), 5, options, world=2))
    ((one, _),) = ranks.run(train, models["tied"], ParallelDims(), 5, {}, world=1)
    assert torch.equal(results[0][1], results[1][1])
    assert first == last
    assert first == pytest.approx(one, abs=1e-4)
    assert one[-1] < one[0] - 0.1


def zero_bubble_on(group: ProcessGroup, path: Path, version: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        try:
            load(group, path, ParallelDims(pp=2), pipeline=PipelineOptions("zero-bubble"))
        except ValueError as error:
            return str(error)
    return "loaded"


def test_an_old_torch_refuses_the_zero_bubble_schedule(ranks: RankPool, models: dict[str, Path]) -> None:
    for version in ("2.11.0+cu130", "2.12.1"):
        expected = f"schedule='zero-bubble' needs torch 2.13 or newer, not {version}; use '1f1b'"
        assert ranks.run(zero_bubble_on, models["tied"], version, world=2) == [expected] * 2
    assert ranks.run(zero_bubble_on, models["tied"], "2.13.0", world=2) == ["loaded"] * 2


def schedules_run(group: ProcessGroup, path: Path, options: PipelineOptions) -> list[str]:
    """Names of torch's schedules that an update and a scoring have run, one after the other."""
    actor = load(group, path, ParallelDims(pp=2), pipeline=options)
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (
            schedules.Schedule1F1B,
            schedules.ScheduleInterleaved1F1B,
            schedules.ScheduleInterleavedZeroBubble,
        ):

            def step(self: Any, *args: Any, inner: Any = kind.step, **named: Any) -> Any:
                ran.append(type(self).__name__)
                return inner(self, *args, **named)

            patch.setattr(kind, "step", step)
        actor.update(make_batch(ParallelDims(), 0), push_up)
        actor.log_probs(make_batch(ParallelDims(), 0))
    return ran


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "expected"),
    [
        ("1f1b", 1, "Schedule1F1B"),
        ("1f1b", 2, "ScheduleInterleaved1F1B"),
        pytest.param("zero-bubble", 1, "ScheduleInterleavedZeroBubble", marks=NO_ZERO_BUBBLE),
        pytest.param("zero-bubble", 2, "ScheduleInterleavedZeroBubble", marks=NO_ZERO_BUBBLE),
    ],
)
def test_the_schedule_that_runs_is_the_one_asked_for(
    ranks: RankPool, models: dict[str, Path], schedule: Any, virtual_stages: int, expected: str
) -> None:
    """All schedules give the same numbers, so that numbers do not tell which one ran."""
    options = PipelineOptions(schedule, virtual_stages=virtual_stages)
    assert ranks.run(schedules_run, models["tied"], options, world=2, timeout=60) == [[expected] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dims", "options"),
    [
        ("tied", ParallelDims(pp=2, dp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
        ("moe", ParallelDims(dp=2, tp=2, ep=2), {}),
    ],
    ids=["llama", "qwen3_moe"],
)
def test_twenty_steps_on_two_grids_give_one_curve(
    ranks: RankPool, models: dict[str, Path], model: str, dims: ParallelDims, options: dict[str, Any]
) -> None:
    ((expected, _),) = ranks.run(train, models[model], ParallelDims(), 20, {}, world=1)
    for losses, _ in ranks.run(train, models[model], dims, 20, options, world=4, timeout=120):
        assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.2


@pytest.mark.slow
def test_twenty_bf16_steps_stay_within_bf16_of_fp32(ranks: RankPool, models: dict[str, Path]) -> None:
    def curve(dims: ParallelDims, dtype: torch.dtype) -> Tensor:
        results = ranks.run(train, models["bf16"], dims, 20, {"dtype": dtype}, world=dims.world_size, timeout=120)
        return torch.tensor(results[0][0])

    exact = curve(ParallelDims(), torch.float32)
    assert exact[-1] < exact[0] - 0.2
    for dims in (ParallelDims(), ParallelDims(dp=2, tp=2)):
        # Two units in bf16's last place.
        torch.testing.assert_close(curve(dims, torch.bfloat16), exact, rtol=2**-6, atol=0)


def score(group: ProcessGroup, path: Path, dims: ParallelDims, options: dict[str, Any]) -> Tensor:
    actor = load(group, path, dims, **options)
    return torch.cat(list(actor.log_probs(make_batch(dims, 0))))


@pytest.mark.slow
def test_thirty_layers_over_four_stages(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    path = tiny("llama", num_hidden_layers=30)
    (expected,) = ranks.run(score, path, ParallelDims(), {}, world=1)
    for pipeline in (PipelineOptions(), PipelineOptions(virtual_stages=2), PipelineOptions(split=[6, 9, 9, 6])):
        for scores in ranks.run(score, path, ParallelDims(pp=4), {"pipeline": pipeline}, world=4):
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def everything_in_fp64(group: ProcessGroup, path: Path, dims: ParallelDims) -> list[Tensor]:
    """Scores, the norm of an update's gradient, and the values after the update."""
    model = load(group, path, dims, ActorCritic, dtype=torch.float64, optimizer=OptimizerOptions(0.1))
    batch = make_batch(dims, 0)
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="An output .* was resized")
        scores = list(model.log_probs(batch))
    torch.set_warn_always(False)
    metrics = model.update(batch, lambda inputs: LossTerms(inputs.log_probs + inputs.values))
    return [*scores, torch.tensor(metrics["grad_norm"]), model.values(batch)]


def test_stages_in_fp64_compute_what_one_rank_does(ranks: RankPool, models: dict[str, Path]) -> None:
    (expected,) = ranks.run(everything_in_fp64, models["untied"], ParallelDims(), world=1)
    assert expected[-1].any()
    for results in ranks.run(everything_in_fp64, models["untied"], ParallelDims(pp=2), world=2):
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=2**-23, atol=2**-23)  # fp32's last place


def refuse(group: ProcessGroup, paths: dict[str, Path]) -> None:
    two = ParallelDims(pp=2)
    for path, dims, options, message in (
        (
            "moe",
            two,
            {"pipeline": PipelineOptions(virtual_stages=2)},
            r"num_hidden_layers=2 is fewer than the 4 chunks",
        ),
        ("tied", two, {"pipeline": PipelineOptions(split=[1, 2])}, r"sums to 3; the model has num_hidden_layers=4"),
        ("tied", ParallelDims(tp=2), {"pipeline": PipelineOptions(virtual_stages=2)}, r"needs pp > 1"),
        ("tied", ParallelDims(tp=2, ep=2), {}, r"ep=2 .* for a mixture of experts, which llama is not"),
    ):
        with pytest.raises(ValueError, match=message):
            load(group, paths[path], dims, **options)


def test_what_does_not_fit_is_refused_on_every_rank(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(refuse, models, world=2, timeout=60)
    for options, message in (
        ({"schedule": "gpipe"}, "schedule='gpipe' is unknown"),
        ({"virtual_stages": 0}, "virtual_stages=0 must be at least 1"),
        ({"split": [3, 0]}, r"split=\[3, 0\] must give every chunk"),
    ):
        with pytest.raises(ValueError, match=message):
            PipelineOptions(**options)


def fail_in_the_loss(group: ProcessGroup, path: Path) -> float:
    actor = load(group, path, ParallelDims(pp=2))
    batch = make_batch(ParallelDims(), 0)
    with pytest.raises(ValueError, match="the loss must be one number per token"):
        actor.update(batch, lambda inputs: LossTerms(inputs.log_probs.sum()))
    return actor.update(batch, push_up)["loss"]


def test_an_error_of_the_loss_reaches_every_stage(ranks: RankPool, models: dict[str, Path]) -> None:
    first, last = ranks.run(fail_in_the_loss, models["tied"], world=2, timeout=60)
    assert first == last


def push_down(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.values.square())


def update_strictly(group: ProcessGroup, path: Path) -> None:
    for kind, loss, dims, options in (
        (Actor, push_up, ParallelDims(cp=2), {}),
        (Critic, push_down, ParallelDims(cp=2), {}),
        (Critic, push_down, ParallelDims(dp=2), {"tp_invariant": True}),
    ):
        worker = load(group, path, dims, kind, optimizer=OptimizerOptions(), **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            worker.update(make_batch(ParallelDims(), 0), loss)


def test_an_update_over_ranks_that_share_parameters_warns_of_nothing(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks.run(update_strictly, models["tied"], world=2, timeout=60)


def generate(group: ProcessGroup, path: Path, dims: ParallelDims, options: dict[str, Any]) -> Batch:
    actor = load(group, path, dims, **options)
    batch = actor.generate([[1, 5, 7], [3]], max_new_tokens=6, n=2, temperature=0.9, seed=2)
    return batch.with_fields(computed=actor.log_probs(batch, temperature=0.9).log_probs)


GENERATING = [
    ("tied", ParallelDims(pp=2, tp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    ("tied", ParallelDims(cp=2), {"context_parallel": "ring"}),
    ("moe", ParallelDims(pp=2, tp=2, ep=2), {}),
    ("handing over", ParallelDims(pp=2, tp=2), {}),
    ("handing over", ParallelDims(pp=2, cp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    ("handing over", ParallelDims(pp=4), {}),
]


@pytest.mark.slow
def test_all_grids_generate_what_one_rank_does(ranks: RankPool, models: dict[str, Path]) -> None:
    names = dict.fromkeys(name for name, _, _ in GENERATING)
    expected = {name: ranks.run(generate, models[name], ParallelDims(), {}, world=1)[0] for name in names}
    for name, dims, options in GENERATING:
        for batch in ranks.run(generate, models[name], dims, options, world=dims.world_size, timeout=120):
            assert torch.equal(batch.tokens, expected[name].tokens), dims
            drawn = torch.where(batch.mask, batch["computed"], 0)
            torch.testing.assert_close(batch["log_probs"], drawn, rtol=0, atol=1e-5)


def generate_unevenly(group: ProcessGroup, path: Path) -> list[int]:
    """Ranks that share experts, the first without a prompt, the second with more to draw."""
    dims = ParallelDims(dp=2, ep=2)
    actor = load(group, path, dims)
    rank = group.rank()
    batch = actor.generate([[4, 4]] * rank, max_new_tokens=2 + 3 * rank, stop_ids=[])
    computed = actor.log_probs(batch).log_probs
    torch.testing.assert_close(batch["log_probs"], torch.where(batch.mask, computed, 0), rtol=0, atol=1e-5)
    return [len(response) for response in batch.responses()]


def test_ranks_that_share_experts_generate_together(ranks: RankPool, models: dict[str, Path]) -> None:
    assert ranks.run(generate_unevenly, models["moe"], world=2, timeout=60) == [[], [5]]


def critic_steps(group: ProcessGroup, path: Path, dims: ParallelDims) -> list[dict[str, float]]:
    """Loss and gradient norm of three steps of a critic whose head is new."""
    critic = load(group, path, dims, Critic, optimizer=OptimizerOptions(learning_rate=1e-2))
    batch = make_batch(dims, critic.grid.rank("dp"))
    steps = [critic.update(batch, lambda inputs: LossTerms((inputs.values - 1).square())) for _ in range(3)]
    return [{name: metrics[name] for name in ("loss", "grad_norm")} for metrics in steps]


def two_grids(group: ProcessGroup, path: Path) -> tuple[list[dict[str, float]], Tensor]:
    """An actor and a critic of other dims on the same ranks."""
    actor_dims = ParallelDims(pp=2, tp=2)
    actor = load(group, path, actor_dims)
    steps = critic_steps(group, path, ParallelDims(dp=2, cp=2))
    return steps, actor.log_probs(make_batch(actor_dims, 0)).log_probs


@pytest.mark.slow
def test_two_models_of_different_dims_in_one_job(ranks: RankPool, models: dict[str, Path]) -> None:
    (expected,) = ranks.run(score, models["tied"], ParallelDims(), {}, world=1)
    (alone,) = ranks.run(critic_steps, models["tied"], ParallelDims(), world=1)
    assert alone[2]["loss"] < alone[1]["loss"] < 1
    for steps, log_probs in ranks.run(two_grids, models["tied"], world=4, timeout=60):
        assert torch.tensor(steps[0]["loss"]) == 1  # in fp32: a new value head says 0 everywhere
        for ours, its in zip(steps, alone, strict=True):
            assert ours == pytest.approx(its, rel=1e-5, abs=1e-5)
        torch.testing.assert_close(log_probs, expected[: len(log_probs)], rtol=0, atol=1e-5)


def bf16_gradients(
    group: ProcessGroup, path: Path, dims: ParallelDims, together: bool, schedule: Any = "1f1b"
) -> dict[str, list[Tensor]]:
    """By parameter of this rank, the gradient of one call over many micro-batches, or of each of them alone."""
    actor = load(group, path, dims, dtype=torch.bfloat16, pipeline=PipelineOptions(schedule))
    actor.engine.build_optimizer(OptimizerOptions())
    generator = torch.Generator().manual_seed(5)
    packed = [
        MicroBatch(PackedSequence.from_sequences([torch.randint(VOCAB, (9,), generator=generator)])) for _ in range(32)
    ]
    gradients: dict[str, list[Tensor]] = {}
    for batches in [packed] if together else [[one] for one in packed]:
        actor.engine.drop_gradients()
        actor.engine.forward_backward(batches, lambda _, outputs: outputs[0].sum())
        for name, parameter in actor.engine.module.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients.setdefault(name, []).append(whole.float())
    return gradients


@pytest.fixture(scope="module")
def of_each_micro_batch(ranks: RankPool, models: dict[str, Path]) -> dict[str, list[Tensor]]:
    """By parameter, the gradient of each micro-batch alone, on one rank."""
    (alone,) = ranks.run(bf16_gradients, models["untied"], ParallelDims(), False, world=1)
    return alone


def is_sum(gradient: Tensor, parts: Tensor) -> bool:
    """Say whether a gradient is the sum of parts `[M, ...]` up to one rounding of the sum and of each part to bf16."""
    exact, scale = parts.sum(0), parts.norm(dim=0)
    # Half a unit of bf16 is 2^-9; for the parts, five standard deviations.
    return bool(((gradient.double() - exact).abs() <= 2**-9 * exact.abs() + 3 * 2**-9 * scale).all())


@pytest.mark.parametrize(
    ("dims", "schedule"),
    [
        pytest.param(ParallelDims(dp=2), "1f1b", marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2, dp=2), "1f1b", marks=pytest.mark.slow),
        (ParallelDims(pp=2), "zero-bubble"),
        pytest.param(ParallelDims(pp=2, dp=2), "zero-bubble", marks=pytest.mark.slow),
    ],
    ids=["dp2", "pp2-dp2", "pp2-zero-bubble", "pp2-dp2-zero-bubble"],
)
def test_bf16_gradients_add_up_in_fp32(
    ranks: RankPool,
    models: dict[str, Path],
    of_each_micro_batch: dict[str, list[Tensor]],
    dims: ParallelDims,
    schedule: Any,
) -> None:
    alone = of_each_micro_batch
    ours: dict[str, list[Tensor]] = {}
    for rank in ranks.run(bf16_gradients, models["untied"], dims, True, schedule, world=dims.world_size):
        ours |= rank
    assert ours.keys() == alone.keys()
    for name, parts in alone.items():
        # Data-parallel ranks have the same micro-batches. FSDP2 rounds each part to bf16; in torch 2.15 it keeps fp32.
        whole = torch.stack(parts)
        tables = [whole.bfloat16(), whole] if dims.dp > 1 else [whole]
        assert any(is_sum(ours[name][0], dims.dp * table.double()) for table in tables), name


def sharded_parameters(group: ProcessGroup, path: Path, dims: ParallelDims) -> dict[bool, bool]:
    """Whether FSDP2 divides all experts (True), and all other parameters (False)."""
    parameters = load(group, path, dims, dtype=torch.bfloat16).engine.module.named_parameters()
    divided: dict[bool, set[bool]] = {True: set(), False: set()}
    for name, parameter in parameters:
        divided[".experts." in name].add(isinstance(parameter, DTensor))
    return {experts: found.pop() for experts, found in divided.items() if len(found) == 1}


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp2_leaves_experts_alone_that_one_rank_has(ranks: RankPool, models: dict[str, Path], dp: int) -> None:
    found = ranks.run(sharded_parameters, models["moe"], ParallelDims(dp=dp, ep=2), world=dp)
    assert found == [{True: dp == 4, False: True}] * dp


def test_padding_is_one_last_segment() -> None:
    packed = PackedSequence.from_sequences([torch.tensor([5, 6, 7]), torch.tensor([8])], multiple_of=3)
    padded = pad_to(packed, 9)
    assert padded.input_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert padded.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert (padded.padding, padded.max_seqlen, padded.num_sequences) == (5, 5, 2)
    assert pad_to(packed, packed.num_tokens) is packed
