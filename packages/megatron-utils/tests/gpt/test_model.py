"""Models of `build_gpt` against transformers, one sequence at a time: outputs, every gradient, the gradient's norm."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import MIXTURES, tiny_config, tiny_models
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankPool

LENGTHS = [11, 1, 17, 6, 5, 9]
MICRO_BATCHES = [[0, 1], [2], [3, 4], [5]]
MODELS = tiny_models(
    "llama",
    "llama3-biased",
    "deepseek-v3-yarn",
    "deepseek-v3-full-query",
    "glm4-moe",
    "glm4-moe-lite",
    "seed-oss",
    "ministral3",
    "mistral",
    "qwen2-tied",
    "qwen3",
    "qwen3-moe-hybrid",
    "qwen3-moe-unnormed",
    "mixtral",
)
VOCABULARY, HIDDEN = MODELS["llama"]["vocab_size"], MODELS["llama"]["hidden_size"]


def transformers_model(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for tensor in model.state_dict().values():
        tensor.normal_(0, 0.2)
    return model


def reference(model: torch.nn.Module, sequences: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    log_probs, entropies = [], []
    for ids in sequences:
        log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        log_probs.append(torch.cat([log_p[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)]))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


@contextlib.contextmanager
def repeatable(name: str, device: str) -> Iterator[None]:
    """Have a model compute the same bits each time that it is called.

    On CUDA Megatron-Core adds up what a token's experts give by atomics, in any order, which the last bits of three
    summands or more show; under torch's switch for deterministic algorithms it adds them in one order.
    """
    if device == "cpu" or MODELS[name].get("num_experts_per_tok", 1) <= 2:
        yield
        return
    # Not an error where there is none: cuBLAS has to be told by the environment, before it is first used.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Case:
    """A transformers model, its loss over packed micro-batches, and the gradient of every parameter."""

    def __init__(self, name: str, *, multiple_of: int, device: str = "cpu") -> None:
        self.model, self.device = transformers_model(name), device
        self.sequences = [torch.randint(0, VOCABULARY, (n,)) for n in LENGTHS]
        self.packed = [
            PackedSequence.from_sequences([self.sequences[i].to(device) for i in indices], multiple_of=multiple_of)
            for indices in MICRO_BATCHES
        ]
        self.labels = [next_token_labels(batch) for batch in self.packed]
        self.log_probs, self.entropies = reference(self.model, self.sequences)
        self.weights = [torch.randn(n) for n in LENGTHS]
        terms = zip(self.weights, self.log_probs, self.entropies, strict=True)
        sum((w * p - 0.1 * e).sum() for w, p, e in terms).backward()
        self.gradients = {key: parameter.grad for key, parameter in self.model.named_parameters()}
        self.gradients["lm_head.weight"] = self.model.lm_head.weight.grad

    def loss(self, output: Any, number: int) -> Tensor:
        parts = zip(MICRO_BATCHES[number], *map(self.packed[number].split, output), strict=True)
        return sum((self.weights[i].to(self.device) * p - 0.1 * e).sum() for i, p, e in parts)

    def check_gradients(self, chunks: Any, tolerance: float) -> None:
        from transformers_weights import expected_parameters

        for chunk in chunks:
            expected = expected_parameters(chunk, self.gradients)
            for key, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    difference = (parameter.main_grad.cpu() - expected[key]).norm()
                    assert difference <= tolerance * expected[key].norm() + 1e-7, f"{key}: {difference}"


def parity_on(
    group: ProcessGroup,
    name: str,
    dims: ParallelDims,
    virtual_stages: int | None = None,
    *,
    device: str = "cpu",
    tolerance: float = 1e-5,
    **options: Any,
) -> float:
    from transformers_weights import load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    case = Case(name, multiple_of=dims.tp * 2 * dims.cp, device=device)
    model, sequences, packed = case.model, case.sequences, case.packed

    with (
        cpu_stand_in() if device == "cpu" else contextlib.nullcontext(),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages, seed=1) as grid,
    ):
        chunks = build_gpt(model.config, grid, **options)
        load_transformers_state(chunks, model.state_dict())
        wrapped = wrap_data_parallel(chunks, grid)
        with repeatable(name, device):
            outputs = run_schedule(wrapped, packed, grid, labels=case.labels, loss=case.loss)
            # Without a loss and before any step: the same numbers, bit for bit.
            again = run_schedule(chunks, packed, grid, labels=case.labels)
        for part, indices, output, other in zip(packed, MICRO_BATCHES, outputs, again, strict=True):
            assert torch.equal(output.log_probs, other.log_probs)
            for i, p, e in zip(indices, *map(part.split, output), strict=True):
                torch.testing.assert_close(p.cpu(), case.log_probs[i].detach(), rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(e.cpu(), case.entropies[i].detach(), rtol=tolerance, atol=3 * tolerance)
        if grid.is_last_stage and virtual_stages is None:
            # Logits of a pipeline stay on its last stage.
            (logits,) = run_schedule(chunks, packed[:1], grid, next_token=True) or ()
            for i, row in zip(MICRO_BATCHES[0], logits, strict=True):
                last = model(input_ids=sequences[i][None]).logits[0, -1]
                torch.testing.assert_close(row.cpu(), last, rtol=tolerance, atol=tolerance)
        elif virtual_stages is None:
            assert run_schedule(chunks, packed[:1], grid, next_token=True) is None
        case.check_gradients(chunks, tolerance)
        step = Optimizer(wrapped, grid, OptimizerConfig(lr=1e-3)).step()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    torch.testing.assert_close(torch.tensor(step.grad_norm), norm, rtol=tolerance, atol=0)
    return step.grad_norm


def two_grids_on(group: ProcessGroup) -> None:
    """Two models on different grids of the same ranks learn in turn; a part of the first is frozen."""
    from transformers_weights import load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    actor = ("qwen3-moe-hybrid", ParallelDims(tp=2, dp=2, ep=2), "decoder.layers.0|router|word_embeddings")
    critic = ("qwen2-tied", ParallelDims(pp=2, tp=2), "$^")
    cases = [Case(name, multiple_of=dims.tp) for name, dims, _ in (actor, critic)]
    models: list[Any] = []
    with cpu_stand_in():
        for turn in range(3):
            for number, (_, dims, frozen) in enumerate((actor, critic)):
                case = cases[number]
                with megatron_grid(dims) as grid:
                    if turn == 0:
                        chunks = build_gpt(case.model.config, grid)
                        load_transformers_state(chunks, case.model.state_dict())
                        for name, parameter in chunks[0].named_parameters():
                            parameter.requires_grad_(re.search(frozen, name) is None)
                        models.append((chunks, wrap_data_parallel(chunks, grid)))
                    chunks, wrapped = models[number]
                    for chunk in wrapped:
                        chunk.zero_grad_buffer()
                    run_schedule(wrapped, case.packed, grid, labels=case.labels, loss=case.loss)
                    case.check_gradients(chunks, 1e-5)


@pytest.mark.slow
def test_two_grids_learn_in_turn(ranks: RankPool) -> None:
    ranks.run(two_grids_on)


# In a plain run one grid for each form of parallelism, of which one has a mixture with shared experts; the rest with
# --slow. The repository's `tests/test_megatron_checkpoints.py` has other layers in a plain run, with their gradients. A
# grid knows of a layer no more than its experts and its attention: one model of each is on every grid, the others are
# on all of two ranks.
ON_EVERY_GRID = ("qwen2-tied", "qwen3-moe-hybrid", "deepseek-v3-yarn")
GRIDS = [
    ("qwen2-tied", ParallelDims(pp=2), None),
    ("llama", ParallelDims(pp=2), 2),
    ("qwen3-moe-hybrid", ParallelDims(dp=2, ep=2), None),
    ("deepseek-v3-yarn", ParallelDims(tp=2), None),
    ("llama", ParallelDims(cp=2), None),
]
SLOW = [
    (name, dims, stages)
    for name in MODELS
    for dims, stages in [
        (ParallelDims(), None),
        (ParallelDims(tp=2), None),
        (ParallelDims(tp=4), None),
        (ParallelDims(pp=2), None),
        (ParallelDims(pp=2), 2),
        (ParallelDims(pp=4), None),
        (ParallelDims(tp=2, pp=2), 2),
        (ParallelDims(tp=2, dp=2, ep=2), None),
        (ParallelDims(tp=2, ep=2), None),
        (ParallelDims(cp=2), None),
        (ParallelDims(cp=2, tp=2), None),
        (ParallelDims(cp=2, ep=2), None),
        (ParallelDims(cp=2, pp=2), None),
    ]
    if dims.ep == 1 or MODELS[name]["model_type"] in MIXTURES
    if dims.world_size <= 2 or name in ON_EVERY_GRID
    if (name, dims, stages) not in GRIDS
]


@pytest.mark.parametrize(
    ("name", "dims", "virtual_stages"), [*GRIDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_parity_with_transformers(ranks: RankPool, name: str, dims: ParallelDims, virtual_stages: int | None) -> None:
    ranks.run(parity_on, name, dims, virtual_stages, world=dims.world_size)


# Forms of parallelism on one, two and four GPUs. NCCL and CUDA kernels round otherwise than the CPU.
GPU_GRIDS = [
    (ParallelDims(), None),
    (ParallelDims(tp=2), None),
    (ParallelDims(pp=2), None),
    (ParallelDims(pp=2), 2),
    (ParallelDims(cp=2), None),
    (ParallelDims(dp=2, ep=2), None),
    (ParallelDims(tp=2, pp=2), None),
    (ParallelDims(tp=2, dp=2, ep=2), None),
]


@pytest.mark.parametrize(
    ("name", "dims", "virtual_stages"),
    [
        pytest.param(name, dims, stages, marks=pytest.mark.gpu(dims.world_size))
        for name in ("llama", "qwen3", "qwen3-moe-hybrid", "deepseek-v3-yarn")
        for dims, stages in GPU_GRIDS
        if dims.ep == 1 or MODELS[name]["model_type"] in MIXTURES
    ],
)
def test_parity_on_gpus(four_nccl_ranks: RankPool, name: str, dims: ParallelDims, virtual_stages: int | None) -> None:
    options = {"device": "cuda", "tolerance": 1e-4}
    four_nccl_ranks.run(parity_on, name, dims, virtual_stages, world=dims.world_size, **options)


def repeated_on(group: ProcessGroup, name: str, device: str) -> None:
    from transformers_weights import load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    model = transformers_model(name)
    packed = PackedSequence.from_sequences([torch.randint(0, VOCABULARY, (50,)).to(device) for _ in range(40)])
    with (
        cpu_stand_in() if device == "cpu" else contextlib.nullcontext(),
        megatron_grid(ParallelDims(), ranks=[0]) as grid,
    ):
        chunks = build_gpt(model.config, grid)
        load_transformers_state(chunks, model.state_dict())
        with repeatable(name, device):
            first, *others = [
                run_schedule(chunks, [packed], grid, labels=[next_token_labels(packed)])[0] for _ in range(5)
            ]
        for other in others:
            assert torch.equal(other.log_probs, first.log_probs)
            assert torch.equal(other.entropy, first.entropy)
        with pytest.raises(ValueError, match="labels are the input ids: this model does not shift them"):
            chunks[0](packed, packed.input_ids)


REPEATED = ("qwen3", "qwen3-moe-hybrid", "deepseek-v3-yarn")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "moe" in name else pytest.mark.slow) for name in REPEATED]
)
def test_scores_are_the_same_bits_each_time(ranks: RankPool, name: str) -> None:
    ranks.run(repeated_on, name, "cpu", world=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
def test_scores_are_the_same_bits_each_time_on_a_gpu(four_nccl_ranks: RankPool, name: str) -> None:
    four_nccl_ranks.run(repeated_on, name, "cuda", world=1)


def test_without_sequence_parallelism(ranks: RankPool) -> None:
    ranks.run(parity_on, "qwen3", ParallelDims(tp=2), sequence_parallel=False, world=2)


def test_uneven_stages(ranks: RankPool) -> None:
    ranks.run(parity_on, "qwen3-moe-hybrid", ParallelDims(pp=2), layers_per_stage=[3, 1], world=2)


def test_full_recompute(ranks: RankPool) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ranks.run(parity_on, "qwen3", ParallelDims(tp=2), world=2, **recompute)


def test_experts_by_all_gather(ranks: RankPool) -> None:
    options = {"moe_token_dispatcher_type": "allgather"}
    ranks.run(parity_on, "qwen3-moe-hybrid", ParallelDims(dp=2, ep=2), world=2, **options)


def values_on(group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    from transformers_weights import expected_parameters, load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in

    dims = ParallelDims(tp=group.size())
    model = transformers_model("llama")
    score = torch.randn(1, HIDDEN, requires_grad=True)
    sequences = [torch.randint(0, VOCABULARY, (n,)) for n in LENGTHS]
    packed = PackedSequence.from_sequences(sequences, multiple_of=dims.tp)
    expected = [(model.model(input_ids=ids[None]).last_hidden_state[0] @ score.T)[:, 0] for ids in sequences]
    torch.cat(expected).square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()} | {"lm_head.weight": score.grad}
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size)) as grid:
        chunks = build_gpt(model.config, grid, role="value", sequence_parallel=sequence_parallel)
        load_transformers_state(chunks, model.state_dict() | {"lm_head.weight": score.detach()})
        wrapped = wrap_data_parallel(chunks, grid)
        (values,) = run_schedule(
            wrapped, [packed], grid, loss=lambda output, _: torch.cat(packed.split(output)).square().sum()
        )
        assert values.dtype == torch.float32
        torch.testing.assert_close(torch.cat(packed.split(values)), torch.cat(expected).detach(), rtol=1e-5, atol=1e-5)
        for key, gradient in expected_parameters(chunks[0], gradients).items():
            parameter = chunks[0].get_parameter(key)
            assert (parameter.main_grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, key
        return chunks[0].output_layer.weight.main_grad.clone()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_value_model(ranks: RankPool, sequence_parallel: bool) -> None:
    one, other = ranks.run(values_on, sequence_parallel, world=2)
    assert torch.equal(one, other)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_window_layers": 2},
        {"max_window_layers": 0},
        {},
        {"use_sliding_window": False, "max_window_layers": 2},
        {"max_window_layers": 0, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
    ids=str,
)
def test_windows_are_those_of_transformers(model_type: str, fields: dict[str, Any]) -> None:
    import transformers

    from megatron_utils.gpt import transformer_config
    from megatron_utils.gpt.modules import PackedCoreAttention
    from parallel_layers import ModelConfig

    hf = tiny_config(model_type, **{"use_sliding_window": True, "sliding_window": 3, **fields})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    expected = [layer.self_attn.sliding_window for layer in model.model.layers]
    for config in (hf, model.config):
        made = transformer_config(config, ParallelDims(cp=2))
        described: dict[str, Any] = {"model": ModelConfig.from_hf(config), "attn_mask_type": None, "attention_type": ""}
        layers = [PackedCoreAttention(made, number, **described) for number in (1, 2, 3, 4)]
        assert [layer.options["window"] for layer in layers] == expected
        # A ring has no window.
        assert made.cp_comm_type == ("a2a" if any(expected) else "p2p")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_what_a_config_does_not_say_is_what_transformers_has(model_type: str) -> None:
    import transformers

    from megatron_utils.gpt import transformer_config

    def made(config: dict[str, Any]) -> dict[str, Any]:
        fields = vars(transformer_config(config, ParallelDims()))
        return {name: value for name, value in fields.items() if not callable(value)}

    sizes = tiny_config(model_type, use_sliding_window=True, max_window_layers=2)
    if model_type == "deepseek_v3":
        sizes |= {"num_experts_per_tok": 8, "topk_group": 4, "n_group": 8, "n_routed_experts": 16}
    for name in ("sliding_window", "norm_topk_prob"):
        sizes.pop(name, None)
    whole = transformers.AutoConfig.for_model(**sizes).to_dict()
    for name in (
        "sliding_window",
        "norm_topk_prob",
        "rope_interleave",
        "routed_scaling_factor",
        "topk_group",
        "n_group",
    ):
        assert made({key: value for key, value in whole.items() if key != name}) == made(whole), name


LLAMA, DEEPSEEK, MIXTURE = tiny_config("llama"), tiny_config("deepseek_v3"), tiny_config("qwen3_moe")
HYBRID = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
HYBRID |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 0}


@pytest.mark.parametrize(
    ("hf", "dims", "options", "message"),
    [
        (
            LLAMA | {"model_type": "gpt2"},
            ParallelDims(),
            {},
            "model_type='gpt2' is not supported; known: ApertusForCausalLM, ",
        ),
        (
            LLAMA | {"num_attention_heads": 6, "head_dim": 4},
            ParallelDims(tp=4),
            {},
            r"num_attention_heads=6 is not divisible by tp=4; use tp in \[",
        ),
        (
            LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4},
            ParallelDims(tp=2),
            {},
            r"num_key_value_heads=3 and tp=2: one must divide the other; use tp in \[1, 3, 6\]",
        ),
        (LLAMA, ParallelDims(pp=8), {}, "num_hidden_layers=4 is fewer than pp .* = 8; .* up to 4"),
        (LLAMA, ParallelDims(dp=2, ep=2), {}, "ep=2 is for a mixture of experts, which llama is not"),
        (LLAMA, ParallelDims(), {"sequence_parallel": True}, "sequence_parallel=True needs tp > 1"),
        (
            LLAMA | {"num_hidden_layers": 30},
            ParallelDims(pp=4),
            {},
            r"num_hidden_layers=30 .* layers_per_stage, .* \[8, 8, 7, 7\]",
        ),
        (
            LLAMA,
            ParallelDims(pp=2),
            {"layers_per_stage": [4]},
            r"layers_per_stage=\[4\] must be 2 numbers above 0 that sum to 4",
        ),
        (
            LLAMA,
            ParallelDims(pp=2),
            {"layers_per_stage": [4, 0]},
            r"layers_per_stage=\[4, 0\] must be 2 numbers above 0",
        ),
        (MIXTURE, ParallelDims(dp=3, ep=3), {}, r"4 experts do not divide over ep=3; use ep in \[1, 2, 4\]"),
        (
            MIXTURE | {"num_experts_per_tok": 5},
            ParallelDims(),
            {},
            r"top_k=5 must lie in 1\.\.4, .* num_experts=4 hold",
        ),
        (
            MIXTURE | {"moe_intermediate_size": 21},
            ParallelDims(tp=2),
            {},
            r"experts 21 wide do not divide over expert_tp=2; use expert_tp=1, or tp in \[1\]",
        ),
        (LLAMA, ParallelDims(), {"recompute": True}, "TransformerConfig of this megatron-core has no field recompute"),
        (
            tiny_config("qwen2", mlp_bias=True),
            ParallelDims(),
            {},
            "mlp_bias=True changes the numbers, and the row of qwen2",
        ),
        (
            {name: value for name, value in LLAMA.items() if name != "rms_norm_eps"},
            ParallelDims(),
            {},
            "rms_norm_eps=None must be a number above 0; write rms_norm_eps as transformers does",
        ),
        (
            LLAMA | {"model_type": "apertus"},
            ParallelDims(),
            {},
            r"apertus has activation='xielu' \(Megatron-Core: 'silu' or .*\), which is not supported on",
        ),
        (
            LLAMA | {"model_type": "cohere2"},
            ParallelDims(),
            {},
            r"cohere2 has normalization='layer' \(Megatron-Core: 'rms'\), norm_placement='parallel' \(.*: 'pre' or",
        ),
        (
            LLAMA | {"model_type": "gemma4_text", "head_dim": 8},
            ParallelDims(),
            {},
            r"gemma4_text has value_norm=True \(Megatron-Core: False\), output_scale=True",
        ),
        (
            LLAMA | HYBRID | {"model_type": "qwen3_next"},
            ParallelDims(),
            {},
            r"qwen3_next has output_gate=True \(Megatron-Core: False\)",
        ),
        (
            LLAMA | HYBRID | {"model_type": "olmo_hybrid"},
            ParallelDims(),
            {},
            r"olmo_hybrid has layers with linear attention \(Megatron-Core: none in a GPTModel\)",
        ),
        (
            LLAMA | {"model_type": "granitemoehybrid", "mamba_n_heads": 4, "mamba_d_head": 16},
            ParallelDims(),
            {},
            r"granitemoehybrid has .*layers with linear attention \(Megatron-Core: none in a GPTModel\)",
        ),
        (
            LLAMA | {"model_type": "ernie4_5_moe"},
            ParallelDims(),
            {},
            r"ernie4_5_moe has a correction bias of softmax scores \(Megatron-Core: of sigmoid scores\)",
        ),
        (
            tiny_config("deepseek_v2", topk_group=1),
            ParallelDims(),
            {},
            "num_experts_per_tok=2 with topk_group=1 is not",
        ),
        (LLAMA, ParallelDims(cp=2), {"cp_comm_type": "allgather"}, "cp_comm_type='allgather' must be 'p2p'"),
        (
            tiny_config("mistral"),
            ParallelDims(cp=2),
            {"cp_comm_type": "p2p"},
            r"cp_comm_type='p2p' \(ring attention\) has no sliding_window=4; use 'a2a' \(Ulysses\)",
        ),
        (DEEPSEEK | {"topk_group": 3}, ParallelDims(), {}, "num_experts_per_tok=4 with topk_group=3 is not supported"),
        (DEEPSEEK | {"norm_topk_prob": False}, ParallelDims(), {}, "norm_topk_prob=False is not supported"),
        (
            tiny_config("mixtral") | {"num_experts_per_tok": 1},
            ParallelDims(),
            {},
            "num_experts_per_tok=1 with norm_topk_prob=True is not supported",
        ),
        (DEEPSEEK | {"rope_interleave": False}, ParallelDims(), {}, "rope_interleave=False is not supported"),
        (DEEPSEEK | {"attention_bias": True}, ParallelDims(), {}, "attention_bias=True is not supported with latent"),
        (
            LLAMA,
            ParallelDims(pp=2),
            {"virtual_stages": 2, "batch_p2p_comm": True},
            "batch_p2p_comm=True with virtual_stages=2",
        ),
        # Two stages would take each other's shapes for their own.
        (
            LLAMA,
            ParallelDims(pp=2),
            {"virtual_stages": 2, "variable_seq_lengths": True},
            "variable_seq_lengths: this follows from the grid; leave it out",
        ),
        (
            MIXTURE,
            ParallelDims(dp=2, ep=2),
            {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2},
            "expert_model_parallel_size, tensor_model_parallel_size: this follows from the grid",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    hf: dict[str, Any], dims: ParallelDims, options: dict[str, Any], message: str
) -> None:
    from megatron_utils.gpt import transformer_config

    with pytest.raises(ValueError, match=message):
        transformer_config(hf, dims, **options)
