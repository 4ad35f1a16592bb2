"""Recurrent layers on packed batches: no influence over a border, and faults that the proof finds."""

import copy
import functools
import sys

import pytest
import torch
import transformers
from comparing import STATELESS_ONLY, assert_gradients_equal, gradients, recurrent, scalar_loss

from hf_patches import Patch, linear_attention, patch, share_prefixes
from hf_patches.batch import plan_batch
from hf_patches.families import vision_of
from hf_patches.families.table import RECURRENT
from hf_patches.linear_attention import find_mixers
from hf_patches.swaps import called_names
from hf_patches.testing.tiny_models import one_by_one, random_sequences, tiny_model
from parallel_layers import PackedSequence

pytestmark = pytest.mark.skipif(STATELESS_ONLY, reason="recurrent layers are refused")
# Below the window of the convolution, empty, one token, a chunk of the recurrence and its neighbours.
LENGTHS = (65, 1, 0, 3, 64, 2, 63)
DENSE = "qwen3_5_text"
MAMBA = ("granitemoehybrid", "nemotron_h")


def forgetful(function):
    """The function over the batch as one sequence."""

    def forget(*operands, **options):
        *operands, cu_seqlens = operands
        return function(*operands, cu_seqlens[[0, -1]], **options)

    return forget


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", recurrent(*RECURRENT))
@pytest.mark.parametrize("name", ["recurrence", "short_convolution"])
def test_forgotten_borders_are_found(monkeypatch, model_type, name):
    model = tiny_model(model_type)
    if name == "recurrence":
        name = "state_space_dual" if model_type in MAMBA else "gated_delta_rule"
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    monkeypatch.setattr(linear_attention, name, forgetful(getattr(linear_attention, name)))
    with pytest.raises(RuntimeError, match=r"and model\.layers\.0\.\w+ alone lets segments influence each other"):
        patch(model)
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("model_type", "name"),
    [(DENSE, "gated_delta_rule"), (DENSE, "short_convolution"), ("nemotron_h", "state_space_dual")],
)
def test_a_gradient_that_crosses_a_border_is_found(monkeypatch, model_type, name):
    """The outputs are right, bit for bit."""
    real = getattr(linear_attention, name)

    def leaks_backward(*operands, **options):
        output, state = real(*operands, **options)
        x = operands[2] if name == "gated_delta_rule" else operands[0]
        return output + 0.01 * (x.cumsum(0) - x.cumsum(0).detach()), state

    monkeypatch.setattr(linear_attention, name, leaks_backward)
    with pytest.raises(RuntimeError, match=r"and model\.layers\.0\.\w+ alone lets segments influence each other"):
        patch(tiny_model(model_type))


def test_another_recurrence_is_found(monkeypatch):
    real = linear_attention.gated_delta_rule

    def forgets_faster(q, k, v, decay, *operands, **options):
        return real(q, k, v, 2 * decay, *operands, **options)

    monkeypatch.setattr(linear_attention, "gated_delta_rule", forgets_faster)
    with pytest.raises(RuntimeError, match=r"the packed form of Qwen3_5GatedDeltaNet computes something else"):
        patch(tiny_model(DENSE))


@pytest.mark.parametrize("model_type", recurrent("granitemoehybrid"))
def test_limits_of_the_steps_are_those_of_transformers(model_type):
    """Almost every step is outside of these limits, and the proof compares with transformers' own code."""
    patch(tiny_model(model_type, time_step_limit=(0.05, 0.1)))


def test_an_operand_that_we_do_not_know_is_refused():
    plan = plan_batch(PackedSequence.from_sequences(random_sequences((3,), 61)), None, "auto")
    x, steps = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)
    operands = (x, steps, -torch.ones(2), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4))
    linear_attention.packed_state_space(*operands, dt_softplus=True, hf_patches_plan=plan, position_ids=x)
    with pytest.raises(ValueError, match="the state space got z, which a packed batch ignores"):
        linear_attention.packed_state_space(*operands, hf_patches_plan=plan, z=x)


def test_states_are_refused():
    plan = plan_batch(PackedSequence.from_sequences(random_sequences((3,), 61)), None, "auto")
    x, gate = torch.randn(1, 3, 2, 4), -torch.rand(1, 3, 2)
    for options in ({"output_final_state": True}, {"initial_state": torch.zeros(1, 2, 4, 4)}):
        with pytest.raises(ValueError, match="starts from zero and keeps no state; pass no cache"):
            linear_attention.packed_delta_rule(x, x, x, gate, -gate, hf_patches_plan=plan, **options)
    for options in ({"return_final_states": True}, {"initial_states": torch.zeros(1, 2, 4, 4)}):
        with pytest.raises(ValueError, match="starts from zero and keeps no state; pass no cache"):
            linear_attention.packed_state_space(x, gate, gate[0, 0], x, x, hf_patches_plan=plan, **options)


def test_an_npu_is_refused():
    with pytest.raises(ValueError, match="npu=True has no operator for Qwen3_5GatedDeltaNet; leave it out"):
        find_mixers(tiny_model(DENSE), npu=True)


def test_tokens_that_mix_elsewhere_in_the_layer_are_found():
    model = tiny_model(DENSE)
    (layer,) = find_mixers(model)
    project = layer.out_proj.forward
    layer.out_proj.forward = lambda x: project(x + 0.01 * x.roll(1, dims=1))
    with pytest.raises(RuntimeError, match=r"and model\.layers\.0\.linear_attn alone"):
        patch(model)


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", recurrent(DENSE, "olmo_hybrid", "nemotron_h"))
def test_one_sequence_has_no_influence_on_another(model_type):
    # Without experts, whose GEMMs tokens of all sequences share.
    layers = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]} if model_type in MAMBA else {}
    model = tiny_model(model_type, **layers)
    patched = patch(model)
    assert patched.probe_result.recurrent_layers == 1
    assert patched.probe_result.leak == patched.probe_result.allowed == 0
    sequences = random_sequences(LENGTHS, 61)
    results = []
    for seed in (0, 1):
        others = random_sequences(LENGTHS, 61, seed)
        packed = PackedSequence.from_sequences(
            [*others[:1], sequences[1], others[2], sequences[3], others[4], sequences[5], others[6]]
        )
        embedded = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda _, __, x, kept=embedded: kept.append(x) or x.retain_grad()
        )
        output = model(packed=packed)
        hook.remove()
        weights = torch.linspace(-1, 1, packed.num_tokens)
        (weights * (output.log_probs + output.entropy)).sum().backward()
        results.append([*map(packed.split, (output.log_probs, output.entropy, embedded[0].grad[0]))])
    for before, after in zip(*results, strict=True):
        assert all(torch.equal(before[i], after[i]) for i in (1, 3, 5))
        assert not any(torch.equal(before[i], after[i]) for i in (0, 4, 6))


@pytest.mark.parametrize("model_type", recurrent(*RECURRENT))
def test_kernels_of_other_packages_are_never_called(monkeypatch, model_type):
    """transformers calls an installed kernel (of fla, causal-conv1d, mamba-ssm) with the keywords that it knows.

    Ours stand in its place, and the proof at the start calls none, too.
    """
    model = tiny_model(model_type)
    code = sys.modules[type(model).__module__]
    sequences = random_sequences((5, 9), 61)
    expected = one_by_one(model, sequences).log_probs
    (mixer,) = find_mixers(model)
    names = [name for name in called_names(mixer) if name in linear_attention._PACKED]
    assert len(names) >= 2
    for name in names:
        with monkeypatch.context() as installed:

            @functools.wraps(getattr(code, name).__wrapped__)
            def kernel(*args, **kwargs):
                raise AssertionError("called")

            installed.setattr(code, name, kernel)
            with pytest.raises(AssertionError, match="called"):
                one_by_one(model, sequences)
            patched = patch(model)
            assert patched.probe_result.leak <= patched.probe_result.allowed
            log_probs = model(packed=PackedSequence.from_sequences(sequences)).log_probs
            torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
            patched.remove()


@pytest.mark.parametrize("way", ["transformers", "full", "selective", "deepcopy"])
def test_recomputed_and_copied(way):
    model = tiny_model(DENSE)
    packed = PackedSequence.from_sequences(random_sequences((11, 1, 17), 61))
    patched = patch(model)
    scalar_loss(model(packed=packed)).backward()
    expected = gradients(model)
    model.zero_grad()
    patched.remove()
    if way == "transformers":
        model.gradient_checkpointing_enable()
    patch(model, recompute=way if way in ("full", "selective") else None)
    if way == "deepcopy":
        model = copy.deepcopy(model)
        assert (
            Patch.of(model).backbone.layers[0].linear_attn.forward.__self__.mixer is model.model.layers[0].linear_attn
        )
    # A second batch between forward and backward has other borders.
    output = model(packed=packed)
    model(packed=PackedSequence.from_sequences(random_sequences((3, 4, 5), 61)))
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected, 0.0)


def test_padded_batches_keep_transformers_own_code():
    model = tiny_model(DENSE)
    sequences = random_sequences((9, 9), 61)
    expected = one_by_one(model, sequences).log_probs.view(2, -1)
    patch(model, packed=False)
    output = model(input_ids=torch.stack(sequences), attention_mask=torch.ones(2, 9, dtype=torch.int64))
    torch.testing.assert_close(output.log_probs, expected, atol=1e-5, rtol=0)


def test_what_a_recurrent_state_does_not_take_is_refused(monkeypatch):
    model = tiny_model(DENSE)
    patched = patch(model)
    heads = random_sequences((4,), 61)
    with pytest.raises(ValueError, match="a cache of keys and values lacks the state of this model's recurrent layers"):
        patched.new_cache(1, 8)
    with pytest.raises(ValueError, match="a prompt that responses share lacks the state"):
        model(packed=share_prefixes(heads, [heads]))
    patched.remove()
    mixer = model.model.layers[0].linear_attn
    mixer.forward = functools.partial(type(mixer).forward, mixer)
    with pytest.raises(ValueError, match="this Qwen3_5GatedDeltaNet has another forward than its class"):
        patch(model)
    monkeypatch.setattr(transformers, "__version__", "5.15.1")
    with pytest.raises(ValueError, match=r"needs transformers 5\.16 or later.*installed is 5\.15\.1"):
        vision_of(model.config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", recurrent(*RECURRENT))
def test_on_cuda(model_type, dtype):
    """The probe proves the kernels there: bitwise equal outputs and gradients of other sequences."""
    # torch's grouped GEMM of experts takes rows of multiples of 16 bytes.
    sizes = {"kimi_linear": {"linear_head_dim": 64}, "nemotron_h": {"moe_latent_size": 24}}.get(
        model_type, {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    )
    probe = patch(tiny_model(model_type, **sizes).to("cuda", dtype)).probe_result
    assert probe.recurrent_layers == 1
    assert probe.leak <= probe.allowed
