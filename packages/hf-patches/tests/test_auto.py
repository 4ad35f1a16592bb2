"""`family="auto"`: model types without a row are patched after a proof, or refused with what differed."""

import shutil

import made_up
import pytest
import torch
from comparing import assert_gradients_equal, gradients, scalar_loss
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForTokenClassification, dynamic_module_utils

from hf_patches import Patch, patch, reduced
from hf_patches.reduced import reduced_copy
from hf_patches.testing.tiny_models import one_by_one, random_sequences, randomize, tiny_config, tiny_model
from parallel_layers import PackedSequence

LENGTHS = (11, 1, 37, 6)
UNNAMED = {
    "cohere",
    "cohere2_moe",
    "gpt2",
    "gpt_neox",
    "ministral",
    "nanochat",
    "olmo",
    "opt",
    "starcoder2",
    "vaultgemma",
}
LIKE_LLAMA = {"ministral", "olmo", "starcoder2", "vaultgemma"}  # the quick run has nanochat, and those of other layers


def assert_packed_equals_one_by_one(model):
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    expected = one_by_one(model, sequences, 0.8)
    scalar_loss(expected).backward()
    # A bias of keys alone changes nothing: its gradient is rounding.
    expected_gradients = {name: x for name, x in gradients(model).items() if x.abs().max() > 1e-5}
    model.zero_grad()
    proof = patch(model, family="auto").report().proof
    assert all(parameter.grad is None for parameter in model.parameters())
    assert max(proof.output_error, proof.gradient_error) < 3e-5
    output = model(packed=PackedSequence.from_sequences(sequences), temperature=0.8)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=3e-5, rtol=0)
    scalar_loss(output).backward()
    actual_gradients = {name: x for name, x in gradients(model).items() if name in expected_gradients}
    assert_gradients_equal(actual_gradients, expected_gradients, tolerance=3e-5)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_LLAMA else ())
        for name in sorted(UNNAMED.intersection(CONFIG_MAPPING.keys()))
    ],
)
def test_a_type_without_a_row_is_right(model_type):
    assert_packed_equals_one_by_one(tiny_model(model_type).eval())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("falcon", r"TypeError in modeling_falcon\.py, line \d+"),
        ("gpt_neo", "0 of 2 layers"),
        ("phi", "output embedding with a bias"),
        ("bert", "no text backbone"),
    ],
)
def test_a_type_that_cannot_be_packed_is_refused(model_type, reason):
    model = tiny_model(model_type).eval()
    with pytest.raises(ValueError, match=f"family='auto' refuses .*{model_type}.*{reason}"):
        patch(model, family="auto")
    assert Patch.of(model) is None
    model(input_ids=torch.arange(5)[None])


def test_code_from_a_checkpoint(tmp_path, monkeypatch):
    """As `from_pretrained(..., trust_remote_code=True)` loads it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = made_up.MadeUpConfig(
        auto_map={"AutoConfig": "made_up.MadeUpConfig", "AutoModelForCausalLM": "made_up.MadeUpForCausalLM"}
    )
    made_up.MadeUpForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(made_up.__file__, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, attn_implementation="eager")
    assert type(model).__module__.startswith("transformers_modules.")
    assert_packed_equals_one_by_one(randomize(model, seed=0))


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("positions", r"the output of token \d+ of sequence \d .*first module .*is places"),
        ("mixes", r"moved it by .*, other tokens by .*, so its segments are not kept apart"),
        ("batch", r"segments are not kept apart"),
        ("window", r"the output of token \d+ of sequence \d .*first module .*is blocks\.1\.attention\.out"),
        ("bias", "MadeUpAttention got attention_bias, which a packed batch ignores"),
        ("gradient", r"the gradients of \d+ parameters differ; the gradient of model\.embed\.weight differs by"),
        ("cache", "logits after decoding with a cache differ"),
        ("head", "MadeUpForCausalLM transforms its logits by neither a factor nor a soft-cap"),
    ],
)
def test_a_mistake_that_packing_exposes_is_named(flaw, reason):
    model = randomize(made_up.MadeUpForCausalLM(made_up.MadeUpConfig(flaw=flaw)), seed=0).eval()
    with pytest.raises(ValueError, match=rf"refuses MadeUpForCausalLM \(model_type='made_up'\).*{reason}"):
        patch(model, family="auto")


def test_a_value_model():
    model = AutoModelForTokenClassification.from_config(tiny_config("starcoder2", num_labels=1)).eval()
    sequences = random_sequences(LENGTHS, 61)
    expected = torch.cat([model(input_ids=x[None]).logits[0, :, 0] for x in sequences])
    assert patch(model, family="auto", value_head=True).proof.layers == 2
    values = model(packed=PackedSequence.from_sequences(sequences)).values
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_the_copy_keeps_a_layer_of_each_kind():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny_model("gemma3_text", num_hidden_layers=12, layer_types=kinds * 2, vocab_size=5000, sliding_window=40)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small = reduced_copy(model.bfloat16())
    layers = small.model.layers
    assert [layer.self_attn.sliding_window for layer in layers] == [4, 4, None]
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    assert small.config.layer_types == kinds[-3:]
    assert small.model.embed_tokens.weight.shape == (1024, 32)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert {x.dtype for x in small.parameters()} == {torch.float32}
    assert (len(model.model.layers), model.config.vocab_size, model.config.sliding_window) == (12, 5000, 40)
    assert all(torch.equal(x, before[name].bfloat16()) for name, x in model.state_dict().items())


def test_a_copy_that_does_not_fit_is_refused(monkeypatch):
    model = tiny_model("gpt2")
    monkeypatch.setattr(reduced, "available_memory", lambda: 10**5)
    with pytest.raises(ValueError, match=r"a copy with 2 layers needs 0\.\d GB .*, and 0\.0 GB are free"):
        patch(model, family="auto")


def test_what_auto_does_not_take():
    assert patch(tiny_model("llama"), family="auto").report().proof is None
    with pytest.raises(ValueError, match=r"model_type='gpt2' is not among .*; pass family='auto'"):
        patch(tiny_model("gpt2"))
    with pytest.raises(ValueError, match="family='gpt2' must be 'auto'"):
        patch(tiny_model("gpt2"), family="gpt2")
    with pytest.raises(ValueError, match="leave out packed=False"):
        patch(tiny_model("gpt2"), family="auto", packed=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("gpt_neox"))
    with pytest.raises(ValueError, match="have no values yet"):
        patch(model, family="auto")
