"""Weights reach Megatron-Core models through ckpt's "megatron" layout, and come back bit-identical."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed import ProcessGroup

from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankPool, shared_pool

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}
# Kernels of Transformer Engine want sides that are multiples of 16, also of a rank's part.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
WIDE |= {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
GRIDS: dict[str, tuple[ParallelDims, int | None]] = {
    "one": (ParallelDims(), None),
    "tp2": (ParallelDims(tp=2), None),
    "tp4, more ranks than key-value heads": (ParallelDims(tp=4), None),
    "tp2 pp2": (ParallelDims(tp=2, pp=2), None),
    "pp2 vpp2": (ParallelDims(pp=2), 2),
    "dp2 ep2": (ParallelDims(dp=2, ep=2), None),
    "tp2 dp2 ep2": (ParallelDims(tp=2, dp=2, ep=2), None),
    "tp2 ep2": (ParallelDims(tp=2, ep=2), None),
}


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[RankPool]:
    with RankPool(min(torch.cuda.device_count(), 4), backend="nccl") as pool:
        yield pool


def save_transformers(name: str, folder: Path, **sizes: int) -> None:
    import transformers

    kind, extra = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**SIZES, **extra, **sizes})
    )
    for tensor in model.state_dict().values():
        tensor.normal_(0, 0.2)
    model.save_pretrained(folder)


def there_and_back_on(
    group: ProcessGroup,
    source: str,
    target: str,
    dims: ParallelDims,
    virtual_stages: int | None,
    *,
    layer_spec: str = "local",
    device: str = "cpu",
    tolerance: float = 1e-5,
) -> None:
    import transformers

    from ckpt import Place, layout_for, load_hf, save_hf
    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    sequences = [torch.randint(0, SIZES["vocab_size"], (n,)).to(device) for n in (11, 1, 17, 6)]
    micro_batches = [PackedSequence.from_sequences(sequences[:2], multiple_of=dims.tp)]
    micro_batches.append(PackedSequence.from_sequences(sequences[2:], multiple_of=dims.tp))

    def held(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
        biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
        return {**{name: parameter.data for name, parameter in chunk.named_parameters()}, **biases}

    with (
        cpu_stand_in() if device == "cpu" else contextlib.nullcontext(),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid,
    ):
        chunks = build_gpt(source, grid, layer_spec=layer_spec)
        layout = layout_for(source, target="megatron" if layer_spec == "local" else "megatron_te")
        axes = {
            "tp": grid.groups.tp,
            "pp": grid.groups.pp,
            "ep": grid.groups.ep,
            "etp": grid.groups.expt_tp,
        }
        place = {axis: (part.rank(), part.size()) for axis, part in axes.items()}
        places = [Place(**place, vpp=(number, len(chunks))) for number in range(len(chunks))]
        for chunk, where in zip(chunks, places, strict=True):
            assert load_hf(source, layout, where, into=held(chunk), group=group).keys() == held(chunk).keys()
        outputs = run_schedule(chunks, micro_batches, grid, labels=[next_token_labels(part) for part in micro_batches])
        log_probs = [
            rows for part, output in zip(micro_batches, outputs, strict=True) for rows in part.split(output[0])
        ]
        for ids, rows in zip(sequences, log_probs, strict=True):
            logits = model(input_ids=ids[None].cpu()).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, ids[1:, None].cpu())[:, 0]
            torch.testing.assert_close(rows[:-1].cpu(), expected, rtol=tolerance, atol=tolerance)
        save_hf(target, [held(chunk) for chunk in chunks], layout, places, group=group)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(ranks: RankPool, tmp_path: Path, name: str, grid: str, request: pytest.FixtureRequest) -> None:
    dims, virtual_stages = GRIDS[grid]
    if dims.ep > 1 and name not in ("qwen3-moe", "mixtral", "deepseek-v3"):
        pytest.skip("no experts")
    plain = {("llama", "tp2"), ("qwen2-tied", "tp2 pp2"), ("qwen3", "pp2 vpp2"), ("qwen3-moe", "dp2 ep2")}
    plain |= {("deepseek-v3", "tp2"), ("llama-biased", "tp2")}
    if (name, grid) not in plain and not request.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    source, target = tmp_path / "source", tmp_path / "target"
    save_transformers(name, source)
    ranks.run(there_and_back_on, str(source), str(target), dims, virtual_stages, world=dims.world_size)
    assert_same_files(source, target)


@pytest.mark.parametrize("tp", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4)])
@pytest.mark.parametrize("layer_spec", ["local", "transformer_engine"])
@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "qwen3-moe", "deepseek-v3"])
def test_there_and_back_on_gpus(nccl_ranks: RankPool, tmp_path: Path, name: str, layer_spec: str, tp: int) -> None:
    if layer_spec == "transformer_engine":
        pytest.importorskip("transformer_engine")
    source, target = tmp_path / "source", tmp_path / "target"
    save_transformers(name, source, **WIDE)
    dims = ParallelDims(tp=tp)
    options = {"layer_spec": layer_spec, "device": "cuda", "tolerance": 1e-3}
    nccl_ranks.run(there_and_back_on, str(source), str(target), dims, None, world=tp, **options)
    assert_same_files(source, target)


def assert_same_files(source: Path, target: Path) -> None:
    before, after = (
        {
            key: value
            for file in folder.glob("*.safetensors")
            for key, value in safetensors.torch.load_file(file).items()
        }
        for folder in (source, target)
    )
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype
        assert torch.equal(value, after[key]), key
