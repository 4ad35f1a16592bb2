"""ERNIE 4.5's routers are fp32 in a bf16 model, as transformers keeps them, under FSDP2 and through a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import mesh_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, OptimizerOptions
from rl_models.losses import LossTerms

ROUTER = "model.layers.1.mlp.gate.weight"
ROWS = [torch.arange(9) % 61, torch.arange(7) + 20]


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "ernie"
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    experts = {"moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes, **heads, **experts, initializer_range=0.2))
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 if "gate.weight" in name else parameter.data.bfloat16()
    model.save_pretrained(path)
    return path


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(-inputs.log_probs)


def learn(group: ProcessGroup, path: Path, out: Path, backend: str, dims: ParallelDims) -> Tensor:
    """Save the model before and after an update; return this rank's log-probs before it."""
    options: dict[str, Any] = {"backend": backend, "dims": dims, "mesh": mesh_of(dims), "device": "cpu"}
    actor = Actor.from_pretrained(
        path, dtype=torch.bfloat16, optimizer=OptimizerOptions(0.01, max_grad_norm=1e9), **options
    )
    kinds = {name: parameter.dtype for name, parameter in actor.engine.module.named_parameters()}
    assert {dtype for name, dtype in kinds.items() if name.endswith("gate.weight")} == {torch.float32}
    assert {dtype for name, dtype in kinds.items() if name.endswith("_proj.weight")} == {torch.bfloat16}
    actor.save_pretrained(out / "before")
    batch = Batch.from_sequences([ROWS[actor.grid.rank("dp")]] if dims.dp > 1 else ROWS)
    log_probs = actor.log_probs(batch).log_probs
    actor.update(batch, loss)
    actor.save_pretrained(out / "after")
    return log_probs


@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("parallel", ParallelDims(dp=2)),
        ("transformers", ParallelDims(dp=2)),
        pytest.param("parallel", ParallelDims(dp=2, tp=2, ep=2), marks=pytest.mark.slow),
        pytest.param("transformers", ParallelDims(cp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_routers_stay_in_fp32_under_fsdp2(
    ranks: RankPool, ernie: Path, tmp_path: Path, backend: str, dims: ParallelDims
) -> None:
    model = AutoModelForCausalLM.from_pretrained(ernie, dtype=torch.bfloat16)
    assert model.get_parameter(ROUTER).dtype == torch.float32
    wanted = [model(row[None]).logits[0, :-1].float().log_softmax(-1).gather(1, row[1:, None])[:, 0] for row in ROWS]
    (-torch.cat(wanted).sum() / sum(map(len, ROWS))).backward()
    gradient = model.get_parameter(ROUTER).grad
    found = ranks.run(learn, ernie, tmp_path, backend, dims, world=dims.world_size)
    for rank, log_probs in enumerate(found):
        here = torch.cat([log_probs[1:]] if dims.dp > 1 else [log_probs[1:9], log_probs[10:]])
        expected = wanted[rank * dims.dp // dims.world_size] if dims.dp > 1 else torch.cat(wanted)
        torch.testing.assert_close(here, expected, rtol=0, atol=0.1)  # bf16
    before, after = (
        {k: v for file in (tmp_path / name).glob("*.safetensors") for k, v in load_file(file).items()}
        for name in ("before", "after")
    )
    stored = load_file(ernie / "model.safetensors")[ROUTER]
    assert not torch.equal(stored.bfloat16().float(), stored)
    assert torch.equal(before[ROUTER], stored), "not rounded"
    assert after[ROUTER].dtype == torch.float32
    # AdamW's first step is the learning rate times the gradient's sign, kept to fp32's last bits.
    clear = gradient.abs() > 0.1 * gradient.abs().max()
    torch.testing.assert_close((after[ROUTER] - stored)[clear], -0.01 * gradient.sign()[clear], rtol=1e-3, atol=1e-6)
