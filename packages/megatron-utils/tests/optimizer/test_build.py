"""The optimizer on a model: torch's AdamW is the reference; overflow, parameter groups, data parallelism."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import tiny_config
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankPool
from parallel_layers.training import Schedule

HF = tiny_config("qwen2", num_hidden_layers=2)


def model_on(grid: Any, dtype: torch.dtype = torch.float32) -> list[torch.nn.Module]:
    from megatron_utils.gpt import build_gpt

    chunks = build_gpt(HF, grid, dtype=dtype)
    torch.manual_seed(3)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.normal_(0, 0.3)
    return chunks


def batch(seed: int, device: torch.device) -> PackedSequence:
    generator = torch.Generator().manual_seed(seed)
    return PackedSequence.from_sequences(
        [torch.randint(0, HF["vocab_size"], (n,), generator=generator).to(device) for n in (7, 3, 5)]
    )


def loss(output: Any, _: int) -> Tensor:
    return -output.log_probs.sum()


def adamw_on(group: ProcessGroup, distributed: bool) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import (
        Optimizer,
        OptimizerConfig,
        ParameterStates,
        gradient_buffers,
        wrap_data_parallel,
    )
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import device_of
    from parallel_layers.memory import HostOffload

    dp = group.size()
    # NCCL and CUDA kernels add in another order, and the optimizer may be Transformer Engine's.
    tolerance = 1e-5 if dist.get_backend(group) == "gloo" else 1e-4
    config = OptimizerConfig(
        lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, clip_grad=0.5, distributed=distributed
    )
    schedule = Schedule("linear", total_steps=10)
    with device_of(group) as device, megatron_grid(ParallelDims(dp=dp), ranks=range(dp)) as grid:
        chunks = model_on(grid)
        (reference,) = model_on(grid)
        named = dict(reference.named_parameters())
        exempt = [p for n, p in named.items() if n.endswith(".bias") or "norm" in n]
        decayed = [p for n, p in named.items() if not (n.endswith(".bias") or "norm" in n)]
        assert len(exempt) == 7
        assert len(decayed) == 10
        adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.2}, {"params": exempt, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.8, 0.9),
            eps=1e-6,
        )
        wrapped = wrap_data_parallel(chunks, grid, distributed=distributed)
        optimizer = Optimizer(wrapped, grid, config, schedule)
        host, states = HostOffload(), ParameterStates(optimizer)
        for step in range(4):
            # Between two steps everything may leave the device.
            host.offload([*chunks[0].parameters(), *states.tensors()], discard=gradient_buffers(wrapped))
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in chunks[0].parameters())
            host.onload()
            optimizer.zero_grad()
            mine = batch(10 * step + grid.groups.dp.rank(), device)
            run_schedule(wrapped, [mine], grid, labels=[next_token_labels(mine)], loss=loss)
            result = optimizer.step()
            adamw.zero_grad()
            for rank in range(dp):
                theirs = batch(10 * step + rank, device)
                (loss(reference(theirs, next_token_labels(theirs)), 0) / dp).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            for param_group in adamw.param_groups:
                param_group["lr"] = 1e-2 * (1 - step / 10)
            adamw.step()
            assert not result.skipped
            assert result.lr == pytest.approx(1e-2 * (1 - step / 10), rel=1e-12)
            assert result.grad_norm == pytest.approx(norm.item(), rel=tolerance)
            for name, parameter in chunks[0].named_parameters():
                torch.testing.assert_close(
                    parameter, named[name], rtol=tolerance, atol=0.1 * tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert optimizer.steps == 4


@pytest.mark.parametrize(("dp", "distributed"), [(1, False), (2, False), (2, True)])
def test_steps_equal_torch_adamw(ranks: RankPool, dp: int, distributed: bool) -> None:
    ranks.run(adamw_on, distributed, world=dp)


@pytest.mark.parametrize(
    ("dp", "distributed"),
    [pytest.param(dp, cut, marks=pytest.mark.gpu(dp)) for dp, cut in ((1, False), (2, False), (2, True))],
)
def test_steps_equal_torch_adamw_on_gpus(four_nccl_ranks: RankPool, dp: int, distributed: bool) -> None:
    four_nccl_ranks.run(adamw_on, distributed, world=dp)


def groups_on(group: ProcessGroup, patterns: tuple[str, ...]) -> list[str]:
    """The parameters without weight decay; every step's rate is the schedule's, floor and all."""
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.testing import device_of

    config = OptimizerConfig(lr=1e-2, weight_decay=0.2, no_weight_decay=patterns)
    schedule = Schedule("linear", warmup_steps=2, total_steps=6, min_ratio=0.1)
    with device_of(group), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        wrapped = wrap_data_parallel(model_on(grid), grid)
        optimizer = Optimizer(wrapped, grid, config, schedule)
        rates = []
        for _ in range(8):
            optimizer.zero_grad()
            rates.append(optimizer.step().lr)
        assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 7.75e-3, 5.5e-3, 3.25e-3, 1e-3, 1e-3], rel=1e-12)
        decay = {id(p): part["weight_decay"] for part in optimizer.inner.param_groups for p in part["params"]}
        named = dict(wrapped[0].module.named_parameters())
        assert {decay[id(parameter)] for parameter in named.values()} <= {0.0, 0.2}
        return [name for name, parameter in named.items() if decay[id(parameter)] == 0]


@pytest.mark.parametrize("patterns", [(), ("*.bias", "embedding.*"), ("*linear_fc?.weight",)])
def test_the_named_parameters_alone_are_exempt_from_weight_decay(ranks: RankPool, patterns: tuple[str, ...]) -> None:
    (exempt,) = ranks.run(groups_on, patterns, world=1)
    layers = [f"decoder.layers.{n}." for n in range(HF["num_hidden_layers"])]
    assert (
        sorted(exempt)
        == {
            (): [],
            ("*.bias", "embedding.*"): [
                *(f"{layer}self_attention.linear_qkv.bias" for layer in layers),
                "embedding.word_embeddings.weight",
            ],
            ("*linear_fc?.weight",): [f"{layer}mlp.linear_fc{n}.weight" for layer in layers for n in (1, 2)],
        }[patterns]
    )


def overflow_on(group: ProcessGroup) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.testing import device_of

    config = OptimizerConfig(lr=1e-2, precision="fp16", initial_loss_scale=64.0, hysteresis=1)
    with device_of(group), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        wrapped = wrap_data_parallel(model_on(grid, torch.float16), grid)
        optimizer = Optimizer(wrapped, grid, config, Schedule("linear", total_steps=10))
        parameters = list(wrapped[0].module.parameters())
        before = [parameter.clone() for parameter in parameters]
        assert optimizer.scale_loss(torch.ones(())).item() == 64.0
        for value, skipped in ((1.0, False), (torch.inf, True), (torch.nan, True), (1.0, False)):
            optimizer.zero_grad()
            parameters[3].main_grad.fill_(value)
            result = optimizer.step()
            assert result.skipped is skipped
            assert (result.grad_norm is None) is skipped
            changed = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
            assert changed is not skipped
            before = [parameter.clone() for parameter in parameters]
        assert optimizer.skipped == 2
        assert optimizer.steps == 2
        # halved twice
        assert optimizer.scale_loss(torch.ones(())).item() == 16.0


def test_an_overflow_is_a_counted_skipped_step(ranks: RankPool) -> None:
    ranks.run(overflow_on, world=1)


@pytest.mark.gpu
def test_an_overflow_is_a_counted_skipped_step_on_a_gpu(four_nccl_ranks: RankPool) -> None:
    four_nccl_ranks.run(overflow_on, world=1)


def overflow_of_an_expert_on(group: ProcessGroup) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.testing import device_of

    config = OptimizerConfig(precision="fp16", initial_loss_scale=64.0, hysteresis=1)
    with device_of(group), megatron_grid(ParallelDims(dp=2, ep=2), ranks=range(2)) as grid:
        (chunk,) = build_gpt(tiny_config("qwen3_moe"), grid, dtype=torch.float16)
        wrapped = wrap_data_parallel([chunk], grid)
        optimizer = Optimizer(wrapped, grid, config)
        assert len(optimizer.inner.chained_optimizers) == 2
        for rank, scale in ((1, 32.0), (0, 16.0)):
            optimizer.zero_grad()
            if group.rank() == rank:
                next(p for name, p in chunk.named_parameters() if "experts" in name).main_grad.fill_(torch.inf)
            assert optimizer.step().skipped
            # Dense parameters and experts have an optimizer each, and their losses one scale.
            assert [float(part.grad_scaler.scale) for part in optimizer.inner.chained_optimizers] == [scale] * 2
        assert optimizer.loss_scale_state == {"scale": 16.0, "growth_tracker": 0, "hysteresis_tracker": -1}
        before = {"scale": 8.0, "growth_tracker": 3, "hysteresis_tracker": 1}
        optimizer.loss_scale_state = before
        assert optimizer.loss_scale_state == before
        assert optimizer.scale_loss(torch.ones(())).item() == optimizer.loss_scale == 8.0


def test_experts_and_dense_parameters_have_one_loss_scale(ranks: RankPool) -> None:
    ranks.run(overflow_of_an_expert_on, world=2)


@pytest.mark.gpu(2)
def test_experts_and_dense_parameters_have_one_loss_scale_on_gpus(four_nccl_ranks: RankPool) -> None:
    four_nccl_ranks.run(overflow_of_an_expert_on, world=2)


def states_on(group: ProcessGroup, dtype: torch.dtype) -> None:
    from torch.distributed.tensor import DTensor

    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, ParameterStates, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import device_of

    precision = "fp32" if dtype == torch.float32 else "bf16"
    with device_of(group) as device, megatron_grid(ParallelDims(dp=2), ranks=range(2)) as grid:

        def begin(distributed: bool) -> tuple[list[Any], Optimizer, ParameterStates]:
            wrapped = wrap_data_parallel(model_on(grid, dtype), grid, distributed=distributed)
            config = OptimizerConfig(lr=1e-2, precision=precision, distributed=distributed)
            optimizer = Optimizer(wrapped, grid, config)
            return list(wrapped[0].module.parameters()), optimizer, ParameterStates(optimizer)

        def step(optimizer: Optimizer, seed: int) -> None:
            packed = batch(seed, device)
            optimizer.zero_grad()
            run_schedule(optimizer.chunks, [packed], grid, labels=[next_token_labels(packed)], loss=loss)
            optimizer.step()

        runs = [begin(distributed) for distributed in (True, False)]
        for parameters, optimizer, states in runs:
            assert states.state(parameters[0]) == {}
            step(optimizer, 0)
        # Each takes over the other's state, and a new one the first's.
        whole = [[states.state(parameter) for parameter in parameters] for parameters, _, states in runs]
        for mine, other in zip(*whole, strict=True):
            assert (
                mine.keys()
                == other.keys()
                == {"step", "exp_avg", "exp_avg_sq"} | (set() if dtype == torch.float32 else {"master"})
            )
            for name, value in mine.items():
                assert isinstance(value, DTensor) == (name != "step")
                value = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-8)
        runs += [begin(distributed) for distributed in (True, False)]
        for number, source in ((2, 1), (3, 0)):
            parameters, optimizer, states = runs[number]
            for parameter, weight, state in zip(parameters, runs[source][0], whole[source], strict=True):
                parameter.data.copy_(weight)
                states.load(parameter, state)
            assert list(states.tensors())
            # What was loaded is the optimizer's, whoever asks for it.
            for parameter, state in zip(parameters, whole[source], strict=True):
                assert ParameterStates(optimizer).state(parameter).keys() == state.keys()
        for _, optimizer, _ in runs:
            step(optimizer, 1)
        for parameters, _, _ in runs[1:]:
            for one, other in zip(runs[0][0], parameters, strict=True):
                # bf16 rounds the masters, which differ in the last bits of fp32.
                torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_states_of_parameters_come_out_and_go_in(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(states_on, dtype, world=2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_parameters_come_out_and_go_in_on_gpus(four_nccl_ranks: RankPool, dtype: torch.dtype) -> None:
    four_nccl_ranks.run(states_on, dtype, world=2)


def on_the_host_on(group: ProcessGroup) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule

    with megatron_grid(ParallelDims(), ranks=[0]) as grid:
        runs = []
        for fraction in (0.0, 1.0):
            chunks = model_on(grid)
            config = OptimizerConfig(lr=1e-2, cpu_offload_fraction=fraction)
            optimizer = Optimizer(wrap_data_parallel(chunks, grid), grid, config)
            for seed in range(3):
                packed = batch(seed, torch.device("cuda"))
                optimizer.zero_grad()
                run_schedule(optimizer.chunks, [packed], grid, labels=[next_token_labels(packed)], loss=loss)
                optimizer.step()
            runs.append((chunks[0], optimizer))
        moments = [entries["exp_avg"] for entries in runs[1][1].inner.optimizer.state.values()]
        assert moments
        assert all(moment.device.type == "cpu" for moment in moments)
        for one, other in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_an_optimizer_that_lives_on_the_host_steps_alike(four_nccl_ranks: RankPool) -> None:
    four_nccl_ranks.run(on_the_host_on, world=1)


def not_finite_on(group: ProcessGroup, dtype: torch.dtype) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.testing import device_of

    config = OptimizerConfig(lr=1e-2, precision="fp32" if dtype == torch.float32 else "bf16")
    with device_of(group), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        wrapped = wrap_data_parallel(model_on(grid, dtype), grid)
        optimizer = Optimizer(wrapped, grid, config)
        parameters = list(wrapped[0].module.parameters())
        before = [parameter.clone() for parameter in parameters]
        for value, skipped in ((torch.nan, True), (1.0, False)):
            optimizer.zero_grad()
            parameters[3].main_grad.fill_(value)
            result = optimizer.step(lr=0.5)
            assert result.skipped is skipped
            assert result.lr == 0.5
            # Of this step alone.
            assert optimizer.lr == 1e-2
            assert result.grad_norm is not None
            assert torch.tensor(result.grad_norm).isfinite() != skipped
            assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True)) is skipped
        assert (optimizer.skipped, optimizer.steps) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(not_finite_on, dtype, world=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_on_a_gpu(four_nccl_ranks: RankPool, dtype: torch.dtype) -> None:
    four_nccl_ranks.run(not_finite_on, dtype, world=1)


def mistakes_on(group: ProcessGroup) -> list[str]:
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.testing import cpu_stand_in

    messages = []
    with cpu_stand_in(), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        wrapped = wrap_data_parallel(model_on(grid, torch.bfloat16), grid)
        for config in (OptimizerConfig(distributed=True), OptimizerConfig(precision="fp16")):
            try:
                Optimizer(wrapped, grid, config)
            except ValueError as error:
                messages.append(str(error))
        for parameter in wrapped[0].parameters():
            parameter.requires_grad_(False)
        with pytest.raises(ValueError, match="is frozen") as frozen:
            Optimizer(wrap_data_parallel([wrapped[0].module], grid), grid, OptimizerConfig(precision="bf16"))
        messages.append(str(frozen.value))
    return messages


def test_mistakes_are_named(ranks: RankPool) -> None:
    distributed, precision, frozen = ranks.run(mistakes_on, world=1)[0]
    assert distributed.startswith(
        "OptimizerConfig.distributed=True, but the chunks were wrapped with distributed=False"
    )
    assert precision == "embedding.word_embeddings.weight is torch.bfloat16, but precision='fp16'"
    assert frozen == "every parameter of the model is frozen; leave requires_grad on for those to be trained"


def side_by_side_on(group: ProcessGroup, root: Path) -> list[float]:
    """The norms of three steps on rank 0, and on ranks 1 and 2 with the same samples."""
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import load_checkpoint, save_checkpoint
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    members = [0] if group.rank() == 0 else [1, 2]
    with cpu_stand_in(), megatron_grid(ParallelDims(dp=len(members)), ranks=members) as grid:
        wrapped = wrap_data_parallel(model_on(grid), grid, distributed=True)
        optimizer = Optimizer(wrapped, grid, OptimizerConfig(lr=1e-2, distributed=True))
        norms = []
        for seed in range(3):
            packed = batch(seed, torch.device("cpu"))
            optimizer.zero_grad()
            run_schedule(wrapped, [packed], grid, labels=[next_token_labels(packed)], loss=loss)
            norms.append(optimizer.step().grad_norm)
        if members != [0]:
            with pytest.raises(
                ValueError, match=r"save_checkpoint works on the first ranks .* 0 to 1, not on \[1, 2\]"
            ):
                save_checkpoint(root, 1, optimizer, grid)
            with pytest.raises(ValueError, match="load_checkpoint works on the first ranks"):
                load_checkpoint(root, optimizer, grid)
    return norms


def test_optimizers_step_side_by_side_on_any_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone, *both = ranks.run(side_by_side_on, tmp_path, world=3)
    assert alone[0] != alone[2]
    for norms in both:
        assert norms == pytest.approx(alone, rel=1e-5)
