"""Actors and critics of the families that see images: scores, updates, saved files and responses as transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ckpt.layout import FAMILIES as LAYOUTS
from hf_patches import FAMILIES
from hf_patches.testing import Sample, one_by_one, random_sample, tiny_model
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.model import FAMILIES as NATIVE_FAMILIES
from parallel_layers.testing import RankPool
from rl_models import Actor, ActorCritic, Batch, Critic, LossInputs, OptimizerOptions, PipelineOptions, VisualInputs
from rl_models.api import WholeBatches, Worker
from rl_models.calls import accumulate
from rl_models.losses import LossTerms

ONE = ParallelDims()
VISION = sorted(name for name, vision in FAMILIES.items() if vision is not None)
# Two images, text alone, and two images of other sizes.
PARTS: Any = ([3, (1, 4, 4), 2, (1, 2, 4), 1], [17], [2, (1, 2, 4), 1, (1, 4, 2), 2])
# With so large an epsilon a step is about proportional to the gradient.
STEP = {"learning_rate": 1.0, "eps": 1.0}
OPTIMIZER = OptimizerOptions(weight_decay=0.0, max_grad_norm=1e9, **STEP)


def samples_of(model: PreTrainedModel) -> list[Sample]:
    return [random_sample(model, parts, seed) for seed, parts in enumerate(PARTS)]


def visual(sample: Sample) -> VisualInputs | None:
    """The images of a sample; the token 1 stands for images in all tiny models."""
    return VisualInputs(**sample.inputs, mm_token_type_ids=(sample.ids == 1).int()) if sample.inputs else None


def batch_of(samples: list[Sample]) -> Batch:
    ids = [sample.ids for sample in samples]
    weights = [torch.linspace(-1, 1, len(row)) for row in ids]
    return Batch.from_sequences(ids, visual=tuple(map(visual, samples)), weight=weights)


@cache
def mesh_of(dims: ParallelDims) -> DeviceMesh | None:
    """The mesh of a grid on the first ranks, formed once by each rank."""
    return dims.build_mesh("cpu", list(range(dims.world_size))) if dims.world_size > 1 else None


def load(path: Path, kind: type[Worker] = Actor, dims: ParallelDims = ONE, **options: Any) -> Any:
    options = {"backend": "transformers", "device": "cpu", "dims": dims, "mesh": mesh_of(dims), **options}
    return kind.from_pretrained(path, **options)


def policy_loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["weight"] + 0.1 * inputs.entropy)


def own_tokens(per_token: Tensor, batch: Batch) -> Tensor:
    """Numbers of the next tokens, as transformers has them, at their own tokens."""
    return torch.where(batch.first, 0, per_token.roll(1))


def after_a_step(model: PreTrainedModel, samples: list[Sample]) -> PreTrainedModel:
    """The model after one step of torch's AdamW on the policy loss, its gradient from one sequence at a time."""
    model, batch = copy.deepcopy(model), batch_of(samples)
    scores = one_by_one(model, samples)
    terms = policy_loss(LossInputs(batch, {name: own_tokens(x, batch) for name, x in vars(scores).items()})).loss
    (terms[batch.mask].sum() / batch.mask.sum()).backward()
    rate, eps = STEP["learning_rate"], STEP["eps"]
    torch.optim.AdamW(model.parameters(), rate, OPTIMIZER.betas, eps, weight_decay=0.0).step()
    return model


def assert_same_weights(found: Path, expected: PreTrainedModel, atol: float = 1e-5) -> None:
    again, info = type(expected).from_pretrained(found, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for (name, ours), theirs in zip(again.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_vl" else pytest.mark.slow) for name in VISION]
)
def test_scores_an_update_and_the_saved_files_are_transformers(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, tmp_path: Path
) -> None:
    model, path = saved(family)
    samples = samples_of(model)
    batch, expected = batch_of(samples), one_by_one(model, samples)
    actor = load(path, optimizer=OPTIMIZER, max_tokens_per_micro_batch=20)
    found = actor.log_probs(batch)
    torch.testing.assert_close(found.log_probs, own_tokens(expected.log_probs, batch).detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, own_tokens(expected.entropy, batch).detach(), rtol=0, atol=3e-5)
    actor.update(batch, policy_loss)
    actor.save_pretrained(tmp_path / "learned")
    moved = after_a_step(model, samples)
    assert_same_weights(tmp_path / "learned", moved)
    assert all((a != b).any() for a, b in zip(moved.parameters(), model.parameters(), strict=True))


def learn(
    group: ProcessGroup, path: Path, dims: ParallelDims, batch: Batch, out: Path, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    options = {"dims": dims, "optimizer": OPTIMIZER, "max_tokens_per_micro_batch": 20, **(options or {})}
    worker = load(path, **options)
    whole: Any = WholeBatches(worker)
    found = {"scores": whole.log_probs(batch).log_probs}
    whole.update(batch, policy_loss)
    worker.save_training(out / "training", step=1)
    worker.save_pretrained(out / "learned")
    found["after"] = whole.log_probs(batch).log_probs
    again: Any = WholeBatches(load(path, **options))
    again.load_training(out / "training")
    found["resumed"] = again.log_probs(batch).log_probs
    return found


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        pytest.param(family, dims, marks=[] if (family, dims) == ("qwen3_vl", ParallelDims(dp=2)) else pytest.mark.slow)
        for family in ("kimi_k25", "qwen2_vl", "qwen3_vl")
        for dims in (ParallelDims(dp=2), ParallelDims(cp=2), ParallelDims(dp=3), ParallelDims(dp=2, cp=2))
    ],
    ids=str,
)
def test_ranks_with_text_alone_take_part(
    ranks: RankPool,
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
    family: str,
    dims: ParallelDims,
    tmp_path: Path,
) -> None:
    """With dp some ranks have no image, in some micro-batches or in all."""
    model, path = saved(family)
    samples = samples_of(model)
    batch, expected = batch_of(samples), one_by_one(model, samples)
    for found in ranks.run(learn, path, dims, batch, tmp_path, world=dims.world_size, timeout=120):
        torch.testing.assert_close(found["scores"], own_tokens(expected.log_probs, batch).detach(), rtol=0, atol=1e-5)
        assert torch.equal(found["resumed"], found["after"])
        assert (found["after"] - found["scores"]).abs().max() > 1e-3
    assert_same_weights(tmp_path / "learned", after_a_step(model, samples))


NATIVE_GRIDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2": ({"tp": 2}, {"sequence_parallel": False}),
    "tp4-sp": ({"tp": 4}, {}),
    "cp2": ({"cp": 2}, {}),
    "cp2-ring": ({"cp": 2}, {"context_parallel": "ring"}),
    "dp2": ({"dp": 2}, {}),
    "dp2-tp2": ({"dp": 2, "tp": 2}, {}),
    "cp2-tp2": ({"cp": 2, "tp": 2}, {}),
    "pp2": ({"pp": 2}, {"pipeline": PipelineOptions(split=[2, 2])}),
    "pp2-dp2": ({"pp": 2, "dp": 2}, {"pipeline": PipelineOptions(split=[2, 2])}),
    "pp2-tp2": ({"pp": 2, "tp": 2}, {"pipeline": PipelineOptions("zero-bubble", split=[2, 2])}),
    "pp2-cp2": ({"pp": 2, "cp": 2}, {"pipeline": PipelineOptions(split=[2, 2])}),
    "dp2-ep2": ({"dp": 2, "ep": 2}, {}),
    "tp2-ep2": ({"tp": 2, "ep": 2}, {}),
}
# By family and grid, in the quick run.
QUICK = {("qwen3_vl", "pp2"), ("glm4v", "one")}
NATIVE = [name for name in VISION if name in NATIVE_FAMILIES]


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        pytest.param(family, grid, marks=() if (family, grid) in QUICK else pytest.mark.slow)
        for family in NATIVE
        for grid in NATIVE_GRIDS
        if "ep" not in grid or LAYOUTS[family].has_experts
        # The tiny models have two key heads of linear attention.
        if "tp4" not in grid or not LAYOUTS[family].has_linear_attention
    ],
)
def test_native_models_see_and_learn_as_transformers(
    ranks: RankPool,
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
    family: str,
    grid: str,
    tmp_path: Path,
) -> None:
    sizes, options = NATIVE_GRIDS[grid]
    dims = ParallelDims(**sizes)
    model, path = saved(family)
    if dims.pp > 1:  # the tower of Qwen3-VL adds to two layers of the first stage
        model, path = tiny_model(family, num_hidden_layers=4).eval(), tmp_path / "model"
        model.save_pretrained(path)
    samples = samples_of(model)
    batch, expected = batch_of(samples), one_by_one(model, samples)
    arguments = path, dims, batch, tmp_path, {"backend": "parallel", **options}
    for found in ranks.run(learn, *arguments, world=dims.world_size, timeout=120):
        torch.testing.assert_close(found["scores"], own_tokens(expected.log_probs, batch).detach(), rtol=0, atol=1e-5)
        assert torch.equal(found["resumed"], found["after"])
        assert (found["after"] - found["scores"]).abs().max() > 1e-3
    assert_same_weights(tmp_path / "learned", after_a_step(model, samples))


def learn_and_count(group: ProcessGroup, path: Path, dims: ParallelDims, batch: Batch, out: Path, backend: str) -> Any:
    """The scores before an update, and the patches that this rank's tower computed for them."""
    worker = load(path, dims=dims, backend=backend, optimizer=OPTIMIZER, max_tokens_per_micro_batch=batch.num_tokens)
    whole: Any = WholeBatches(worker)
    inner, seen = worker.engine.images.hooks.inner, list[int]()
    tower = getattr(inner, "visual", None) or inner.vision_tower
    handle = tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    scores = whole.log_probs(batch).log_probs
    handle.remove()
    whole.update(batch, policy_loss)
    worker.save_pretrained(out)
    return scores, sum(seen)


@pytest.mark.parametrize(
    ("family", "backend", "dims"),
    [
        pytest.param(family, backend, dims, marks=() if (family, dims) == ("qwen3_vl", ONE) else pytest.mark.slow)
        for family in ("kimi_k25", "qwen2_5_vl", "qwen3_vl", "glm4v")
        for backend, grids in (
            ("transformers", (ONE, ParallelDims(cp=2))),
            ("parallel", (ONE, ParallelDims(tp=2), ParallelDims(cp=2), ParallelDims(dp=2))),
        )
        for dims in grids
    ],
    ids=str,
)
def test_the_samples_of_a_prompt_share_its_images(
    ranks: RankPool,
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
    family: str,
    backend: str,
    dims: ParallelDims,
    tmp_path: Path,
) -> None:
    model, path = saved(family)
    first, text, last = samples_of(model)
    samples = [
        Sample(torch.cat([first.ids, torch.tensor(more, dtype=torch.int64)]), dict(first.inputs))
        for more in ([7, 8], [9], [])
    ]
    samples = [*samples, text, last]
    batch, expected = batch_of(samples), one_by_one(model, samples)
    patches = sum(len(sample.inputs["pixel_values"]) for sample in (first, last))
    results = ranks.run(learn_and_count, path, dims, batch, tmp_path, backend, world=dims.world_size)
    for scores, _ in results:
        torch.testing.assert_close(scores, own_tokens(expected.log_probs, batch).detach(), rtol=0, atol=1e-5)
    seen = [count for _, count in results]
    if dims.dp > 1:
        assert max(seen) <= patches
    else:  # divided
        assert sum(seen) == patches
        assert min(seen) > 0
    assert_same_weights(tmp_path, after_a_step(model, samples))


def tower_gradients(group: ProcessGroup, path: Path, backend: str, batches: list[Batch]) -> list[float]:
    """The largest gradient of each parameter of the tower, by the loss on this rank's batch."""
    worker = load(path, dims=ParallelDims(dp=len(batches)), backend=backend)
    own = batches[worker.grid.rank("dp")]
    options: dict[str, Any] = {"call": "test", "aggregation": "token-mean", "temperature": 1.0}
    accumulate(worker.engine, own, policy_loss, 20, **options)
    parameters = worker.engine.images.hooks.inner.named_parameters()
    tower = [x for name, x in parameters if not name.startswith("language_model.")]
    return [float(x.grad.full_tensor().abs().max()) for x in tower]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "glm4v" else pytest.mark.slow) for name in NATIVE if FAMILIES[name].videos],
)
def test_videos_beside_images_score_alike_on_both_backends(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str
) -> None:
    model, path = saved(family)
    image, video = model.config.image_token_id, model.config.video_token_id
    # Text separates the two frames of a video; older families have none, and GLM-4V's frames have the token of images.
    frame, between = (image if family.startswith("glm") else video), [] if family.startswith("qwen2") else [7]
    ids = torch.tensor([3, 4, image, image, 5, frame, frame, *between, frame, frame, 6])
    types = [0, 0, 1, 1, 0, 2, 2, *(0 for _ in between), 2, 2, 0]
    patch = FAMILIES[family].patch_shape(model.config.vision_config)
    generator = torch.Generator().manual_seed(0)
    seen = VisualInputs(
        pixel_values=torch.randn(8, *patch, generator=generator),
        image_grid_thw=torch.tensor([[1, 2, 4]]),
        pixel_values_videos=torch.randn(16, *patch, generator=generator),
        video_grid_thw=torch.tensor([[2, 2, 4]]),
        second_per_grid_ts=torch.tensor([1.0]) if family == "qwen2_5_vl" else None,
        mm_token_type_ids=torch.tensor(types),
    )
    batch = Batch.from_sequences([ids, [8, 9]], visual=(seen, None))
    native, patched = (load(path, backend=backend).log_probs(batch) for backend in ("parallel", "transformers"))
    torch.testing.assert_close(native.log_probs, patched.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(native.entropy, patched.entropy, rtol=0, atol=3e-5)


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("kimi_k25", marks=pytest.mark.slow)])
def test_the_tower_has_gradients_where_images_are_and_zeros_elsewhere(
    ranks: RankPool, saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, backend: str
) -> None:
    model, path = saved(family)
    first, text, _ = samples_of(model)
    seen, unseen = batch_of([first]), batch_of([text, text])
    assert all(max(found) == 0.0 for found in ranks.run(tower_gradients, path, backend, [unseen, unseen], world=2))
    assert all(min(found) > 0.0 for found in ranks.run(tower_gradients, path, backend, [unseen, seen], world=2))


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(name, backend, marks=[] if name == "qwen3_vl" else pytest.mark.slow)
        for backend, names in (("parallel", NATIVE), ("transformers", VISION))
        for name in names
        # The caches of `backend="transformers"` have no states of linear attention.
        if backend == "parallel" or not LAYOUTS[name].has_linear_attention
    ],
)
def test_responses_have_the_log_probs_that_transformers_gives_them(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, backend: str
) -> None:
    """Prompts share few places and a small cache: they wait, are computed again, and are never cut inside an image."""
    model, path = saved(family)
    samples = samples_of(model)
    actor = load(path, backend=backend, max_tokens_per_micro_batch=8)
    prompts = batch_of(samples)
    drawn = actor.generate(prompts, max_new_tokens=6, n=2, seed=1, max_sequences=3)
    assert drawn.visual == tuple(one for one in prompts.visual for _ in range(2))
    longer = [Sample(tokens, samples[number // 2].inputs) for number, tokens in enumerate(drawn.split())]
    for sample, log_probs, mask in zip(longer, drawn.split("log_probs"), drawn.split("mask"), strict=True):
        if (
            not sample.inputs or not (sample.ids[mask] == 1).any()
        ):  # transformers takes a drawn placeholder for an image
            expected = one_by_one(model, [sample]).log_probs.detach().roll(1)
            torch.testing.assert_close(log_probs[mask], expected[mask], rtol=0, atol=1e-5)
    scored = load(path, backend=backend).log_probs(drawn).log_probs
    torch.testing.assert_close(drawn["log_probs"], torch.where(drawn.mask, scored, 0), rtol=0, atol=1e-5)


def test_equal_tokens_of_other_images_share_no_keys(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    """A prompt with images is computed whole beside kept keys of the same tokens."""
    model, path = saved("qwen3_vl")
    first = samples_of(model)[0]
    pixels = {name: -x if "pixel" in name else x for name, x in first.inputs.items()}
    long = [Sample(torch.cat((first.ids, torch.arange(2, 72) % 50 + 2)), inputs) for inputs in (first.inputs, pixels)]
    actor = load(path, backend="parallel")
    prompts = [batch_of([sample]) for sample in long]
    anew = [actor.generate(prompt, max_new_tokens=6) for prompt in prompts]
    for number in (0, 1, 0):
        drawn = actor.generate(prompts[number], max_new_tokens=6, keep_cache=True)
        assert drawn["prompt_tokens_computed"].sum() == prompts[number].num_tokens - 1
        assert torch.equal(drawn.tokens, anew[number].tokens)
        torch.testing.assert_close(drawn["log_probs"], anew[number]["log_probs"], rtol=0, atol=1e-5)


def respond(group: ProcessGroup, path: Path, dims: ParallelDims, backend: str, prompts: Batch) -> tuple[Batch, Tensor]:
    whole: Any = WholeBatches(load(path, dims=dims, backend=backend))
    drawn = whole.generate(prompts, max_new_tokens=4, n=2)
    return drawn, whole.log_probs(drawn).log_probs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dims"),
    [
        ("transformers", ParallelDims(dp=2)),
        ("parallel", ParallelDims(pp=2)),
        pytest.param("transformers", ParallelDims(cp=2), marks=pytest.mark.slow),
        *(
            pytest.param("parallel", ParallelDims(**sizes), marks=pytest.mark.slow)
            for sizes in ({"dp": 2}, {"cp": 2}, {"tp": 2})
        ),
    ],
    ids=str,
)
def test_ranks_draw_responses_to_images(
    ranks: RankPool, saved: Callable[[str], tuple[PreTrainedModel, Path]], backend: str, dims: ParallelDims
) -> None:
    model, path = saved("qwen2_vl")
    for drawn, scored in ranks.run(respond, path, dims, backend, batch_of(samples_of(model)), world=2):
        assert [one is not None for one in drawn.visual] == [True, True, False, False, True, True]
        torch.testing.assert_close(drawn["log_probs"], torch.where(drawn.mask, scored, 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen2_5_vl" else pytest.mark.slow) for name in VISION]
)
def test_a_critic_values_images_and_is_read_again(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, tmp_path: Path
) -> None:
    model, path = saved(family)
    samples = samples_of(model)
    batch = batch_of(samples)
    fresh = load(path, Critic, optimizer=OPTIMIZER)
    assert not fresh.values(batch).any()
    fresh.update(batch, lambda inputs: LossTerms((inputs.values - inputs["weight"]).square()))
    fresh.save_pretrained(tmp_path / "critic")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "critic").eval()
    head = load_file(tmp_path / "critic" / "model.safetensors")
    expected = []
    for sample in samples:
        inputs = dict(sample.inputs)
        if inputs and "mrope_section" in str(model.config.get_text_config()):
            inputs["mm_token_type_ids"] = (sample.ids == 1).int()[None]
        hidden = again.base_model(input_ids=sample.ids[None], **inputs).last_hidden_state[0].detach()
        expected.append((hidden @ head["score.weight"][0] + head["score.bias"]).roll(1))
    values = torch.where(batch.first, 0, torch.cat(expected))
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(fresh.values(batch), values, rtol=0, atol=1e-5)
    torch.testing.assert_close(load(tmp_path / "critic", Critic).values(batch), values, rtol=0, atol=1e-5)
    both = load(tmp_path / "critic", ActorCritic).predict(batch)
    torch.testing.assert_close(both["values"], values, rtol=0, atol=1e-5)
    scores = load(tmp_path / "critic").log_probs(batch)
    torch.testing.assert_close(both["log_probs"], scores.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_vl" else pytest.mark.slow) for name in NATIVE]
)
def test_a_native_critic_values_images_and_is_read_again(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, tmp_path: Path
) -> None:
    model, path = saved(family)
    samples = samples_of(model)
    batch = batch_of(samples)
    critic = load(path, Critic, backend="parallel", optimizer=OPTIMIZER)
    assert not critic.values(batch).any()
    critic.update(batch, lambda inputs: LossTerms((inputs.values - inputs["weight"]).square()))
    critic.save_pretrained(tmp_path)
    values = critic.values(batch)
    assert values.abs().max() > 1e-3
    assert torch.equal(load(tmp_path, Critic, backend="parallel").values(batch), values)
    both = load(path, ActorCritic, backend="parallel")
    scores = load(path, backend="parallel").log_probs(batch)
    assert torch.equal(both.predict(batch)["log_probs"], scores.log_probs)
    unseen = replace(batch, visual=())
    assert (critic.values(unseen)[: len(samples[0].ids)] != values[: len(samples[0].ids)]).any()


def test_a_first_stage_with_fewer_layers_than_the_tower_adds_to_is_refused(
    ranks: RankPool, saved: Callable[[str], tuple[PreTrainedModel, Path]]
) -> None:
    _, path = saved("qwen3_vl")
    with pytest.raises(
        ValueError, match=r"adds to the outputs of 2 layers, and the first stage has 1; use a smaller pp"
    ):
        ranks.run(respond, path, ParallelDims(pp=2), "parallel", Batch.from_sequences([[3, 4]]), world=2)


def test_a_tower_without_some_of_its_blocks_is_refused(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    model, path = saved("qwen2_vl")
    model.config.save_pretrained(tmp_path)
    kept = {name: x for name, x in load_file(path / "model.safetensors").items() if "blocks.1." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model.visual.blocks.1.attn.proj.bias, .*blocks.1.* \(\d+ tensors\)"):
        load(tmp_path)


def test_images_that_do_not_fit_are_refused(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    model, path = saved("qwen2_vl")
    first, text, last = samples_of(model)
    actor = load(path)
    swapped = Batch.from_sequences([text.ids, last.ids], visual=(None, VisualInputs(**first.inputs)))
    with pytest.raises(ValueError, match=r"sequence 1: 4 tokens stand for pixel_values, and image_grid_thw asks for 6"):
        actor.log_probs(swapped)
    with pytest.raises(ValueError, match="tp_invariant=True is for text alone: a vision tower computes the images"):
        load(path, backend="parallel", tp_invariant=True).log_probs(batch_of([first]))
    ends = random_sample(model, [3, (1, 4, 4)])
    with pytest.raises(ValueError, match="a prompt ends in an image; a response follows text"):
        actor.generate(batch_of([ends]), max_new_tokens=2)


def test_a_video_that_transformers_cannot_compute_is_refused(
    saved: Callable[[str], tuple[PreTrainedModel, Path]],
) -> None:
    model, path = saved("kimi_k25")
    video = random_sample(model, [3, (2, 4, 4), 2])
    with pytest.raises(ValueError, match="sequence 0: image_grid_thw has 2 frames, and transformers takes one for kim"):
        load(path).log_probs(batch_of([video]))


@pytest.mark.slow
@pytest.mark.parametrize("family", NATIVE)
def test_images_in_bf16_score_alike_on_both_backends(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str
) -> None:
    """Compare most tokens: rounding sends some tokens to other experts. Pixels are fp32."""
    model, path = saved(family)
    samples = samples_of(model)
    batch = batch_of(samples)
    expected = own_tokens(one_by_one(model, samples).log_probs, batch).detach()
    scores = [load(path, backend=name, dtype=torch.bfloat16).log_probs(batch) for name in ("parallel", "transformers")]
    ours, theirs = ((score.log_probs - expected)[batch.mask].abs().median() for score in scores)
    assert 0 < ours < 2 * theirs


def learn_from_text(group: ProcessGroup, path: Path, out: Path, images: Batch) -> list[str]:
    """Learn on Megatron-Core, save, and return the names of the tensors that this rank streams."""
    dims = ParallelDims(pp=2)
    with cpu_stand_in():
        options: dict[str, Any] = {"backend": "megatron", "dims": dims, "mesh": mesh_of(dims), "device": "cpu"}
        actor = Actor.from_pretrained(path, optimizer=OptimizerOptions(0.01, weight_decay=0.1), **options)
        batch = Batch.from_sequences([torch.arange(3, 12), torch.arange(20, 25)])
        actor.update(batch, lambda inputs: LossTerms(-inputs.log_probs))
        with pytest.raises(ValueError, match=r"has images, and this model sees none: .*'megatron' has its text part"):
            actor.log_probs(images)
        actor.save_pretrained(out)
        return [name for name, _ in actor.stream_weights(to=[0])]


def test_megatron_core_learns_from_text_and_carries_the_tower(
    ranks: RankPool, saved: Callable[[str], tuple[PreTrainedModel, Path]], tmp_path: Path
) -> None:
    model, path = saved("qwen3_vl")
    names, others = ranks.run(learn_from_text, path, tmp_path, batch_of(samples_of(model)[:1]), world=2)
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path))
    assert set(names) == before.keys() == after.keys()
    assert not others
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == ("visual" in name), name
