"""AdamW with fp32 masters, against torch's own in fp32."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallel_layers.testing import RankPool
from parallel_layers.training import Schedule
from parallel_models.optimizers.interface import OptimizerOptions
from parallel_models.optimizers.master_weights import ShardOptimizer

OPTIONS = OptimizerOptions(learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=math.inf)
STEPS = 30


def rate(step: int) -> float:
    """As a schedule would give it: another one at each step, none of them that of `OPTIONS`."""
    return 2e-3 * (step + 1) / STEPS + 1e-5


def make(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(dtype)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (3,))]


def reference() -> list[Tensor]:
    """The parameters after `STEPS` steps of torch's AdamW, each at its `rate`, in fp32 from what bf16 can hold."""
    module = make(torch.bfloat16).float()
    groups = [{"params": [module.weight], "weight_decay": 0.1}, {"params": [module.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-3, (0.9, 0.95), 1e-8)
    for step in range(STEPS):
        for parameter, gradient in zip(module.parameters(), gradients(step), strict=True):
            parameter.grad = gradient.bfloat16().float()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_parameters_are_their_fp32_masters_rounded(dtype: torch.dtype) -> None:
    module = make(torch.bfloat16).to(dtype)
    optimizer = ShardOptimizer(module, OPTIONS)
    for step in range(STEPS):
        for parameter, gradient in zip(module.parameters(), gradients(step), strict=True):
            # Autograd would hand over bf16 as well, and add it up in fp32.
            parameter.grad = gradient.bfloat16().float()
        optimizer.step(rate(step))
    for parameter, expected in zip(module.parameters(), reference(), strict=True):
        torch.testing.assert_close(optimizer.state(parameter).get("master", parameter.detach()), expected)
        assert torch.equal(parameter.detach(), optimizer.state(parameter).get("master", parameter.detach()).to(dtype))


def test_one_call_steps_all_parameters_and_one_call_copies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).to(torch.bfloat16)
    optimizer = ShardOptimizer(module, OptimizerOptions(learning_rate=1e-3))
    calls: dict[str, list[int]] = {"_fused_adamw_": [], "_foreach_copy_": []}
    for name, found in calls.items():
        original = getattr(torch, name)

        def counted(
            first: list[Tensor], *others: Any, _original: Any = original, _found: Any = found, **options: Any
        ) -> Any:
            _found.append(len(first))
            return _original(first, *others, **options)

        monkeypatch.setattr(torch, name, counted)
    for parameter in module.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step(1e-3)
    assert calls == {"_fused_adamw_": [4], "_foreach_copy_": [4]}


def test_fp16_which_needs_a_loss_scale_is_refused() -> None:
    module = make(torch.float16)
    with pytest.raises(ValueError, match="a model in fp16 needs a loss scale, which only backend='megatron' has"):
        ShardOptimizer(module, OPTIONS)


def test_matrices_alone_are_decayed_and_no_biases_of_experts() -> None:
    module = nn.Module()
    for name, shape in (("weight", (2, 3)), ("experts", (4, 2, 3)), ("experts_bias", (4, 2)), ("bias", (2,))):
        setattr(module, name, nn.Parameter(torch.ones(shape)))
    optimizer = ShardOptimizer(module, OPTIONS)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    changed = [name for name, parameter in module.named_parameters() if not bool((parameter == 1).all())]
    assert changed == ["weight", "experts"]


def test_updates_below_the_precision_of_a_weight_add_up() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = ShardOptimizer(module, OptimizerOptions(learning_rate=1e-4, max_grad_norm=math.inf))
    for _ in range(100):
        module.weight.grad = torch.ones(1, 1)
        optimizer.step(1e-4)
    # bf16 keeps 8 bits: 1 - 1e-4 is 1 again, 1 - 1e-2 is not.
    assert module.weight.item() == pytest.approx(0.99, abs=2e-3)


def test_gradients_of_low_precision_parameters_add_up_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ShardOptimizer(module, OPTIONS)
    for size in (256.0, 1.0, 1.0, 1.0):
        (module.weight * size).sum().backward()
    # In bf16 256 + 1 is 256.
    assert float(module.weight.grad) == 259


@pytest.mark.parametrize(
    ("field", "value", "needs"),
    [
        *[("learning_rate", value, "be (a finite number|at least 0)") for value in (-1.0, math.inf, math.nan)],
        *[("weight_decay", value, "be (a finite number|at least 0)") for value in (-0.1, math.inf, math.nan)],
        *[("eps", value, "be (a finite number|positive)") for value in (0.0, -1e-8, math.inf, math.nan)],
        *[("max_grad_norm", value, "be positive") for value in (-1.0, 0.0, math.nan)],
        *[
            ("betas", value, r"be two numbers in \[0, 1\)")
            for value in ((1.5, 0.9), (0.9, 1.0), (0.9, math.nan), (0.9,))
        ],
    ],
)
def test_options_out_of_their_ranges_are_refused(field: str, value: Any, needs: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{field}={value}')} must {needs}"):
        OptimizerOptions(**{field: value})


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "eps", "max_grad_norm"])
def test_a_text_is_no_number(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}='1e-5' must be a (finite )?number, not str"):
        OptimizerOptions(**{field: "1e-5"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup_steps='10' must be an integer, not str"):
        Schedule(warmup_steps="10")  # type: ignore[arg-type]


def test_options_at_the_ends_of_their_ranges_are_accepted() -> None:
    OptimizerOptions(learning_rate=0.0, betas=(0.0, 0.0), eps=1e-30, weight_decay=0.0, max_grad_norm=math.inf)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module = make(torch.bfloat16)
    optimizer = ShardOptimizer(module, OPTIONS)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.full(parameter.shape, math.inf)
    assert not math.isfinite(optimizer.step(1e-3))
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    assert list(optimizer.state(module.weight)) == ["master"]


@pytest.mark.parametrize(("first", "second"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_state_that_is_loaded_goes_on_as_if_nothing_had_happened(first: torch.dtype, second: torch.dtype) -> None:
    module, other = make(first), make(second)
    optimizer, resumed = ShardOptimizer(module, OPTIONS), ShardOptimizer(other, OPTIONS)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for mine, its in zip(other.parameters(), module.parameters(), strict=True):
                    mine.copy_(its)
                    resumed.load_state(mine, optimizer.state(its))
        for which, stepped in ((module, optimizer), (other, resumed)) if step >= 2 else ((module, optimizer),):
            for parameter, gradient in zip(which.parameters(), gradients(step), strict=True):
                parameter.grad = gradient
            stepped.step(1e-3)
    for mine, its in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(resumed.state(mine).get("master", mine.detach()), optimizer.state(its)["master"])


def step_sharded(group: ProcessGroup) -> list[Tensor]:
    """Three ranks hold a row each of the weight, and an element of the bias."""
    module = make(torch.bfloat16)
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    optimizer = ShardOptimizer(module, OPTIONS)
    for step in range(STEPS):
        for parameter, gradient in zip(module.parameters(), gradients(step), strict=True):
            rank = group.rank()
            local = gradient[rank : rank + 1].bfloat16()
            parameter.grad = torch.distributed.tensor.DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, run_check=False
            )
        optimizer.step(rate(step))
    return [optimizer.state(parameter)["master"] for parameter in module.parameters()]


def test_a_sharded_parameter_steps_by_its_parts(ranks: RankPool) -> None:
    parts = ranks.run(step_sharded, world=3)
    for number, expected in enumerate(reference()):
        torch.testing.assert_close(torch.cat([part[number] for part in parts]), expected)
