"""Norms, rotary embedding and SwiGLU by one kernel each, in every family: proven, reversible, and the same numbers.

On a CPU the kernels' torch counterparts stand for them: `everywhere` lets them run on any tensors.
"""

import copy
import os
import re
from collections import Counter, defaultdict
from unittest import mock

import pytest
import torch
from comparing import NAMED, STATELESS, assert_gradients_equal, gradients, scalar_loss
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hf_patches import kernels, patch
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence
from parallel_layers.kernels import HAS_TRITON, rms_norm
from parallel_layers.mlp import layer as mlp
from parallel_layers.moe import RouterReplay
from parallel_layers.rotary import rotation

LENGTHS = (11, 1, 17, 6)
NORM, ROTARY, SWIGLU = "RMSNorm", "rotary embedding", "SwiGLU"
ALL = frozenset({NORM, ROTARY, SWIGLU})
# What each family gets from kernels, and which of its modules keep their own code.
EXPECTED = {
    **{name: (ALL, set()) for name in NAMED},
    # An xIELU without a gate.
    "apertus": ({NORM, ROTARY}, {"SwiGLU of ApertusMLP"}),
    # Norms with a gate; Kimi Linear rotates nothing.
    "kimi_linear": ({NORM, SWIGLU}, {"RMSNorm of KimiLinearRMSNormGated"}),
    "olmo_hybrid": (ALL, {"RMSNorm of OlmoHybridRMSNormGated"}),
    "qwen3_next": (ALL, {"RMSNorm of Qwen3NextRMSNormGated"}),
    "granitemoehybrid": ({NORM, ROTARY}, {"RMSNorm of GraniteMoeHybridRMSNormGated"}),
    "nemotron_h": ({NORM}, {"RMSNorm of NemotronHRMSNormGated", "SwiGLU of NemotronHMLP"}),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), (ALL, {"RMSNorm of Qwen3_5RMSNormGated"})),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), (ALL, {"RMSNorm of Qwen3_5MoeRMSNormGated"})),
    # Norms that subtract the mean.
    "cohere2": ({ROTARY, SWIGLU}, {"RMSNorm of Cohere2LayerNorm"}),
    # Rotations in complex numbers, and of neighbouring dims into halves.
    "deepseek_v2": ({NORM, SWIGLU}, {"rotary embedding of DeepseekV2Attention"}),
    "deepseek_v3": ({NORM, SWIGLU}, {"rotary embedding of DeepseekV3Attention"}),
    "glm4_moe_lite": ({NORM, SWIGLU}, {"rotary embedding of Glm4MoeLiteAttention"}),
    "kimi_k25": ({NORM, SWIGLU}, {"rotary embedding of DeepseekV3Attention"}),
    # Gates with GELU.
    "gemma2": ({NORM, ROTARY}, {"SwiGLU of Gemma2MLP"}),
    "gemma3_text": ({NORM, ROTARY}, {"SwiGLU of Gemma3MLP"}),
    # Queries and keys rotate in calls of their own.
    "gemma4_text": ({NORM}, {"rotary embedding of Gemma4TextAttention", "SwiGLU of Gemma4TextMLP"}),
    # No MLP but routed experts.
    **{
        name: ({NORM, ROTARY}, set())
        for name in ("gpt_oss", "granitemoe", "minimax_m2", "mixtral", "qwen3_moe", "qwen3_vl_moe")
    },
}


def running_everywhere():
    return mock.patch.object(kernels._Kernel, "takes", return_value=True)


@pytest.fixture
def everywhere():
    with running_everywhere():
        yield


def sequences_of(model):
    return [ids.to(model.device) for ids in random_sequences(LENGTHS, model.config.get_text_config().vocab_size)]


def score(model, **call):
    model.zero_grad()
    output = model(packed=PackedSequence.from_sequences(sequences_of(model)), **call)
    scalar_loss(output).backward()
    return output, gradients(model)


# All that keep a module's own code, and one of each other kind; --slow has all.
IN_EVERY_RUN = {name for name, (_, kept) in EXPECTED.items() if kept and name in STATELESS} | {
    "glm4",
    "gpt_oss",
    "llama",
    "phi3",
    "qwen3",
}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in NAMED],
)
def test_the_same_numbers_in_every_family(everywhere, model_type):
    model = tiny_model(model_type)
    plain = patch(model, kernels=False)
    expected, expected_gradients = score(model)
    plain.remove()
    patched = patch(model)
    report = patched.report()
    used, kept = EXPECTED[model_type]
    assert {
        what for what in ALL if any(change.what == f"{what} in one kernel on CUDA" for change in report.changes)
    } == used
    assert set(filter(None, report.settings.get("no kernel for", "").split(", "))) == kept
    # The start-up probe has compared each with the model's own code, on the model's own numbers.
    assert patched.probe_result.kernels >= 2
    assert patched.probe_result.kernel_error <= 8
    assert "kernels ran in place of the model's own code" in str(report)
    output, ours = score(model)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=2e-6, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=2e-6, rtol=0)
    assert_gradients_equal(ours, expected_gradients, 1e-5)


def squared_errors(scores, found, expected, expected_gradients):
    """Return the relative errors of log-probs, entropies and each kind of gradient, summed over the layers."""
    total = defaultdict(float)
    for name in ("log_probs", "entropy"):
        total[name] = (getattr(scores, name) - getattr(expected, name)).square().sum().item()
    for name, wanted in expected_gradients.items():
        error = (found[name].float() - wanted).square().sum() / wanted.square().sum()
        total[re.sub(r"\d+", "*", name)] += error.item()
    return Counter(total)


@pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("model_type", ["llama", "phi3", "glm4", "cohere2", "gpt_oss", "gemma3_text", "qwen3"])
def test_the_kernels_themselves_in_tritons_interpreter(monkeypatch, model_type):
    model = tiny_model(model_type)
    plain = patch(model, kernels=False)
    expected, expected_gradients = score(model)
    plain.remove()
    for module in (kernels, mlp, rms_norm, rotation):
        monkeypatch.setattr(module, "use_triton", lambda *tensors: True)
    patched = patch(model)
    assert patched.probe_result.kernels >= 3
    assert patched.probe_result.leak <= patched.probe_result.allowed
    output, ours = score(model)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    assert_gradients_equal(ours, expected_gradients, 2e-5)


# Every expert for every token: a rounding that sends a token to other experts would drown all others.
BF16 = {"llama": {}, "qwen3": {}, "gemma2": {}, "mixtral": {"num_experts_per_tok": 4}}


def assert_at_most_as_wrong(model_type, lengths, device, seeds, **overrides):
    """bf16 with kernels against fp32, beside unpatched bf16 transformers: 1.5 times its error at most."""
    ours, dense = Counter(), Counter()
    for seed in range(seeds):
        model = tiny_model(model_type, seed=seed, **BF16[model_type], **overrides).bfloat16().to(device)
        truth = copy.deepcopy(model).float()
        sequences = [ids.to(device) for ids in random_sequences(lengths, model.config.vocab_size, seed)]
        results = []
        for plain in (truth, model):
            scores = one_by_one(plain, sequences)
            scalar_loss(scores).backward()
            results.append((scores, gradients(plain)))
        model.zero_grad()
        patch(model)
        output = model(packed=PackedSequence.from_sequences(sequences))
        scalar_loss(output).backward()
        dense += squared_errors(*results[1], *results[0])
        ours += squared_errors(output, gradients(model), *results[0])
    ratios = {name: (ours[name] / dense[name]) ** 0.5 for name in dense}
    assert max(ratios.values()) <= 1.5, ratios


@pytest.mark.parametrize(
    "model_type", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "gemma2")), "mixtral"]
)
def test_bf16_is_at_most_as_far_from_the_truth_as_transformers(everywhere, model_type):
    assert_at_most_as_wrong(model_type, LENGTHS, "cpu", seeds=3)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"value_head": True}),
        ("llama", {"tiled_mlp": 3}),
        ("phi3", {"tiled_mlp": 3}),
        ("mixtral", {"router_replay": True}),
        ("qwen3", {"keep_probabilities": True}),
    ],
)
def test_beside_the_other_options(everywhere, model_type, options):
    model = tiny_model(model_type)
    call = {"router_replay": RouterReplay()} if "router_replay" in options else {}
    plain = patch(model, kernels=False, **options)
    expected, expected_gradients = score(model, **call)
    plain.remove()
    patched = patch(model, **options)
    call = {name: replay.replaying() for name, replay in call.items()}
    output, ours = score(model, **call)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=2e-6, rtol=0)
    if output.values is not None:
        torch.testing.assert_close(output.values, expected.values, atol=2e-6, rtol=0)
    assert_gradients_equal(ours, expected_gradients, 1e-5)
    assert patched.probe_result.kernels == 9 + 4 * (model_type == "qwen3") - 2 * (model_type == "mixtral")


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(everywhere, reentrant):
    model = tiny_model("qwen3")
    patched = patch(model)
    expected, expected_gradients = score(model)
    patched.remove()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    patch(model)
    output, ours = score(model)
    assert torch.equal(output.log_probs, expected.log_probs)
    assert_gradients_equal(ours, expected_gradients, 1e-6)


@pytest.mark.parametrize("model_type", ["llama", "glm4", "gpt_oss"])
def test_padded_batches(everywhere, model_type):
    model = tiny_model(model_type)
    ids, mask = torch.randint(3, 61, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    ids[1, 6:], mask[1, 6:] = 0, 0
    results = []
    for use in (False, True):
        model.zero_grad()
        patched = patch(model, packed=False, kernels=use)
        output = model(input_ids=ids, attention_mask=mask)
        (output.log_probs * mask).sum().backward()
        results.append((output.log_probs.detach() * mask, gradients(model)))
        patched.remove()
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-6, rtol=0)
    assert_gradients_equal(results[1][1], results[0][1], 1e-5)


def sharded(group: ProcessGroup, model_type):
    model = tiny_model(model_type)
    with running_everywhere():
        patch(model, sequence_parallel_group=group)
        output, found = score(model)
    return output.log_probs.detach(), found


@pytest.mark.parametrize("model_type", ["qwen3", "glm4"])
def test_over_sequence_parallel_ranks(ranks, model_type):
    model = tiny_model(model_type)
    patch(model, kernels=False)
    expected, expected_gradients = score(model)
    results = ranks.run(sharded, model_type, world=2, timeout=120)
    for log_probs, _ in results:
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
    summed = {name: sum(found[name] for _, found in results) for name in expected_gradients}
    assert_gradients_equal(summed, expected_gradients)


def fully_sharded(group: ProcessGroup):
    model = tiny_model("qwen3")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with running_everywhere():
        patched = patch(model)
        output, _ = score(model)
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return patched.probe_result.kernels, output.log_probs.detach(), found


def test_sharded_by_fsdp2_before_the_patch(ranks):
    model = tiny_model("qwen3")
    patch(model, kernels=False)
    expected, expected_gradients = score(model)
    for count, log_probs, found in ranks.run(fully_sharded, world=2, timeout=120):
        assert count == 13
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        assert_gradients_equal(found, expected_gradients)


def test_decoding_equals_the_whole_forward(everywhere):
    model = tiny_model("qwen3").eval()
    patched = patch(model)
    ids = random_sequences((9,), 61)[0]
    cache = patched.new_cache(1, 16)
    with torch.no_grad():
        for step in (ids[:5], ids[5:6], ids[6:]):
            logits = model(packed=PackedSequence.from_sequences([step]), cache=cache).logits
        patched.remove()
        expected = model(input_ids=ids[None]).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_on_a_cpu_the_models_own_code_runs_bit_for_bit():
    model = tiny_model("llama")
    results = []
    for use in (False, True):
        patched = patch(model, kernels=use)
        output, found = score(model)
        results.append((output.log_probs, *found.values()))
        assert patched.probe_result.kernels == 0
        patched.remove()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_deep_copy_has_kernels_of_its_own(everywhere):
    model = tiny_model("llama")
    patch(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    output, found = score(copied)
    expected = one_by_one(tiny_model("llama"), sequences_of(model))
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    assert all(gradient.abs().max() > 0 for gradient in found.values())


def test_parameters_on_the_meta_device_are_proven_all_the_same(everywhere):
    patched = patch(tiny_model("gemma2").to("meta"))
    assert sum(change.what.endswith("in one kernel on CUDA") for change in patched.report().changes) == 11
    assert patched.report().settings["no kernel for"] == "SwiGLU of Gemma2MLP"


def test_norms_of_another_type_than_the_activations_keep_the_models_type(everywhere):
    model = tiny_model("llama").bfloat16()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    norm = model.model.layers[0].input_layernorm
    x = torch.randn(3, 32).bfloat16()
    expected = norm(x)
    patch(model, probe=False)
    assert expected.dtype == norm(x).dtype == torch.float32
    assert torch.equal(norm(x), expected)


def test_cos_and_sin_of_another_type_keep_the_models_type(everywhere):
    # OLMo 2 keeps them in fp32, and queries in bf16; Llama's queries become what they are.
    for model_type, dtype in (("olmo2", torch.bfloat16), ("llama", torch.float32)):
        model = tiny_model(model_type)
        patch(model)
        rotate = model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
        q, cos = torch.randn(1, 4, 5, 8).bfloat16(), torch.ones(1, 5, 8)
        assert rotate(q, q, cos, cos)[0].dtype == dtype


def test_what_computes_something_else_keeps_its_code(everywhere):
    # Dropout behind the product, a norm with another forward, one that scales, and an MLP that clamps.
    model = tiny_model("seed_oss", residual_dropout=0.5)
    assert patch(model).report().settings["no kernel for"] == "SwiGLU of SeedOssMLP"
    model = tiny_model("llama")
    replaced = model.model.norm.forward = lambda x: 2 * x
    patched = patch(model)
    assert patched.report().settings["no kernel for"] == "RMSNorm of LlamaRMSNorm"
    assert model.model.norm.forward is replaced
    assert patched.probe_result.kernels == 8
    patched.remove()

    class ClampedMLP(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.5) * self.up_proj(x))

    class ScaledRMSNorm(type(model.model.norm)):
        def forward(self, hidden_states):
            return 1.5 * super().forward(hidden_states)

    model.model.layers[1].mlp.__class__ = ClampedMLP
    model.model.layers[1].input_layernorm.__class__ = ScaledRMSNorm
    kept = patch(model).report().settings["no kernel for"]
    assert set(kept.split(", ")) == {
        "RMSNorm of LlamaRMSNorm",
        "RMSNorm of ScaledRMSNorm",
        "SwiGLU of ClampedMLP",
    }


@pytest.mark.parametrize(
    ("name", "what"), [("rms_norm", NORM), ("_swiglu", SWIGLU), ("rotate_queries_and_keys", ROTARY)]
)
def test_a_kernel_that_computes_something_else_never_stays(everywhere, monkeypatch, name, what):
    right = getattr(kernels, name)

    def wrong(*args, **options):
        result = right(*args, **options)
        return tuple(1.25 * x for x in result) if isinstance(result, tuple) else 1.25 * result

    later = patch(tiny_model("llama"), probe=False)
    monkeypatch.setattr(kernels, name, wrong)
    # Proven before, wrong on the model's own numbers: the probe raises.
    with pytest.raises(RuntimeError, match=r"the kernel for .* computes something else"):
        later.probe()
    # Wrong from the start: the model keeps its code.
    patched = patch(tiny_model("llama"))
    assert patched.report().settings["no kernel for"].startswith(what)


def test_probabilities_are_the_fused_heads():
    with pytest.raises(ValueError, match="leave out fused_head=False"):
        patch(tiny_model("llama"), fused_head=False, keep_probabilities=True)


SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 515}


@pytest.mark.gpu
@pytest.mark.parametrize(("model_type", "count"), [("llama", 9), ("qwen3", 13), ("gemma2", 11), ("mixtral", 7)])
def test_kernels_on_cuda_equal_transformers(model_type, count):
    probe = patch(tiny_model(model_type, **SHAPE).bfloat16().cuda()).probe_result
    assert probe.kernels == count
    assert probe.leak <= probe.allowed
    assert_at_most_as_wrong(model_type, (130, 1, 200, 66), "cuda", seeds=8, **SHAPE)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", NAMED)
def test_every_family_on_cuda(model_type):
    # In fp32, where kernels and transformers differ by the order of sums alone; experts' choices are those of a replay.
    model = tiny_model(model_type).cuda()
    replay = RouterReplay()
    options = {"router_replay": None}
    plain = patch(model, kernels=False, **options)
    routed = {"router_replay": replay} if plain.routers else {}
    expected, expected_gradients = score(model, **routed)
    plain.remove()
    patched = patch(model, **options)
    replaced = [change for change in patched.report().changes if change.what.endswith("in one kernel on CUDA")]
    # Layers without positions never call their rotation.
    without_positions = {"cohere2": 1, "exaone4": 1, "smollm3": 1}.get(model_type, 0)
    probe = patched.probe_result
    assert probe.kernels - probe.recurrent_layers == len(replaced) - without_positions >= 2
    output, ours = score(model, **{name: replay.replaying() for name in routed})
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-4, rtol=0)
    assert_gradients_equal(ours, expected_gradients, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "glm4"])
def test_padded_batches_on_cuda(model_type):
    model = tiny_model(model_type, **SHAPE).cuda()
    ids, mask = torch.randint(3, 515, (3, 90), device="cuda"), torch.ones(3, 90, dtype=torch.int64, device="cuda")
    mask[1, :30] = 0
    scores = []
    for use in (False, True):
        patched = patch(model, packed=False, kernels=use)
        scores.append(model(input_ids=ids, attention_mask=mask).log_probs.detach() * mask)
        patched.remove()
    torch.testing.assert_close(scores[1], scores[0], atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("keep_probabilities", [False, True])
def test_a_patched_step_on_cuda_does_not_wait_for_the_device(keep_probabilities):
    model = tiny_model("qwen3", **SHAPE).bfloat16().cuda()
    patch(model, keep_probabilities=keep_probabilities)
    packed = PackedSequence.from_sequences([ids.cuda() for ids in random_sequences((130, 1, 200, 66), 515)])
    for mode in ("default", "error"):  # once to compile kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = model(packed=packed)
            (output.log_probs.sum() + output.entropy.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_kernels_on_cuda_hold_less_memory():
    model = tiny_model("llama", **SHAPE).bfloat16().cuda()
    packed = PackedSequence.from_sequences([torch.randint(515, (8192,), device="cuda")])
    held = []
    for use in (True, False):
        patched = patch(model, kernels=use)
        before = torch.cuda.memory_allocated()
        output = model(packed=packed)
        held.append(torch.cuda.memory_allocated() - before)
        del output
        patched.remove()
    assert held[0] < 0.85 * held[1], held
