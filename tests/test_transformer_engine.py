"""Transformer Engine's layers behind `backend="megatron"` compute what Megatron-Core's own do, on every grid.

(Those are compared with other backends in `test_parity_megatron.py`.)
"""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in, tiny_models
from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, Critic, LossInputs, MegatronOptions, OptimizerOptions, PipelineOptions
from rl_models.losses import LossTerms

# Kernels of Transformer Engine want sides that are multiples of 16, also of a rank's part.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
WIDE |= {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
MODELS = {
    name: config | {key: size for key, size in WIDE.items() if key in config}
    for name, config in tiny_models("llama", "qwen3-tied", "qwen3-moe", "deepseek-v3", initializer_range=0.1).items()
}
PLACES: dict[str, tuple[ParallelDims, dict[str, Any]]] = {
    "one": (ParallelDims(), {}),
    "tp2": (ParallelDims(tp=2), {}),
    "tp2 without sp": (ParallelDims(tp=2), {"sequence_parallel": False}),
    "dp2": (ParallelDims(dp=2), {}),
    "cp2": (ParallelDims(cp=2), {}),
    "pp2": (ParallelDims(pp=2), {}),
    "pp2 vpp2": (ParallelDims(pp=2), {"pipeline": PipelineOptions(virtual_stages=2)}),
    "ep2": (ParallelDims(dp=2, ep=2), {}),
    "tp4": (ParallelDims(tp=4), {}),
    "tp2 pp2": (ParallelDims(tp=2, pp=2), {}),
    "tp2 ep2": (ParallelDims(tp=2, dp=2, ep=2), {}),
}
# Megatron-Core trains mixtures over tp with sequence parallelism alone; dense models have no experts to divide.
DENSE, MIXTURE = ("llama", "qwen3-tied"), ("qwen3-moe", "deepseek-v3")
ONLY = {"tp2 without sp": DENSE, "ep2": MIXTURE, "tp2 ep2": MIXTURE}
CASES = [(name, place) for place in PLACES for name in ONLY.get(place, MODELS)]
# fp32: `conftest.py` keeps TF32 away.
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each model, an actor's and a critic's weights."""
    import transformers

    folder = tmp_path_factory.mktemp("engine")
    kinds = {"actor": transformers.AutoModelForCausalLM, "critic": transformers.AutoModelForTokenClassification}
    for name, values in MODELS.items():
        config = transformers.AutoConfig.for_model(**values, num_labels=1)
        for kind, auto in kinds.items():
            torch.manual_seed(len(name))
            auto.from_config(config).save_pretrained(folder / name / kind)
    return folder


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs["advantages"] * inputs.log_probs - 0.1 * inputs.entropy, {"entropy": inputs.entropy})


def value_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms((inputs.values - inputs["advantages"]).square(), {})


def compared_on(
    group: ProcessGroup, folder: Path, dims: ParallelDims, more: dict[str, Any], layers: tuple[str, str], device: str
) -> None:
    """Outputs, metrics and the weights after one step of actor and critic, of one kind of layers and of the other."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 23, 8, 2, 13)
    batch = Batch.from_sequences(
        [torch.randint(37, (n,), generator=generator) for n in lengths],
        advantages=[torch.randn(n, generator=generator) for n in lengths],
    )
    # Megatron-Core computes on the current device, which is each rank's own.
    place = device if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    options = {
        "backend": "megatron",
        "dims": dims,
        "mesh": dims.build_mesh(device, list(range(group.size()))) if group.size() > 1 else None,
        "device": place,
        "max_tokens_per_micro_batch": 24,
        # So large an epsilon makes AdamW's first step proportional to the gradient.
        "optimizer": OptimizerOptions(learning_rate=1e5, eps=1e5, max_grad_norm=math.inf),
        **more,
    }
    before = {kind: load_file(folder / kind / "model.safetensors") for kind in ("actor", "critic")}
    outputs, metrics, weights = [], [], []
    with cpu_stand_in() if device == "cpu" else contextlib.nullcontext():
        for kind in layers:
            options["megatron"] = MegatronOptions(layers=kind)
            actor = Actor.from_pretrained(folder / "actor", **options)
            critic = Critic.from_pretrained(folder / "critic", **options)
            part = batch.select(range(actor.grid.rank("dp"), len(batch), dims.dp))
            outputs.append(torch.stack([*actor.log_probs(part, temperature=1.3), critic.values(part)]))
            metrics.append([actor.update(part, policy_loss, temperature=1.3), critic.update(part, value_loss)])
            after = {"actor": actor.stream_weights(), "critic": critic.stream_weights()}
            weights.append({kind: {key: x.cpu().clone() for key, x in stream} for kind, stream in after.items()})
    torch.testing.assert_close(outputs[1], outputs[0], rtol=TOLERANCE, atol=TOLERANCE)
    for kind, start in before.items():
        own, other = weights[1][kind], weights[0][kind]
        assert own.keys() == other.keys() == start.keys()
        for key, value in other.items():
            # The difference of two parameters is rounded as these are.
            step = (value - start[key]).abs().max().item()
            assert step > 0 or key.endswith("e_score_correction_bias"), key
            atol = 10 * TOLERANCE * step + 1e-6 * start[key].abs().max().item()
            torch.testing.assert_close(own[key], value, rtol=0, atol=atol, msg=lambda m, k=f"{kind} {key}": f"{k}: {m}")
    for own, other in zip(metrics[1], metrics[0], strict=True):
        assert own == pytest.approx(other, rel=10 * TOLERANCE, abs=TOLERANCE), f"{own}, not {other}"


@pytest.mark.parametrize(
    ("name", "place"),
    [pytest.param(name, place, marks=pytest.mark.gpu(PLACES[place][0].world_size)) for name, place in CASES],
)
def test_transformer_engine_computes_what_the_local_layers_do(
    four_nccl_ranks: RankPool, folders: Path, name: str, place: str
) -> None:
    pytest.importorskip("transformer_engine")
    dims, more = PLACES[place]
    arguments = folders / name, dims, more, ("local", "transformer_engine"), "cuda"
    four_nccl_ranks.run(compared_on, *arguments, world=dims.world_size)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one", "ep2"])
def test_the_comparison_itself(ranks: RankPool, folders: Path, place: str) -> None:
    """Where there is no GPU, of the local layers with themselves."""
    dims, more = PLACES[place]
    ranks.run(compared_on, folders / "qwen3-moe", dims, more, ("local", "local"), "cpu", world=dims.world_size)
