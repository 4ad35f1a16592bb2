"""An update that fails changes nothing: the next one is that of a worker that has never failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

ROWS = [[1, 4, 5, 6], [1, 7, 8, 9], [2, 3, 4, 5]]


@pytest.fixture(scope="session")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def load(group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, **options: Any) -> Actor:
    mesh = mesh_of(dims)
    optimizer = OptimizerOptions(learning_rate=0.1, eps=1.0)
    # A sequence a micro-batch.
    given: dict[str, Any] = {"device": "cpu", "optimizer": optimizer, "max_tokens_per_micro_batch": 4, **options}
    return Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh, **given)


def push_up(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def failing(number: int, error: BaseException) -> Callable[[Tensor, Tensor, Batch], LossTerms]:
    """A loss with large gradients, until its micro-batch of this number."""
    calls = 0

    def loss(inputs: LossInputs) -> LossTerms:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return LossTerms(-100 * inputs.log_probs)

    return loss


def fail_and_go_on(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, dtype: torch.dtype
) -> list[tuple[dict[str, float], Tensor]]:
    """The next update, and what the actor then says, after each failure, and after none."""
    batch = Batch.from_sequences(ROWS)
    errors = [None, ZeroDivisionError("oops"), KeyboardInterrupt()]
    if dims.pp > 1:  # nobody would send the other stages what they wait for after an interrupt
        errors.pop()
    found = []
    with cpu_stand_in() if backend == "megatron" else nullcontext():
        for error in errors:
            actor = load(group, path, backend, dims, dtype=dtype)
            if error is not None:
                # Under a pipeline the other stages are told of the last one's error.
                with pytest.raises(type(error) if dims.pp == 1 else (type(error), RuntimeError)):
                    actor.update(batch, failing(2, error))
            metrics = actor.update(batch, push_up)
            found.append((metrics, actor.log_probs(batch).log_probs))
    return found


@pytest.mark.parametrize(
    ("backend", "dims", "dtype"),
    [
        pytest.param("parallel", ParallelDims(), torch.float32, marks=pytest.mark.slow),
        pytest.param("parallel", ParallelDims(dp=2), torch.float32, marks=pytest.mark.slow),
        ("parallel", ParallelDims(dp=2), torch.bfloat16),
        pytest.param("parallel", ParallelDims(pp=2), torch.float32, marks=pytest.mark.slow),
        ("transformers", ParallelDims(), torch.float32),
        pytest.param("transformers", ParallelDims(dp=2), torch.float32, marks=pytest.mark.slow),
        ("megatron", ParallelDims(), torch.float32),
    ],
    ids=str,
)
def test_an_update_after_a_failed_one_is_as_if_nothing_had_happened(
    ranks: RankPool, model: Path, backend: str, dims: ParallelDims, dtype: torch.dtype
) -> None:
    for found in ranks.run(fail_and_go_on, model, backend, dims, dtype, world=dims.world_size, timeout=60):
        (metrics, log_probs), *others = found
        for after in others:
            assert after[0] == metrics
            assert torch.equal(after[1], log_probs)


def interrupt_the_backward(group: ProcessGroup, path: Path) -> list[float]:
    """The norm of the next gradient, after a Ctrl-C in the middle of a backward and after none."""
    batch = Batch.from_sequences(ROWS)
    actor, other = (load(group, path, "parallel", ParallelDims(dp=2)) for _ in range(2))

    def interrupt(gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt

    def loss(inputs: LossInputs) -> LossTerms:
        if int(inputs.batch.tokens[0]) == 2:
            inputs.log_probs.register_hook(interrupt)
        return LossTerms(-100 * inputs.log_probs)

    with pytest.raises(KeyboardInterrupt):
        actor.update(batch, loss)
    assert all(parameter.grad is None for parameter in actor.engine.module.parameters())
    return [each.update(batch, push_up)["grad_norm"] for each in (actor, other)]


def test_a_backward_that_is_interrupted_leaves_nothing_either(ranks: RankPool, model: Path) -> None:
    for after, clean in ranks.run(interrupt_the_backward, model, world=2, timeout=60):
        assert after == clean


def fail_on_one_rank(group: ProcessGroup, path: Path, backend: str) -> tuple[list[str], float]:
    """Return what is said of a loss, and of tokens, of which rank 1 alone has something to complain; then a step."""
    actor = load(group, path, backend, ParallelDims(dp=2))
    last = group.rank() == 1
    batch, wrong = Batch.from_sequences(ROWS), Batch.from_sequences([[1, 61 if last else 2]])

    def other_metrics(inputs: LossInputs) -> LossTerms:
        return LossTerms(-inputs.log_probs, {"mine" if last else "yours": 1.0})

    def bare(inputs: LossInputs) -> Any:
        return (-inputs.log_probs,) if last else LossTerms(-inputs.log_probs)

    said = []
    for call in (
        lambda: actor.update(batch, failing(2, ZeroDivisionError("oops")) if last else push_up),
        lambda: actor.update(batch, bare),
        lambda: actor.update(batch, other_metrics),
        lambda: actor.log_probs(wrong),
        lambda: actor.update(wrong, push_up),
    ):
        with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)) as error:
            call()
        said.append(str(error.value))
    return said, actor.update(batch, push_up)["grad_norm"]


@pytest.mark.parametrize("backend", ["parallel", pytest.param("transformers", marks=pytest.mark.slow)])
def test_what_fails_on_one_data_parallel_rank_is_raised_on_all(ranks: RankPool, model: Path, backend: str) -> None:
    (first, norm), (second, same) = ranks.run(fail_on_one_rank, model, backend, world=2, timeout=60)
    assert first[0] == "rank 1: ZeroDivisionError: oops"
    assert second[0] == "oops"
    assert first[1] == f"rank 1: {second[1]}"
    assert second[1].startswith("the loss must return one number per token, a tensor or ")
    assert first[2] == second[2]
    assert first[2].startswith(
        "the metrics differ between ranks: ['loss', 'yours'] on rank 0, ['loss', 'mine'] on rank 1"
    )
    for number in (3, 4):
        assert first[number] == f"rank 1: {second[number]}"
        assert second[number].startswith("token id 61 at index [1] is outside the vocabulary 0..60")
    assert norm == same


@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0), torch.full((4,), 2.0)])
def test_a_metric_is_one_number_or_one_per_token(model: Path, value: Any) -> None:
    actor = Actor.from_pretrained(model, device="cpu", max_tokens_per_micro_batch=4)
    found = actor.update(Batch.from_sequences(ROWS), lambda inputs: LossTerms(-inputs.log_probs, {"two": value}))
    assert found["two"] == pytest.approx(2)


def test_a_bare_tensor_is_a_loss_and_sums_over_tokens_leave_metrics_means(model: Path) -> None:
    batch = Batch.from_sequences(ROWS, response_lengths=[1, 2, 2])
    actor = Actor.from_pretrained(model, device="cpu", max_tokens_per_micro_batch=4)
    bare = actor.forward_backward(batch, lambda inputs: -inputs.log_probs)
    mean = actor.forward_backward(batch, lambda inputs: LossTerms(-inputs.log_probs, {"two": 2.0}))
    assert bare == {"loss": mean["loss"]}
    total = actor.forward_backward(
        batch, lambda inputs: LossTerms(-inputs.log_probs, {"two": 2.0}), aggregation="sequence-sum"
    )
    assert total == pytest.approx({"loss": mean["loss"] * 5 / 3, "two": 2.0})


def test_mistakes_of_a_loss_say_what_to_return(model: Path) -> None:
    actor = Actor.from_pretrained(model, device="cpu", max_tokens_per_micro_batch=4)

    def sometimes(inputs: LossInputs) -> LossTerms:
        return LossTerms(-inputs.log_probs, {"odd": 1.0} if int(inputs.batch.tokens[0]) == 2 else {})

    for loss, message in (
        (lambda inputs: (-inputs.log_probs, {}), r"a tensor or rl_models.*LossTerms\(.*\), got tuple"),
        (
            lambda inputs: LossTerms(-inputs.log_probs, {"odd": torch.ones(4, 1)}),
            r"the metric 'odd' must be one number, or one per token, \[4\], got torch.Size\(\[4, 1\]\)",
        ),
        (
            lambda inputs: LossTerms(-inputs.log_probs, {"loss": 1.0, "grad_norm": 1.0}),
            r"the loss reports \['grad_norm', 'loss'\], which update returns itself; rename",
        ),
        (sometimes, r"reports \['loss', 'odd'\] of one micro-batch and \['loss'\] of another|\['loss'\] of one"),
    ):
        with pytest.raises(ValueError, match=message):
            actor.update(Batch.from_sequences(ROWS), loss)  # type: ignore[arg-type]


def without_a_gradient(group: ProcessGroup, path: Path, backend: str) -> tuple[dict[str, float], dict[str, float], str]:
    """Return the results of updates whose loss is a constant, or has a gradient of zero, on rank 1 without tokens,
    and the error of a loss that is a constant elsewhere on rank 1."""
    dims, last = ParallelDims(dp=2), group.rank() == 1
    batch = Batch.from_sequences(ROWS, response_lengths=[0 if last else 2] * 3)
    actor, other = (load(group, path, backend, dims) for _ in range(2))

    def constant(inputs: LossInputs) -> LossTerms:
        return (
            LossTerms(-inputs.log_probs)
            if bool(inputs.batch.mask.any())
            else LossTerms(torch.zeros(inputs.batch.num_tokens))
        )

    found = actor.update(batch, constant), other.update(batch, push_up)
    detached = (lambda inputs: LossTerms(-inputs.log_probs.detach())) if last else push_up
    with pytest.raises(ValueError, match="the loss of 3 tokens in the mask is a constant, without a gradient") as error:
        actor.update(Batch.from_sequences(ROWS), detached)
    return *found, str(error.value)


@pytest.mark.parametrize("backend", ["parallel", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_loss_may_be_a_constant_where_nothing_is_to_be_learned(ranks: RankPool, model: Path, backend: str) -> None:
    (first, clean, told), (second, same, said) = ranks.run(without_a_gradient, model, backend, world=2, timeout=60)
    assert first == second == clean == same
    assert told == f"rank 1: {said}"


def update_unevenly(group: ProcessGroup, path: Path, backend: str) -> tuple[dict[str, float], list[int]]:
    """An update whose rank 1 has one sequence, and whose rank 0 has three and one of them has no response."""
    actor = load(group, path, backend, ParallelDims(dp=2))
    batch = Batch.from_sequences(ROWS, response_lengths=[2, 0, 2]).select([[0, 1, 2], [0]][group.rank()])
    seen = []

    def loss(inputs: LossInputs) -> LossTerms:
        seen.append(int(inputs.batch.mask.sum()))
        return LossTerms(-inputs.log_probs, {"largest": inputs.log_probs[inputs.batch.mask].max().detach()})

    return actor.update(batch, loss), seen


@pytest.mark.parametrize("backend", ["parallel", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_loss_sees_no_part_without_tokens_to_learn_from(ranks: RankPool, model: Path, backend: str) -> None:
    (first, seen), (second, other) = ranks.run(update_unevenly, model, backend, world=2, timeout=60)
    assert first == second
    assert first["largest"] < 0
    assert (seen, other) == ([2, 2], [2])


def test_a_loss_reads_outputs_and_fields_by_name() -> None:
    batch = Batch.from_sequences([[1, 2]]).with_fields(advantages=torch.ones(2))
    inputs = LossInputs(batch, {"values": torch.tensor([0.0, 3.0])})
    assert inputs["advantages"] is batch["advantages"]
    assert inputs.values.tolist() == [0, 3]
    with pytest.raises(ValueError, match="the model has no log_probs, only values; an ActorCritic has all outputs"):
        _ = inputs.log_probs
    with pytest.raises(ValueError, match="the batch has no field 'returns'"):
        _ = inputs["returns"]
