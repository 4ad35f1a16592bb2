"""Weights reach Megatron-Core models through ckpt's layouts and come back bit-identical; gradients go the same way.

On the way the model runs forward and backward, and its log-probs and the gradient of every parameter are compared with
transformers', under the names of the checkpoint: of the local layers and of Transformer Engine's.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from tests.canonical import canonical
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt import Checkpoint, Place, layout_for, load_hf, save_hf
from megatron_utils import megatron_grid
from megatron_utils.gpt import build_gpt
from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
from megatron_utils.pipeline_parallel import run_schedule
from megatron_utils.testing import MIXTURES, cpu_stand_in, tiny_models
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankPool
from parallel_models.engine import carry

MODELS = tiny_models("llama", "llama-biased", "deepseek-v3", "mistral", "qwen2-tied", "qwen3", "qwen3-moe", "mixtral")
MODELS |= tiny_models("glm4-moe", "glm4-moe-lite", "ministral3", "seed-oss")
MODELS |= tiny_models(
    *("deepseek_v2", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite"),
    *("granitemoe", "minimax_m2", "olmo2", "olmo3", "phi3", "phi3-longrope", "qwen2_moe", "smollm3"),
)
SIZES = {name: MODELS["llama"][name] for name in MODELS["llama"] if name != "model_type"} | {"pad_token_id": None}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TOWER = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
PIXTRAL |= {"intermediate_size": 24, "image_size": 8, "patch_size": 2}
KIMI_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
DEEPSTACK = {**TOWER, "deepstack_visual_indexes": [0]}


def seen(model_type: str, vision: Mapping[str, Any], /, **text: Any) -> dict[str, Any]:
    """The config of a small vision-language model."""
    fields = {**SIZES, "head_dim": 8, "rope_parameters": SECTIONS, **text}
    return {"model_type": model_type, "text_config": fields, "vision_config": dict(vision)}


# With text alone; the towers are carried.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
HALF = {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5}}
MODELS |= {
    "qwen2-vl": seen("qwen2_vl", {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}, hidden_size=32),
    "qwen2.5-vl": seen("qwen2_5_vl", {**TOWER, "out_hidden_size": 32}, hidden_size=32),
    "qwen3-vl": seen("qwen3_vl", DEEPSTACK),
    "qwen3-vl-moe": seen("qwen3_vl_moe", DEEPSTACK, num_experts=4, **EXPERTS),
    "glm4v": seen("glm4v", {**TOWER, "out_hidden_size": 64}, hidden_size=64, head_dim=None, **HALF),
    "mistral3": seen("mistral3", PIXTRAL, **MODELS["ministral3"]),
    "glm4v-moe": seen(
        "glm4v_moe",
        TOWER,
        head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **HALF,
    ),
}
MODELS["kimi-k2.5"] = {"model_type": "kimi_k25", "text_config": MODELS["deepseek-v3"], "vision_config": KIMI_TOWER}
MIXTURES = (*MIXTURES, "qwen3_vl_moe", "glm4v_moe", "kimi_k25")
# Kernels of Transformer Engine want sides that are multiples of 16, also of a rank's part.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
WIDE |= {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
GRIDS: dict[str, tuple[ParallelDims, int | None]] = {
    "one": (ParallelDims(), None),
    "tp2": (ParallelDims(tp=2), None),
    "tp4, more ranks than key-value heads": (ParallelDims(tp=4), None),
    "dp2": (ParallelDims(dp=2), None),
    "tp2 pp2": (ParallelDims(tp=2, pp=2), None),
    "pp2 vpp2": (ParallelDims(pp=2), 2),
    "dp2 ep2": (ParallelDims(dp=2, ep=2), None),
    "tp2 dp2 ep2": (ParallelDims(tp=2, dp=2, ep=2), None),
    "tp2 ep2": (ParallelDims(tp=2, ep=2), None),
    "cp2": (ParallelDims(cp=2), None),
    "cp2 tp2": (ParallelDims(cp=2, tp=2), None),
}
PLAIN = {
    ("qwen3", "pp2 vpp2"),
    ("deepseek-v3", "tp2"),
    ("qwen3-vl-moe", "tp2 dp2 ep2"),
}
CASES = [
    pytest.param(name, grid, marks=() if (name, grid) in PLAIN else pytest.mark.slow)
    for name, config in MODELS.items()
    for grid, (dims, _) in GRIDS.items()
    if dims.ep == 1 or config["model_type"] in MIXTURES
]
# TF32 (see below) moves tokens between experts that are nearly tied, so there every token goes to all of them.
EVERY_EXPERT = {
    "qwen3_moe": {"num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}
# fp32, relative to the largest element. NCCL and CUDA kernels add in other orders than the CPU; Transformer Engine
# multiplies fp32 as TF32, whose operands have 11 bits: 5e-4 each, growing over four layers.
TOLERANCES = {"local": 1e-4, "transformer_engine": 2e-2}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 37, (n,), generator=generator) for n in (11, 1, 17, 6)]


class Saved(NamedTuple):
    """A model and its gradients, as transformers saves them under "weights" and "gradients", and its numbers."""

    folder: Path
    log_probs: list[Tensor]
    grad_norm: float


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, Any]], Saved]:
    """`saved(config)`: of each configuration once."""
    found: dict[str, Saved] = {}

    def save(config: Mapping[str, Any]) -> Saved:
        key = json.dumps(config, sort_keys=True)
        if key not in found:
            folder = tmp_path_factory.mktemp("transformers")
            found[key] = Saved(folder, *save_transformers(config, folder))
        return found[key]

    return save


def save_transformers(config: Mapping[str, Any], folder: Path) -> tuple[list[Tensor], float]:
    """Save a model as "weights" and its gradients, in their places, as "gradients"; returns log-probs and norm."""
    import transformers

    torch.manual_seed(0)
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    model = kind.from_config(transformers.AutoConfig.for_model(**config))
    for tensor in model.state_dict().values():
        tensor.normal_(0, 0.2)
    model.save_pretrained(folder / "weights")
    log_probs = []
    for ids in sequences():
        logits = model(input_ids=ids[None]).logits[0, :-1]
        log_probs.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    torch.cat(log_probs).sum().backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder / "gradients")
    norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
    return [rows.detach() for rows in log_probs], norm.item()


def there_and_back_on(
    group: ProcessGroup,
    source: str,
    out: Path,
    dims: ParallelDims,
    virtual_stages: int | None,
    *,
    layer_spec: str = "local",
    device: str = "cpu",
) -> tuple[list[Tensor], float]:
    """Load, run forward and backward, save weights and gradients under their names; returns log-probs and norm."""
    rows = [ids.to(device) for ids in sequences()]
    micro_batches = [
        PackedSequence.from_sequences(part, multiple_of=dims.tp * 2 * dims.cp) for part in (rows[:2], rows[2:])
    ]

    layout = layout_for(source, target="megatron" if layer_spec == "local" else "megatron_te")

    def held(chunk: torch.nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
        carried = {name: buffer for name, buffer in chunk.named_buffers() if name in layout.carried}
        if gradients:
            carried = {name: torch.zeros_like(buffer) for name, buffer in carried.items()}
        biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
        parameters = dict(chunk.named_parameters())
        return {**{n: p.main_grad if gradients else p.data for n, p in parameters.items()}, **biases, **carried}

    with (
        cpu_stand_in() if device == "cpu" else contextlib.nullcontext(),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid,
    ):
        chunks = build_gpt(source, grid, layer_spec=layer_spec)
        groups = grid.groups
        axes = {"tp": groups.tp, "pp": groups.pp, "ep": groups.ep, "etp": groups.expt_tp}
        place = {axis: (part.rank(), part.size()) for axis, part in axes.items()}
        places = [Place(**place, vpp=(number, len(chunks))) for number in range(len(chunks))]
        if places[0].chunk == 0:
            carry(chunks[0], layout, Checkpoint(source), device)
        for chunk, where in zip(chunks, places, strict=True):
            assert load_hf(source, layout, where, into=held(chunk), group=group).keys() == held(chunk).keys()
        model = wrap_data_parallel(chunks, grid)
        outputs = run_schedule(
            model,
            micro_batches,
            grid,
            labels=[next_token_labels(part) for part in micro_batches],
            loss=lambda output, _: output.log_probs.sum(),
        )
        for kind, gradients in (("weights", False), ("gradients", True)):
            tensors = [held(chunk, gradients=gradients) for chunk in chunks]
            save_hf(out / kind, tensors, layout, places, group=group)
        parts = zip(micro_batches, outputs, strict=True)
        norm = Optimizer(model, grid, OptimizerConfig(lr=1e-3)).step().grad_norm
        return [rows[:-1] for part, output in parts for rows in part.split(output.log_probs)], norm


def assert_there_and_back(
    pool: RankPool, saved: Saved, out: Path, dims: ParallelDims, *arguments: Any, **options: Any
) -> None:
    tolerance = 1e-5 if options.get("device", "cpu") == "cpu" else TOLERANCES[options["layer_spec"]]
    source = str(saved.folder / "weights")
    results = pool.run(there_and_back_on, source, out, dims, *arguments, world=dims.world_size, **options)
    for log_probs, norm in results:
        assert norm == pytest.approx(saved.grad_norm, rel=10 * tolerance)
        for own, other in zip(log_probs, saved.log_probs, strict=True):
            torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    for kind in ("weights", "gradients"):
        after = tensors_of(out / kind)
        before = canonical(tensors_of(saved.folder / kind), saved.folder / kind)
        assert before.keys() == after.keys()
        for key, value in before.items():
            if after[key].shape != value.shape:  # transformers saves Qwen3-VL-MoE's experts the other way round
                value = value.transpose(1, 2)
            assert value.dtype == after[key].dtype
            if kind == "weights":
                assert torch.equal(value, after[key]), key
            elif not key.endswith("e_score_correction_bias"):
                atol = tolerance * value.abs().max().item() + 1e-7
                torch.testing.assert_close(after[key], value, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = folder.glob("*.safetensors")
    return {key: value for file in files for key, value in safetensors.torch.load_file(file).items()}


@pytest.mark.parity("megatron")
@pytest.mark.parametrize(("name", "grid"), CASES)
def test_there_and_back(
    ranks: RankPool, saved: Callable[[Mapping[str, Any]], Saved], tmp_path: Path, name: str, grid: str
) -> None:
    assert_there_and_back(ranks, saved(MODELS[name]), tmp_path, *GRIDS[grid])


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        pytest.param(name, dims, marks=pytest.mark.gpu(dims.world_size))
        for name in ("llama-biased", "qwen3", "qwen3-moe", "deepseek-v3")
        for dims in (ParallelDims(), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(dp=2, ep=2))
        if dims.ep == 1 or MODELS[name]["model_type"] in MIXTURES
    ],
    ids=str,
)
@pytest.mark.parametrize("layer_spec", ["local", "transformer_engine"])
def test_there_and_back_on_gpus(
    four_nccl_ranks: RankPool,
    saved: Callable[[Mapping[str, Any]], Saved],
    tmp_path: Path,
    name: str,
    layer_spec: str,
    dims: ParallelDims,
) -> None:
    if layer_spec == "transformer_engine":
        pytest.importorskip("transformer_engine")
    config = MODELS[name] | {key: size for key, size in WIDE.items() if key in MODELS[name]}
    if layer_spec == "transformer_engine":
        config |= EVERY_EXPERT.get(config["model_type"], {})
    assert_there_and_back(four_nccl_ranks, saved(config), tmp_path, dims, None, layer_spec=layer_spec, device="cuda")
