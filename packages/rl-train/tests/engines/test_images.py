"""Prompts with images for an engine with a processor of its own: the requests, and the real vLLM."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pictures
import pytest
import torch
from pictures import WORDS, question, save_model, save_pictures
from PIL import Image

from parallel_layers import ParallelDims
from parallel_models import SamplingOptions
from rl_models import Actor, Batch, Grid, VisualInputs
from rl_train.data.images import load_images
from rl_train.data.prompts import read_prompts
from rl_train.engines import EngineOnRanks, VllmEngine
from rl_train.engines.interface import Request, Response, Responses
from rl_train.engines.vllm_requests import prompt_of

IMAGE = WORDS.index(pictures.IMAGE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def prompts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """A picture of two tokens, a question without one, and two pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    files = save_pictures(folder, size=(16, 8))
    two = [{"role": "user", "content": [{"type": "image", "path": str(files[name])} for name in ("red", "blue")]}]
    two[0]["content"].insert(1, {"type": "text", "text": "which"})
    rows: list[Any] = [
        {"messages": question(path=str(files["green"]))},
        {"messages": "which colour"},
        {"messages": two},
    ]
    found = read_prompts(folder / "prompts.jsonl", model, 50, rows=rows)
    return Batch.from_sequences([one.tokens for one in found], visual=load_images([one.chat for one in found]))


class Recorder:
    """An engine that remembers its requests, and answers with one token."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        self.requests = list(requests)
        return lambda: [[Response([3], [0.0])] * sampling.n for _ in requests]


def engine_of(model: Path, local: Any) -> EngineOnRanks:
    actor = SimpleNamespace(grid=Grid(ParallelDims(), torch.device("cpu")))
    return EngineOnRanks(actor, model, lambda: local)


def test_a_request_has_the_images_and_one_token_in_place_of_each(model: Path, prompts: Batch) -> None:
    engine = engine_of(model, local := Recorder())
    batch = engine.generate(prompts, SamplingOptions(1, n=2))
    assert batch.visual == tuple(one for one in prompts.visual for _ in range(2))
    seen, text, two = pickle.loads(pickle.dumps(local.requests))
    assert [seen.prompt.count(IMAGE), list(seen.short).count(IMAGE), len(seen.images)] == [2, 1, 1]
    assert [two.prompt.count(IMAGE), list(two.short).count(IMAGE), len(two.images)] == [4, 2, 2]
    assert isinstance(seen.images[0], Image.Image)
    assert prompt_of(text) == {"prompt_token_ids": text.prompt}
    given = prompt_of(two)
    assert given["prompt_token_ids"] == [
        token for n, token in enumerate(two.prompt) if (token, two.prompt[n - 1]) != (IMAGE, IMAGE)
    ]
    assert [image.getpixel((0, 0)) for image in given["multi_modal_data"]["image"]] == [(255, 0, 0), (0, 0, 255)]


def test_what_an_engine_cannot_see_is_refused(model: Path, prompts: Batch) -> None:
    engine = engine_of(model, Recorder())
    bare = pickle.loads(pickle.dumps(prompts))  # other processes get no images
    with pytest.raises(ValueError, match=r"needs VisualInputs.images \(PIL images\)"):
        engine.generate(bare, SamplingOptions(1))
    video = VisualInputs(pixel_values_videos=torch.zeros(4, 96), video_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.raises(ValueError, match="the prompt has a video, and vLLM gets images alone; use --rollouts native"):
        engine.generate(Batch.from_sequences([[2, 4]], visual=(video,)), SamplingOptions(1))


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's vision-language models need torchvision")
def test_vllm_draws_with_the_actors_log_probs(model: Path, prompts: Batch) -> None:
    """Before and after a weight sync, the tower's included."""
    from transformers import Qwen2VLVideoProcessor

    Qwen2VLVideoProcessor(patch_size=4, min_pixels=64, max_pixels=256).save_pretrained(model)
    actor = Actor.from_pretrained(model, backend="transformers", device="cpu")
    engine = VllmEngine(actor, model, dtype="float32", max_model_len=64, enforce_eager=True)
    for version in range(2):
        batch = engine.generate(prompts, SamplingOptions(6, n=2, temperature=0.8, seed=version))
        scored = actor.log_probs(batch, temperature=0.8).log_probs
        assert float((scored - batch["log_probs"]).abs()[batch.mask].max()) < 1e-5
        torch.manual_seed(1)
        for parameter in actor.engine.module.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        changed = actor.log_probs(batch, temperature=0.8).log_probs
        assert (scored - changed).abs().max() > 1e-2
        engine.update_weights(actor, version + 1)
    engine.close()
