"""Vision-language models: images in packed batches, over shards, and batches without any."""

import pytest
import torch
from comparing import VISION, assert_gradients_equal, gradients, scalar_loss
from torch.distributed import ProcessGroup

from hf_patches import patch
from hf_patches.attention import ATTENTION_NAME
from hf_patches.testing.tiny_models import (
    Sample,
    join_inputs,
    one_by_one,
    random_sample,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

# 38 tokens, so 4 ranks get 10 each: the second image (tokens 9 and 10) straddles two, the third rank has no image.
PARTS = ([3, (1, 4, 4), 2, (1, 2, 4), 1], [17], [2, (1, 2, 4), 1, (1, 4, 2), 2])


def batch(model, parts=PARTS):
    samples = [random_sample(model, part, seed) for seed, part in enumerate(parts)]
    return samples, PackedSequence.from_sequences([sample.ids for sample in samples]), join_inputs(samples)


def reference(model_type, parts=PARTS):
    model = tiny_model(model_type)
    samples, _, _ = batch(model, parts)
    scores = one_by_one(model, samples)
    scalar_loss(scores).backward()
    return scores, gradients(model)


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", VISION)
def test_packed_equals_one_by_one(model_type):
    expected, expected_gradients = reference(model_type)
    model = tiny_model(model_type)
    patch(model)
    _, packed, inputs = batch(model)
    output = model(packed=packed, **inputs)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=3e-5, rtol=0)
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    assert all(gradient.abs().max() > 0 for gradient in expected_gradients.values())


def patches_seen(model):
    """The patches of each call of the model's tower."""
    seen = []
    tower = next(child for name, child in model.model.named_children() if name in ("visual", "vision_tower"))
    tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def sharded(group: ProcessGroup, model_type):
    model = tiny_model(model_type)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patch(model, sequence_parallel_group=group)
    _, packed, inputs = batch(model)
    seen = patches_seen(model)
    output = model(packed=packed, **inputs)
    scalar_loss(output).backward()
    return output.log_probs, output.entropy, sum(seen), gradients(model)


@pytest.mark.parametrize(
    ("model_type", "world"),
    [
        pytest.param(name, world, marks=[] if (name, world) in (("kimi_k25", 2), ("qwen3_vl", 4)) else pytest.mark.slow)
        for name in ("kimi_k25", "qwen2_vl", "qwen3_vl")
        if name in VISION
        for world in (2, 4)
    ],
)
def test_images_that_straddle_shards_and_ranks_with_none(ranks, model_type, world):
    expected, expected_gradients = reference(model_type)
    results = ranks.run(sharded, model_type, world=world, timeout=120)
    for log_probs, entropy, *_ in results:
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=3e-5, rtol=0)
    # Images of 16, 8, 8 and 8 patches.
    assert sorted(seen for *_, seen, _ in results) == {2: [16, 24], 4: [8, 8, 8, 16]}[world]
    summed = {name: sum(found[name] for *_, found in results) for name in expected_gradients}
    assert_gradients_equal(summed, expected_gradients)


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", VISION)
def test_a_batch_without_images_gives_the_tower_zero_gradients(model_type):
    expected, expected_gradients = reference(model_type, ([7], [1], [5]))
    model = tiny_model(model_type)
    patch(model)
    _, packed, _ = batch(model, ([7], [1], [5]))
    output = model(packed=packed)
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name == "qwen3_vl" else pytest.mark.slow) for name in VISION]
)
def test_an_image_of_many_samples_goes_through_the_tower_once(model_type):
    model = tiny_model(model_type)
    first = random_sample(model, PARTS[0])
    samples = [
        Sample(torch.cat([first.ids, torch.tensor(more, dtype=torch.int64)]), first.inputs)
        for more in ([7, 8], [9], [])
    ]
    scores = one_by_one(model, samples)
    scalar_loss(scores).backward()
    expected = gradients(model)
    model = tiny_model(model_type)
    patch(model)
    packed, pixels = PackedSequence.from_sequences([sample.ids for sample in samples]), first.inputs["pixel_values"]
    grid, seen = first.inputs["image_grid_thw"].repeat(3, 1), patches_seen(model)
    output = model(packed=packed, pixel_values=pixels, image_grid_thw=grid, image_numbers=[0, 1, 0, 1, 0, 1])
    torch.testing.assert_close(output.log_probs, scores.log_probs, atol=1e-5, rtol=0)
    scalar_loss(output).backward()
    # The reference sums three runs of the tower, in another order.
    assert_gradients_equal(gradients(model), expected, 2e-5)
    assert seen == [len(pixels)]
    for numbers in ([0, 1], [0, 2, 0, 2, 0, 2]):
        with pytest.raises(ValueError, match=r"give one number for each row of image_grid_thw \(6\)"):
            model(packed=packed, pixel_values=pixels, image_grid_thw=grid, image_numbers=numbers)


def test_the_tower_keeps_its_own_attention():
    model = tiny_model("qwen2_vl")
    patched = patch(model)
    assert model.model.visual.config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == ATTENTION_NAME
    patched.remove()
    assert model.model.language_model.config is model.model.language_model.layers[0].self_attn.config


def test_positions_need_the_text_row():
    model = tiny_model("qwen2_vl")
    patch(model)
    samples, packed, inputs = batch(model)
    expected = model(packed=packed, **inputs).log_probs
    rows = []
    for sample in samples:
        types = (sample.ids == model.config.image_token_id).int()[None]
        grid = sample.inputs.get("image_grid_thw")
        rows.append(model.model.get_rope_index(sample.ids[None], mm_token_type_ids=types, image_grid_thw=grid)[0][:, 0])
    three = torch.cat(rows, dim=1)
    with pytest.raises(ValueError, match=r"position_ids of shape \(3, 38\) for 38 packed tokens: give 4 rows"):
        model(packed=packed, position_ids=three, **inputs)
    four = torch.cat([packed.position_ids[None], three])
    assert torch.equal(model(packed=packed, position_ids=four, **inputs).log_probs, expected)


def test_padded_batches_with_images():
    model = tiny_model("qwen3_vl")
    sample = random_sample(model, [3, (1, 4, 4), 2])
    types = (sample.ids == model.config.image_token_id).int()[None]
    expected = one_by_one(model, [sample]).log_probs
    patch(model, packed=False)
    calls = []
    model.model.visual.register_forward_hook(lambda *_: calls.append(1))
    output = model(input_ids=sample.ids[None], mm_token_type_ids=types, **sample.inputs)
    torch.testing.assert_close(output.log_probs[0], expected, atol=1e-5, rtol=0)
    assert calls == [1]


def test_videos_by_their_token_types():
    model = tiny_model("qwen2_vl")
    video = model.config.video_token_id
    ids = torch.cat([torch.tensor([5, 6]), torch.full((4,), video), torch.tensor([7, 8, 9])])
    pixels = torch.randn(16, 24)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 2, 4]])}
    types = (2 * (ids == video)).int()
    with torch.no_grad():
        logits = model(input_ids=ids[None], mm_token_type_ids=types[None], **inputs).logits[0]
    patch(model)
    text = random_sequences((5,), 61)[0]
    packed = PackedSequence.from_sequences([text, ids])
    output = model(packed=packed, **inputs)
    expected = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(output.log_probs[5:-1], expected, atol=1e-5, rtol=0)
    other = PackedSequence.from_sequences([Sample(text, {}).ids])
    with pytest.raises(ValueError, match="give mm_token_type_ids"):
        model(packed=other, **inputs)


def test_images_and_videos_of_one_token_and_a_drawn_placeholder():
    """GLM-4V has one token for both; kinds of tokens keep them apart, also from a placeholder that a policy drew."""
    model = tiny_model("glm4v")
    image, video = (random_sample(model, [2, (1, 4, 4), 3], seed) for seed in (0, 1))
    kinds = [(image.ids == 1).long(), 2 * (video.ids == 1).long()]
    names = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
    inputs = [image.inputs, {names[name]: x for name, x in video.inputs.items()}]
    expected = []
    for ids, types, given in zip((image.ids, video.ids), kinds, inputs, strict=True):
        logits = model(input_ids=ids[None], mm_token_type_ids=types[None], **given).logits[0].detach()
        expected.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0])
    patched = patch(model)
    drawn = torch.cat([image.ids, torch.tensor([1])])
    packed = PackedSequence.from_sequences([drawn, video.ids])
    types = torch.cat([kinds[0], torch.tensor([0]), kinds[1]])
    output = model(packed=packed, mm_token_type_ids=types, **inputs[0], **inputs[1])
    ours = output.log_probs.split([len(drawn), len(video.ids)])
    torch.testing.assert_close(ours[0][:-2], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1][:-1], expected[1], atol=1e-5, rtol=0)
    places = torch.arange(len(types))
    for place in (len(image.ids), 2):
        wrong = torch.where(places == place, 1 - types, types)
        with pytest.raises(ValueError, match="the kinds of the tokens do not fit image_grid_thw and video_grid_thw"):
            model(packed=packed, mm_token_type_ids=wrong, **inputs[0], **inputs[1])
    with pytest.raises(ValueError, match=r"mm_token_type_ids has shape \(3,\), the packed batch"):
        model(packed=packed, mm_token_type_ids=types[:3], **inputs[0], **inputs[1])
    patched.remove()
    assert "get_placeholder_mask" not in model.model.__dict__


@pytest.mark.parametrize("model_type", [name for name in ("kimi_k25", "qwen3_vl") if name in VISION])
def test_a_cache_takes_images_with_their_whole_sequence(model_type):
    model = tiny_model(model_type).eval()
    samples = [
        random_sample(model, parts, seed) for seed, parts in enumerate(([3, (1, 4, 4), 2], [4], [1, (1, 2, 4), 2]))
    ]
    expected = one_by_one(model, samples).log_probs.detach()
    patched = patch(model)
    cache = patched.new_cache(3, 16)
    prompts = PackedSequence.from_sequences([sample.ids[:-1] for sample in samples])
    with torch.no_grad():
        logits = model(packed=prompts, cache=cache, **join_inputs(samples)).logits
    last = torch.tensor([sample.ids[-1] for sample in samples])
    found = logits.log_softmax(-1).gather(-1, last[:, None])[:, 0]
    ends = torch.tensor([len(sample.ids) for sample in samples]).cumsum(0) - 2
    torch.testing.assert_close(found, expected[ends], atol=1e-5, rtol=0)
    if model_type == "kimi_k25":
        with pytest.raises(ValueError, match="has 0 image tokens, and the tower returns 6 features"):
            model(packed=prompts, mm_token_type_ids=torch.zeros_like(prompts.input_ids), **join_inputs(samples))
