"""Models of `build_hybrid` against transformers, one sequence at a time: outputs, gradients, and what packing leaks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.core_version import INSTALLED
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.testing import RankPool

LENGTHS = [11, 1, 3, 9]
MICRO_BATCHES = [[0, 1], [2, 3]]
VOCABULARY = 36
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
DENSE = {**SIZES, "num_hidden_layers": 4, "rms_norm_eps": 1e-6}
# For each family of transformers: its config, the pattern of its layers, the config of `build_hybrid` and its options.
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 5}
DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_num_value_heads": 4, "linear_value_head_dim": 5},
    "linear_conv_kernel_dim": 3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "nemotron_h": (
        {
            **SIZES, **MAMBA, "time_step_min": 1e-9, "layer_norm_epsilon": 1e-5,
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        },
        "M*M-",
        {**SIZES, "model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [0] * 4, "rms_norm_eps": 1e-5,
         "pad_token_id": None},
        {"mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_state_dim": 5,
         "activation_func": "squared_relu", "gated_linear_unit": False},
    ),
    "qwen3_next": (
        {
            **SIZES, **DELTA, **EXPERTS, "num_hidden_layers": 2, "shared_expert_intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
        "GE*E",
        {**SIZES, **EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
         "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {**DELTA, "layernorm_zero_centered_gamma": True, "attention_output_gate": True,
         "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    ),
}  # fmt: skip

needs_hybrid = pytest.mark.skipif(not INSTALLED.hybrid, reason="needs Megatron-Core 0.18")


def options_of(name: str) -> dict[str, Any]:
    from megatron.core.activations import squared_relu

    options = MODELS[name][3]
    return options | ({"activation_func": squared_relu} if "activation_func" in options else {})


class Case:
    """A transformers model, its loss over sequences, and the gradient of every parameter."""

    def __init__(self, name: str, multiple_of: int) -> None:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **MODELS[name][0])
        with pytest.MonkeyPatch.context() as patch:
            for package in ("fla", "mamba_ssm", "causal_conv1d"):  # transformers decides when it imports a family
                patch.setitem(sys.modules, package, None)
            self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.sequences = [torch.randint(0, VOCABULARY, (n,)) for n in LENGTHS]
        self.packed = [
            PackedSequence.from_sequences([self.sequences[i] for i in indices], multiple_of=multiple_of)
            for indices in MICRO_BATCHES
        ]
        self.labels = [next_token_labels(batch) for batch in self.packed]
        self.weights = [torch.randn(n) for n in LENGTHS]
        self.log_probs = []
        for ids in self.sequences:
            log_p = self.model(input_ids=ids[None]).logits[0].log_softmax(-1)
            self.log_probs.append(torch.cat([log_p[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1)]))
        sum((w * p).sum() for w, p in zip(self.weights, self.log_probs, strict=True)).backward()
        self.gradients = {key: parameter.grad for key, parameter in self.model.named_parameters()}

    def loss(self, output: Any, number: int) -> Tensor:
        parts = zip(MICRO_BATCHES[number], self.packed[number].split(output.log_probs), strict=True)
        return sum((self.weights[i] * p).sum() for i, p in parts)


def load(chunks: Any, case: Case) -> None:
    from hybrid_weights import expected_parameters

    with torch.no_grad():
        for chunk in chunks:
            expected = expected_parameters(chunk, case.model.config, case.model.state_dict())
            for name, parameter in chunk.named_parameters():
                assert parameter.shape == expected[name].shape, name
                parameter.copy_(expected[name])


@contextlib.contextmanager
def entered(dims: ParallelDims, virtual_stages: int | None = None) -> Iterator[Any]:
    """A grid on a CPU. Megatron-Core compiles parts of a gated delta network; here they run as they are."""
    from megatron_utils import megatron_grid
    from megatron_utils.testing import cpu_stand_in

    with (
        cpu_stand_in(),
        torch.compiler.set_stance("force_eager"),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages, seed=1) as grid,
    ):
        yield grid


def parity_on(group: ProcessGroup, name: str, dims: ParallelDims, virtual_stages: int | None, options: Any) -> None:
    from hybrid_weights import expected_parameters

    from megatron_utils.hybrid import build_hybrid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule

    case = Case(name, dims.tp)
    _, pattern, config, _ = MODELS[name]
    with entered(dims, virtual_stages) as grid:
        chunks = build_hybrid(config, pattern, grid, **options_of(name), **options)
        load(chunks, case)
        wrapped = wrap_data_parallel(chunks, grid)
        outputs = run_schedule(wrapped, case.packed, grid, labels=case.labels, loss=case.loss)
        for batch, indices, output in zip(case.packed, MICRO_BATCHES, outputs, strict=True):
            for i, log_probs in zip(indices, batch.split(output.log_probs), strict=True):
                torch.testing.assert_close(log_probs, case.log_probs[i].detach(), rtol=1e-5, atol=1e-5)
        largest = max(gradient.abs().max() for gradient in case.gradients.values())
        for chunk in chunks:
            expected = expected_parameters(chunk, case.model.config, case.gradients, weights=False)
            for key, parameter in chunk.named_parameters():
                error = (parameter.main_grad - expected[key]).abs().max()
                assert error <= 1e-5 * largest, f"{key}: {error} of {largest}"
        step = Optimizer(wrapped, grid, OptimizerConfig(lr=1e-3)).step()
    norm = torch.stack([gradient.norm() for gradient in case.gradients.values()]).norm()
    torch.testing.assert_close(torch.tensor(step.grad_norm), norm, rtol=1e-5, atol=0)


@needs_hybrid
@pytest.mark.parametrize(
    ("name", "dims", "virtual_stages", "options"),
    [
        ("nemotron_h", ParallelDims(), None, {}),
        ("nemotron_h", ParallelDims(tp=2), None, {}),
        ("nemotron_h", ParallelDims(tp=2), None, {"sequence_parallel": False}),
        ("nemotron_h", ParallelDims(pp=2), 2, {}),
        ("nemotron_h", ParallelDims(pp=2, tp=2), None, {"layers_per_stage": [1, 3]}),
        ("qwen3_next", ParallelDims(), None, {}),
        ("qwen3_next", ParallelDims(tp=2), None, {}),
        ("qwen3_next", ParallelDims(pp=2), None, {}),
        ("qwen3_next", ParallelDims(dp=2, ep=2), None, {}),
    ],
    ids=str,
)
def test_hybrid_models_are_those_of_transformers(
    ranks: RankPool, name: str, dims: ParallelDims, virtual_stages: int | None, options: Any
) -> None:
    ranks.run(parity_on, name, dims, virtual_stages, options, world=dims.world_size)


def influence_on(group: ProcessGroup, name: str) -> None:
    """Sequence 1 changes, and sequence 2 has the same bits, in log-probs and gradients."""
    from megatron_utils.hybrid import build_hybrid

    case, (_, pattern, config, _) = Case(name, 1), MODELS[name]
    with entered(ParallelDims()) as grid:
        (chunk,) = build_hybrid(config, pattern, grid, **options_of(name))
        load([chunk], case)
        found = []
        for first in (case.sequences[0], case.sequences[0].flip(0)):
            batch = PackedSequence.from_sequences([first, case.sequences[3]])
            chunk.zero_grad()
            _, log_probs = batch.split(chunk(batch, next_token_labels(batch)).log_probs)
            log_probs.sum().backward()
            found.append([log_probs.detach(), *(parameter.grad.clone() for parameter in chunk.parameters())])
        # Rows of other words of the embedding are 0 in both.
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@needs_hybrid
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_sequence_has_no_influence_on_another(ranks: RankPool, name: str) -> None:
    ranks.run(influence_on, name, world=1)


def on_gpu(group: ProcessGroup, name: str) -> None:
    """Log-probs in fp32 by the kernels that are installed, also with another sequence before.

    A product over the tokens of an expert may take another kernel for another number of tokens.
    """
    from megatron_utils import megatron_grid
    from megatron_utils.hybrid import build_hybrid

    case, (_, pattern, config, _) = Case(name, 1), MODELS[name]
    with megatron_grid(ParallelDims(), ranks=[0], seed=1) as grid, torch.no_grad():
        (chunk,) = build_hybrid(config, pattern, grid, **options_of(name))
        load([chunk], case)
        rows = []
        for first in (case.sequences[0], case.sequences[0].flip(0)):
            batch = PackedSequence.from_sequences([first.cuda(), case.sequences[3].cuda()])
            rows.append(batch.split(chunk(batch, next_token_labels(batch)).log_probs))
        torch.testing.assert_close(rows[0][1], rows[1][1], rtol=0, atol=1e-5)
        for found, expected in zip(rows[0], (case.log_probs[0], case.log_probs[3]), strict=True):
            torch.testing.assert_close(found.cpu(), expected.detach(), rtol=0, atol=2e-3)


@needs_hybrid
@pytest.mark.gpu(1)
def test_gated_delta_networks_on_a_gpu(four_nccl_ranks: RankPool) -> None:
    four_nccl_ranks.run(on_gpu, "qwen3_next", world=1)


def saved_on(group: ProcessGroup, name: str, root: str, dims: ParallelDims, save: bool) -> None:
    from hybrid_weights import expected_parameters

    from megatron_utils.dist_checkpointing import load_checkpoint, save_checkpoint
    from megatron_utils.hybrid import build_hybrid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel

    case, (_, pattern, config, _) = Case(name, 1), MODELS[name]
    with entered(dims) as grid:
        chunks = build_hybrid(config, pattern, grid, **options_of(name))
        if save:
            load(chunks, case)
        optimizer = Optimizer(wrap_data_parallel(chunks, grid), grid, OptimizerConfig(lr=1e-3))
        if save:
            save_checkpoint(root, 1, optimizer, grid)
            return
        load_checkpoint(root, optimizer, grid)
        for chunk in chunks:
            expected = expected_parameters(chunk, case.model.config, case.model.state_dict())
            assert all(torch.equal(parameter, expected[key]) for key, parameter in chunk.named_parameters())


@needs_hybrid
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_move_between_grids(ranks: RankPool, name: str, tmp_path: Path) -> None:
    ranks.run(saved_on, name, str(tmp_path), ParallelDims(tp=2), True, world=2)
    ranks.run(saved_on, name, str(tmp_path), ParallelDims(pp=2), False, world=2)
    ranks.run(saved_on, name, str(tmp_path), ParallelDims(), False, world=1)


def refused_on(group: ProcessGroup, changes: dict[str, Any]) -> str:
    from megatron_utils.hybrid import build_hybrid

    _, pattern, config, options = MODELS["qwen3_next"]
    config = changes.pop("config", config)
    with entered(ParallelDims(**changes.pop("dims", {}))) as grid:
        try:
            build_hybrid(config, changes.pop("pattern", pattern), grid, **options, **changes)
        except (ValueError, ImportError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")


@needs_hybrid
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "GE*X"}, "ValueError: pattern='GE*X' has 'X'; a layer is one of M (Mamba-2), G (a gated delta"),
        ({"pattern": "GE*"}, "ValueError: pattern='GE*' has 3 layers and num_hidden_layers is 4; give a letter"),
        ({"dims": {"cp": 2}}, "ValueError: cp=2 is not supported by hybrid models on Megatron-Core; use cp=1"),
        (
            {"dims": {"tp": 2}, "sequence_parallel": False},
            "ValueError: sequence_parallel=False with tp > 1 is not supported by gated delta networks",
        ),
        (
            {"config": {**DENSE, "model_type": "olmo2", "head_dim": None}, "pattern": "G-*-"},
            "ValueError: olmo2 has norm_placement='post', which no layer of a hybrid model has here",
        ),
        (
            {"config": {**DENSE, "model_type": "qwen3"}},
            "ValueError: pattern='GE*E' has experts (E), and qwen3 has none; use - for an MLP",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_what_a_hybrid_model_cannot_be_is_refused(ranks: RankPool, changes: dict[str, Any], message: str) -> None:
    dims = ParallelDims(**changes.get("dims", {}))
    for found in ranks.run(refused_on, changes, world=dims.world_size):
        assert found.startswith(message)


def without_kernels_on(group: ProcessGroup) -> None:
    import importlib.util

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        found = refused_on(group, {})
        assert found.endswith("a gated delta network on Megatron-Core needs kernels that are not installed: "
                              "pip install fla-core")  # fmt: skip


@needs_hybrid
def test_missing_kernels_are_named(ranks: RankPool) -> None:
    ranks.run(without_kernels_on, world=1)


@pytest.mark.skipif(INSTALLED.hybrid, reason="Megatron-Core 0.18 and newer have hybrid models")
def test_an_older_core_is_refused_with_the_command() -> None:
    from megatron_utils.hybrid import build_hybrid

    with pytest.raises(ImportError, match=r"megatron-core 0.1[67].* hybrid models need 0.18 or newer: pip install"):
        build_hybrid({}, "M*", None)  # type: ignore[arg-type]
