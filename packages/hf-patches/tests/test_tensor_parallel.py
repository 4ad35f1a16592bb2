"""Models sharded by transformers' own plans over a mesh of ours equal transformers; others are refused by the proof."""

import re

import pytest
import torch
import transformers
from comparing import MIXTURES, STATELESS, TEXT, assert_gradients_equal, gradients, scalar_loss
from packaging.version import Version
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification

from hf_patches import TensorParallel, patch
from hf_patches.testing import one_by_one, random_sequences, randomize, tiny_config, tiny_model
from parallel_layers import PackedSequence

LENGTHS = (11, 1, 17, 6)
SHARDS = Version(transformers.__version__) >= Version("5.23")
needs_plans = pytest.mark.skipif(not SHARDS, reason="transformers cannot shard a model over a mesh of ours before 5.23")
# Divisible by the ranks: the rows of the vocabulary, and the heads of Gemma 4's global layers.
SIZES = {"vocab_size": 64}
OVERRIDES = {"gemma4_text": {"num_global_key_value_heads": 2}}
# The gradient of xIELU's two numbers is each rank's own part.
UNSHARED = {"apertus"}
# Every run has qwen3, too, on four ranks.
FAMILIES = [
    pytest.param(name, marks=() if name in ("llama", "gpt_oss", "qwen3_next") else pytest.mark.slow)
    for name in [*TEXT, "nanochat", "cohere2_moe"]
    if name not in UNSHARED
]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(group: ProcessGroup, name, overrides, experts, options):
    """Return log-probs, entropies, whole gradients of two backwards, decoded logits, and the proof."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = tiny_model(name, **SIZES, **overrides).eval()
    patched = patch(model, family="auto", tensor_parallel=TensorParallel(mesh, experts), **options)
    sequences = random_sequences(LENGTHS, 60)
    for _ in range(2):  # as two micro-batches
        output = model(packed=PackedSequence.from_sequences(sequences))
        scalar_loss(output).backward()
    logits = None
    if name in {*STATELESS, "nanochat", "cohere2_moe"}:
        cache = patched.new_cache(len(sequences), max(LENGTHS))
        with torch.no_grad():
            logits = model(packed=PackedSequence.from_sequences(sequences), cache=cache).logits
    found = {name: whole(x).clone() for name, x in gradients(model).items()}
    head = model.get_output_embeddings().weight
    rows = head.to_local() if isinstance(head, DTensor) else head
    return output.log_probs, output.entropy, found, logits, str(patched.report().proof), tuple(rows.shape)


def check(ranks, name, *, world=2, options=None, **overrides):
    overrides = OVERRIDES.get(name, {}) | overrides
    model = tiny_model(name, **SIZES, **overrides).eval()
    sequences = random_sequences(LENGTHS, 60)
    expected = one_by_one(model, sequences)
    scalar_loss(expected).backward()
    wanted = {name: 2 * x for name, x in gradients(model).items()}
    with torch.no_grad():
        last = torch.stack([model(input_ids=x[None]).logits[0, -1] for x in sequences])
    experts = name in {*MIXTURES, "cohere2_moe", "gemma4_text"}
    results = ranks.run(sharded, name, overrides, experts, options or {}, world=world, timeout=120)
    for log_probs, entropy, found, logits, proof, head in results:
        assert torch.equal(log_probs, results[0][0])
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=3e-5, rtol=0)
        if logits is not None:
            torch.testing.assert_close(logits, last, atol=3e-5, rtol=0)
        assert_gradients_equal(found, wanted, tolerance=3e-5)
        assert f"a copy with {model.config.num_hidden_layers} layers" in proof
        assert head[0] in (64 // world, 64)  # the plans of gpt-oss and Nemotron-H leave the head whole


@needs_plans
@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_transformers(ranks, name):
    check(ranks, name)


@needs_plans
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tied_embeddings_and_recomputed_layers(ranks, world):
    check(ranks, "qwen3", world=world, options={"recompute": "full"}, tie_word_embeddings=True, num_key_value_heads=4)


def values(group: ProcessGroup):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = randomize(
        AutoModelForTokenClassification.from_config(tiny_config("qwen3", **SIZES, num_labels=1)), 0
    ).eval()
    sequences = random_sequences(LENGTHS, 60)
    expected = torch.cat([model(input_ids=x[None]).logits[0, :, 0].detach() for x in sequences])
    patch(model, value_head=True, tensor_parallel=TensorParallel(mesh))
    torch.testing.assert_close(
        model(packed=PackedSequence.from_sequences(sequences)).values, expected, atol=1e-5, rtol=0
    )


@needs_plans
def test_a_value_model(ranks):
    ranks.run(values, world=2, timeout=120)


def refusal(group: ProcessGroup, name, overrides, experts):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = tiny_model(name, **SIZES | overrides).eval()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller reads the text)
        patch(model, family="auto", tensor_parallel=TensorParallel(mesh, experts))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return str(caught.value)


@needs_plans
@pytest.mark.parametrize(
    ("name", "overrides", "experts", "reason"),
    [
        ("apertus", {}, False, r"the gradients of 4 parameters differ; the gradient of .*act_fn.alpha_p differs by"),
        ("gpt2", {}, False, "compared with itself: transformers has no tp_plan of this family"),
        ("qwen3_moe", {}, False, "experts.gate_up_proj in stripes; use ep equal to tp"),
        ("llama", {}, True, "compared with itself: transformers has no ep_plan of this family"),
        (
            "llama",
            {"num_key_value_heads": 1},
            False,
            r"num_key_value_heads=1 is not divisible by tp=2; use tp in \{1\}",
        ),
        ("llama", {"vocab_size": 63}, False, "embed_tokens.weight has 63 elements, not divisible by tp=2"),
        ("falcon", {}, False, "transformers has no tp_plan of this family"),
    ],
)
def test_what_cannot_be_sharded_is_refused(ranks, name, overrides, experts, reason):
    subject = rf"^tp=2 with transformers {re.escape(transformers.__version__)} refuses .*\(model_type='{name}'\).*"
    for text in ranks.run(refusal, name, overrides, experts, world=2, timeout=120):
        assert re.search(subject + reason + ".*; leave out tp, and shard the model by FSDP2$", text), text


# Changes of the plan of Llama and of Phi-3, whose `gate_up_proj` has the rows of the gate first.
WRONG_PLANS = {
    "a linear is missing": ("llama", {"self_attn.o_proj": None}, "shapes cannot be multiplied"),
    "colwise and rowwise are swapped": (
        "llama",
        {"mlp.up_proj": "rowwise", "mlp.down_proj": "colwise"},
        "shapes cannot be multiplied",
    ),
    "an output is summed twice": ("llama", {"mlp": "all_reduce"}, "the output of token . of sequence . differs by"),
    "one rank has all gates": (
        "phi3",
        {"mlp.gate_up_proj": "colwise", "mlp.down_proj": "rowwise"},
        "the output of token . of sequence . differs by",
    ),
}


def refused_plan(group: ProcessGroup, name, changes):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = tiny_model(name, **SIZES).eval()
    plan = model.tp_plan | {f"model.layers.*.{module}": style for module, style in changes.items()}
    model._tp_plan = {module: style for module, style in plan.items() if style is not None}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller reads the text)
        patch(model, tensor_parallel=TensorParallel(mesh))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return str(caught.value)


@needs_plans
@pytest.mark.parametrize("case", WRONG_PLANS)
def test_a_wrong_plan_is_refused(ranks, case):
    name, changes, reason = WRONG_PLANS[case]
    for text in ranks.run(refused_plan, name, changes, world=2, timeout=120):
        assert re.search(rf"^tp=2 with transformers .*\(model_type='{name}'\).*{reason}.*; leave out tp", text), text


def wrong_decoding(group: ProcessGroup):
    from transformers.distributed.tensor_parallel import RowwiseParallel

    original = RowwiseParallel.transform_output_post_forward

    def doubled_without_gradients(self, module, output, mesh):
        return original(self, module, output, mesh) * (1 if torch.is_grad_enabled() else 2)

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(RowwiseParallel, "transform_output_post_forward", doubled_without_gradients)
        with pytest.raises(ValueError, match="logits after decoding with a cache differ by"):
            patch(tiny_model("llama", **SIZES).eval(), tensor_parallel=TensorParallel(mesh))


@needs_plans
def test_a_style_that_computes_otherwise_without_gradients_is_refused(ranks):
    """transformers' linears take another way there."""
    ranks.run(wrong_decoding, world=2, timeout=120)


@needs_plans
def test_models_that_see_images_are_refused(ranks):
    for text in ranks.run(refusal, "qwen2_vl", {}, False, world=2, timeout=120):
        assert text == "there is no proof of tensor parallelism of models that see images ('qwen2_vl'); leave out tp"


def one_rank_fails(group: ProcessGroup):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = tiny_model("llama", **SIZES).eval()
    if group.rank() == 1:
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        patch(model, tensor_parallel=TensorParallel(mesh))
    return str(caught.value)


@needs_plans
def test_no_rank_waits_for_a_rank_that_failed(ranks):
    first, second = ranks.run(one_rank_fails, world=2, timeout=60)
    assert "another rank of the mesh failed" in first
    assert "inv_freq have no values yet" in second


def removal(group: ProcessGroup):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    patched = patch(tiny_model("llama", **SIZES), tensor_parallel=TensorParallel(mesh))
    with pytest.raises(ValueError, match="LlamaForCausalLM is sharded for good; load the model again"):
        patched.remove()


@needs_plans
def test_a_sharded_model_stays_patched(ranks):
    ranks.run(removal, world=2, timeout=60)


def test_an_old_transformers_is_refused(monkeypatch):
    # Other tests import transformers again.
    monkeypatch.setattr(TensorParallel.__post_init__.__globals__["transformers"], "__version__", "5.20.2")
    message = r"needs transformers 5\.23 or later.*installed is 5\.20\.2: pip install 'transformers>=5\.23'"
    with pytest.raises(ValueError, match=message):
        TensorParallel(None)
