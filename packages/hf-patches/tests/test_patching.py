"""One model patched: the same numbers and gradients as transformers one by one, and nothing else changed."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from comparing import OLD, assert_gradients_equal, gradients, scalar_loss
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaForCausalLM

from hf_patches import Patch, patch
from hf_patches.attention import ATTENTION_NAME, packed_attention_forward
from hf_patches.batch import PLAN_KEYWORD, plan_batch
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

LENGTHS = (11, 1, 17, 6)


def fingerprint(model):
    """All that a patch could leave behind: each module's class, own attributes, hooks and config contents."""
    return {
        name: (
            type(module),
            {key: id(value) for key, value in module.__dict__.items() if not key.startswith("_")},
            {key: list(value) for key, value in module.__dict__.items() if "hooks" in key},
            repr(module.__dict__.get("config")),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing_keeps_the_plan(options):
    model, plain = tiny_model("llama"), tiny_model("llama")
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    scalar_loss(one_by_one(plain, sequences)).backward()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    patch(model)
    scalar_loss(model(packed=PackedSequence.from_sequences(sequences))).backward()
    assert_gradients_equal(gradients(model), gradients(plain))


def test_perturbing_one_sequence_changes_no_other_exactly():
    model = tiny_model("llama")
    patch(model)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    embedding = model.get_input_embeddings()
    results = []
    for other in (sequences[2], sequences[2].roll(1)):
        inputs = []
        handle = embedding.register_forward_hook(lambda _, __, out: inputs.append(out.requires_grad_()) or out)  # noqa: B023
        output = model(packed=PackedSequence.from_sequences([*sequences[:2], other, sequences[3]]))
        handle.remove()
        keep = torch.ones(sum(LENGTHS), dtype=torch.bool)
        keep[12:29] = False
        (gradient,) = torch.autograd.grad(output.log_probs[keep].sum() + output.entropy[keep].sum(), inputs)
        assert gradient[0, ~keep].abs().max() == 0
        results.append((output.log_probs[keep], output.entropy[keep], gradient[0, keep]))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


class Copies(TorchDispatchMode):
    """Lists the operators that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::select_backward"):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_attention_copies_no_gradient():
    """Projections give `[1, T, heads, D]`, whose transposes attention takes."""
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 100))
    plan = {PLAN_KEYWORD: plan_batch(packed, None, "reference")}
    projected = [torch.randn(1, packed.num_tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out, _ = packed_attention_forward(torch.nn.Module(), *(x.transpose(1, 2) for x in projected), **plan)
    with Copies() as copies:
        torch.autograd.grad(out, projected, torch.randn_like(out))
    assert copies.names == []


def test_labels_and_temperatures_of_the_caller():
    model = tiny_model("llama")
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    packed = PackedSequence.from_sequences(sequences)
    temperatures = [0.5, 1.0, 2.0, 0.7]
    expected = [one_by_one(model, [ids], t).log_probs for ids, t in zip(sequences, temperatures, strict=True)]
    patch(model)
    torch.testing.assert_close(
        model(packed=packed, temperature=temperatures).log_probs, torch.cat(expected), atol=1e-5, rtol=0
    )
    per_token = torch.tensor(temperatures).repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(
        model(packed=packed, temperature=per_token).log_probs, torch.cat(expected), atol=1e-5, rtol=0
    )
    labels = torch.full((packed.num_tokens,), -100)
    labels[4] = 7
    output = model(packed=packed, labels=labels, entropy=False)
    assert output.entropy is None
    assert output.log_probs.nonzero().flatten().tolist() == [4]


def test_numbers_of_numpy_are_numbers():
    model = tiny_model("llama")
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    patch(model)
    for given, plain in ((np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.array([0.5, 1, 2, 4]), [0.5, 1.0, 2.0, 4.0])):
        expected = model(packed=packed, temperature=plain).log_probs
        assert torch.equal(model(packed=packed, temperature=given).log_probs, expected)


@pytest.mark.parametrize("where", ["token", "sequence"])
def test_temperatures_that_are_not_positive_are_refused(where):
    model = tiny_model("llama")
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    patch(model)
    for wrong in (0.0, -1.0, float("nan")):
        temperature = torch.ones(35).index_fill(0, torch.tensor(3), wrong)
        with pytest.raises(ValueError, match=rf"temperatures? .*{wrong}.* must be positive"):
            model(packed=packed, temperature=temperature if where == "token" else [1.0, 1.0, wrong, 1.0])


@pytest.mark.parametrize("temperature", [None, "warm", "1", "1111", 1j, [None] * 4, [[1.0, 1.0]] * 4])
def test_temperatures_that_are_no_numbers_are_named(temperature):
    model = tiny_model("llama")
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    patch(model)
    with pytest.raises(ValueError, match=r"temperature=.* is neither a number, nor a tensor with one entry per token"):
        model(packed=packed, temperature=temperature)


def test_a_padding_segment_of_the_batch_changes_nothing():
    model = tiny_model("llama")
    patch(model)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    plain = model(packed=PackedSequence.from_sequences(sequences))
    packed = PackedSequence.from_sequences(sequences, multiple_of=8)
    padded = model(packed=packed)
    assert padded.log_probs.shape == (40,)
    torch.testing.assert_close(padded.log_probs[:35], plain.log_probs, atol=1e-6, rtol=0)
    assert padded.log_probs[35:].abs().max() == 0


def test_a_batch_without_tokens_gives_zero_gradients():
    """A data-parallel rank that has run out of sequences still takes part in the step."""
    model = tiny_model("qwen3")
    patch(model)
    output = model(packed=PackedSequence.from_sequences([torch.zeros(0, dtype=torch.int64)]))
    assert output.log_probs.shape == output.entropy.shape == (0,)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_without_the_fused_head_the_output_is_logits():
    model = tiny_model("llama")
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    expected = torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])
    patched = patch(model, fused_head=False)
    output = model(packed=PackedSequence.from_sequences(sequences))
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)
    assert output.log_probs is None
    assert patched.report().settings["head"] == "logits"
    as_tuple = model(packed=PackedSequence.from_sequences(sequences), return_dict=False)
    assert torch.equal(as_tuple.logits, output.logits)


def test_remove_restores_the_model_bit_for_bit():
    model = tiny_model("llama")
    ids = random_sequences((9,), model.config.vocab_size)[0][None]
    before, logits = fingerprint(model), model(input_ids=ids).logits
    patched = patch(model)
    assert fingerprint(model) != before
    patched.remove()
    assert fingerprint(model) == before
    assert Patch.of(model) is None
    assert torch.equal(model(input_ids=ids).logits, logits)
    patched.remove()
    for call in (patched.probe, lambda: patched.new_cache(1, 4)):
        with pytest.raises(ValueError, match=r"this patch of LlamaForCausalLM was removed; call patch\(\) again"):
            call()


def test_only_this_instance_changes():
    model = tiny_model("llama")
    other = LlamaForCausalLM(model.config)  # shares the config object
    class_before = {cls: dict(cls.__dict__) for module in model.modules() for cls in type(module).__mro__}
    registry_before = dict(AttentionInterface._global_mapping)
    before = fingerprint(other)
    patch(model)
    assert fingerprint(other) == before
    assert class_before == {cls: dict(cls.__dict__) for cls in class_before}
    registry = dict(AttentionInterface._global_mapping)
    registry.pop(ATTENTION_NAME)
    registry_before.pop(ATTENTION_NAME, None)
    assert registry == registry_before
    assert "flash" not in ATTENTION_NAME
    patch(other, fused_head=False)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    assert model(packed=packed).logits is None
    assert other(packed=packed).log_probs is None


def test_a_deep_copy_is_patched_on_its_own():
    model = tiny_model("llama")
    first = patch(model)
    twin = copy.deepcopy(model)
    second = Patch.of(twin)
    assert second is not first
    assert second.model is twin
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert not torch.equal(model(packed=packed).log_probs, twin(packed=packed).log_probs)
    first.remove()
    twin(packed=packed)
    second.remove()
    twin(input_ids=packed.input_ids[None])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [False, True])
def test_any_implementation_of_attention_and_tied_heads(implementation, tied):
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    model.set_attn_implementation(implementation)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    expected = one_by_one(model, sequences)
    scalar_loss(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    patched = patch(model)
    output = model(packed=PackedSequence.from_sequences(sequences))
    scalar_loss(output).backward()
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    assert_gradients_equal(gradients(model), expected_gradients)
    patched.remove()
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("value_head", [False, True])
def test_a_patched_model_is_saved_as_what_it_was(tmp_path, value_head):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "plain")
    patch(model, value_head=value_head)
    model.save_pretrained(tmp_path / "patched")
    plain, saved = ({file.name: file for file in (tmp_path / name).iterdir()} for name in ("plain", "patched"))
    assert plain.keys() == saved.keys()
    assert saved["config.json"].read_text() == plain["config.json"].read_text()
    before, after = (load_file(files["model.safetensors"]) for files in (plain, saved))
    assert after.keys() - before.keys() == ({"score.weight"} if value_head else set())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_under_torch_compile(whole):
    model = tiny_model("qwen3")
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    scalar_loss(model(packed=packed)).backward()
    expected = gradients(model)
    model.zero_grad()
    for module in [model] if whole else model.model.layers:
        module.compile(backend="eager")
    scalar_loss(model(packed=packed)).backward()
    assert_gradients_equal(gradients(model), expected)


def test_one_thread_at_a_time():
    model = tiny_model("llama")
    patch(model)
    first, second = (
        PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size, seed)) for seed in range(2)
    )
    expected = model(packed=first).log_probs
    inside, go_on = threading.Event(), threading.Event()

    def stop(*_):
        inside.set()
        assert go_on.wait(60)

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with ThreadPoolExecutor(1, thread_name_prefix="rollout") as pool:
        running = pool.submit(lambda: model(packed=first).log_probs)
        assert inside.wait(60)
        hook.remove()
        with pytest.raises(ValueError, match="MainThread called this model while rollout_0 was inside it"):
            model(packed=second)
        go_on.set()
        # The call that was there first ends as if alone.
        assert torch.equal(running.result(60), expected)
    assert not torch.equal(model(packed=second).log_probs, expected)


def test_calls_that_packing_cannot_mean_are_refused():
    model = tiny_model("llama")
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    with pytest.raises(ValueError, match=r"call it as model\(packed=PackedSequence"):
        model(input_ids=packed.input_ids[None])
    with pytest.raises(ValueError, match="patched for packed batches"):
        model.model(input_ids=packed.input_ids[None])
    with pytest.raises(ValueError, match="attention_mask, use_cache itself"):
        model(packed=packed, attention_mask=torch.ones(1, 35), use_cache=True)
    with pytest.raises(ValueError, match=r"labels has shape \(34,\), the packed batch has 35 tokens"):
        model(packed=packed, labels=packed.input_ids[1:])
    with pytest.raises(ValueError, match="got 3 temperatures for 4 sequences"):
        model(packed=packed, temperature=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"temperatures \[1\.0, 0\.0, 1\.0, 1\.0\] must be positive"):
        model(packed=packed, temperature=[1.0, 0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="sampling_mask is a list; give a parallel_layers"):
        model(packed=packed, sampling_mask=[[1, 2]] * 35)
    with pytest.raises(ValueError, match=r"token id 999 at index \[1\] is outside the vocabulary .* the tokenizer"):
        model(packed=PackedSequence.from_sequences([torch.tensor([1, 999])]))
    with pytest.raises(ValueError, match="labels is a list, the packed batch has 35 tokens"):
        model(packed=packed, labels=packed.input_ids.tolist())
    with pytest.raises(ValueError, match="patched for packed batches"):
        model.generate(input_ids=packed.input_ids[None], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"temperature arrived as torch\.bfloat16"):
        model(packed=packed, temperature=torch.ones(35, dtype=torch.bfloat16))
    # transformers' models take any keyword, and what nobody reads would change nothing.
    for given in ({"temprature": 0.7}, {"output_hidden_states": True}, {"pixel_values": torch.zeros(1)}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} would change nothing in a call of this"):
            model(packed=packed, **given)
    model(packed=packed, output_hidden_states=False, return_dict=True, inputs_embeds=None)
    with pytest.raises(ValueError, match="patched already"):
        patch(model)


@pytest.mark.parametrize("model_type", ["llama"] if OLD else ["llama", "qwen2_vl"])
def test_a_vocabulary_resized_under_the_patch(model_type):
    new = PackedSequence.from_sequences([torch.tensor([5, 69, 6])])
    model = tiny_model(model_type)
    patched = patch(model)
    cache = patched.new_cache(1, 4)
    model.resize_token_embeddings(70, mean_resizing=False)
    with pytest.raises(ValueError, match=r"head .* took no part in the call.*call Patch.of\(model\)\.remove\(\)"):
        model(packed=new)
    with torch.no_grad(), pytest.raises(ValueError, match="took no part in the call"):
        model(packed=new, cache=cache)
    assert cache.lengths.tolist() == [0]
    patched.remove()
    patch(model)
    assert model(packed=new).log_probs[0] < 0
    # A tied head stays where it is, and logits are any head's.
    for options in ({"fused_head": False}, {}):
        model = tiny_model(model_type, tie_word_embeddings=bool(not options))
        patch(model, **options)
        model.resize_token_embeddings(70, mean_resizing=False)
        output = model(packed=new)
        assert output.logits.shape == (3, 70) if options else output.log_probs[0] < 0


def test_another_attention_under_the_patch_is_refused():
    """In a model with images transformers then changes the text backbone's config, which is the patch's own copy."""
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    model = tiny_model("qwen2_vl")
    patched = patch(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"told to use attention 'sdpa' .*call Patch.of\(model\)\.remove\(\)"):
        model(packed=packed)
    patched.remove()
    expected = one_by_one(model, packed.split(packed.input_ids))
    patch(model)
    torch.testing.assert_close(model(packed=packed).log_probs, expected.log_probs, atol=1e-5, rtol=0)


def test_the_absent_plan_raises_in_attention():
    model = tiny_model("llama")
    patch(model)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 5, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(5)[None])
    with pytest.raises(ValueError, match="LlamaAttention was called without the plan"):
        attention(hidden, position_embeddings=rotary)


def test_dropout_and_masks_are_refused():
    model = tiny_model("llama", attention_dropout=0.25)
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    with pytest.raises(ValueError, match=r"\(model\.layers\.0\.self_attn\.attention_dropout=0\.25, model\.layers\.1"):
        model(packed=packed)
    model.eval()(packed=packed)


@pytest.mark.parametrize(
    ("model_type", "rates", "message"),
    [
        ("phi3", {"resid_pdrop": 0.5}, r"model\.layers\.0\.resid_attn_dropout\.p=0\.5, .* and 1 more"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"model\.layers\.0\.mlp\.\w*jitter_noise=0\.1"),
        ("seed_oss", {"residual_dropout": 0.2}, r"model\.layers\.0\.self_attn\.residual_dropout=0\.2"),
    ],
)
def test_all_that_is_random_in_training_is_refused(model_type, rates, message):
    model = tiny_model(model_type, **rates)
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    with pytest.raises(ValueError, match=message):
        model(packed=packed)
    model.eval()(packed=packed)
    copied = copy.deepcopy(model).train()
    with pytest.raises(ValueError, match=message):
        copied(packed=packed)


def test_dropout_of_adapters_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].mlp.gate_proj.register_module("lora_dropout", torch.nn.Dropout(0.05))
    patch(model)
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, model.config.vocab_size))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate_proj\.lora_dropout\.p=0\.05\)"):
        model(packed=packed)


@pytest.mark.parametrize("packed", [True, False])
def test_labels_that_are_the_ids_are_refused(packed):
    model = tiny_model("llama")
    patch(model, packed=packed)
    ids = torch.tensor([[5, 6, 7, 8], [9, 9, 9, 9]])
    sequences = PackedSequence.from_sequences(list(ids))
    batch = {"packed": sequences} if packed else {"input_ids": ids}
    given = sequences.input_ids if packed else ids
    prompt = given.clone()
    prompt.view(-1)[:2] = -100
    for labels in (given, given.clone(), prompt):
        with pytest.raises(ValueError, match="labels are the input ids: this model does not shift them"):
            model(**batch, labels=labels)
    # Where a token repeats, the next token is the token itself.
    repeated = torch.full_like(prompt, -100)
    repeated.view(-1)[4:7] = 9
    model(**batch, labels=repeated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_group": 2}, r"sequence_parallel_group=2 must be a torch\.distributed\.ProcessGroup"),
        ({"tiled_mlp": "4"}, "tiled_mlp='4' must be a number of tiles, at least 1, or None"),
        ({"tiled_mlp": 1.5}, r"tiled_mlp=1\.5 must be a number of tiles"),
        ({"kernels": "no"}, "kernels='no' must be True or False"),
        ({"router_replay": "no"}, "router_replay='no' must be True or False or None"),
        ({"keep_probabilities": "yes"}, "keep_probabilities='yes' must be True or False or 'auto'"),
        ({"model": torch.nn.Linear(2, 2)}, r"takes a transformers model that is loaded, got Linear\("),
        ({"model": "meta-llama/Llama-3.2-1B"}, "takes a transformers model that is loaded, got 'meta-llama"),
    ],
)
def test_options_of_another_type_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        patch(**({"model": tiny_model("llama")} | options))


def test_heads_that_are_not_plain_are_refused_and_nothing_stays():
    model = tiny_model("llama")

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model.lm_head = Adapter(32, 61, bias=False)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"plain torch\.nn\.Linear, got .*test_patching\..*\.Adapter; merge"):
        patch(model)
    assert fingerprint(model) == before
    model.lm_head = torch.nn.Linear(32, 61, bias=False)
    model.lm_head.forward = lambda hidden: hidden @ model.lm_head.weight.T  # as some adapters do
    with pytest.raises(ValueError, match=r"got torch\.nn\.modules\.linear\.Linear with another forward"):
        patch(model)
    model.lm_head = torch.nn.Linear(32, 61)
    with pytest.raises(ValueError, match="with a bias"):
        patch(model)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_every_attention_backend(backend):
    model = tiny_model("llama")
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    expected = one_by_one(model, sequences).log_probs
    patched = patch(model, attention=backend)
    assert f"backend '{backend}'" in str(patched.report())
    log_probs = model(packed=PackedSequence.from_sequences(sequences)).log_probs
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_an_unknown_attention_backend_is_refused_and_nothing_stays():
    model = tiny_model("llama")
    before = fingerprint(model)
    with pytest.raises(ValueError, match="backend='flashier'"):
        patch(model, attention="flashier")
    assert fingerprint(model) == before


def test_the_report_names_what_changed():
    model = tiny_model("llama")
    patched = patch(model)
    report = patched.report()
    assert {change.where for change in report.changes} >= {"", "model", "model.layers.1.self_attn", "lm_head"}
    assert report.probe is not None
    assert report.probe.leak == 0
    assert report.probe.moved > 0
    text = str(report)
    assert "LlamaForCausalLM (llama)" in text
    assert "lm_head: fused log-probs and entropy" in text
