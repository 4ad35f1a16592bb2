"""Each rank reads and writes its own rows, and what is loaded and saved are the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from counted import counted
from meshes import mesh_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from ckpt.files import STAGING_BYTES
from hf_patches.testing import tiny_model
from parallel_layers import ParallelDims
from parallel_layers.module import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, Critic
from rl_models.backends.transformers import slices


class Seen(NamedTuple):
    """The bytes that a rank has read, written and holds, and the elements of the largest tensor that it has made."""

    read: int
    written: int
    held: int
    largest: int


class _Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor with memory, beside the buffer through which a save transposes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not is_dtensor(tensor) and not tensor.is_meta:
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes != STAGING_BYTES:
                    self.elements = max(self.elements, nbytes // tensor.element_size())
        return result


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.numel() * local.element_size()


def load_and_save(group: ProcessGroup, path: Path, out: Path, kind: Any, dtype: torch.dtype | None) -> Seen:
    dims = ParallelDims(dp=group.size())
    with (
        pytest.MonkeyPatch.context() as patch,
        _Largest() as largest,
        counted("preadv") as read,
        counted("pwritev") as written,
    ):
        patch.setattr(PreTrainedModel, "from_pretrained", None)
        worker = kind.from_pretrained(
            path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu", dtype=dtype
        )
        worker.save_pretrained(out)
    parameters = worker.engine.shards().parameters.values()
    return Seen(sum(read), sum(written), sum(map(_bytes, parameters)), largest.elements)


MODELS: dict[str, tuple[str, dict[str, Any], Any, torch.dtype | None]] = {
    "uneven rows": ("llama", {"vocab_size": 61}, Actor, None),
    "tied": ("llama", {"tie_word_embeddings": True}, Actor, None),
    "mixture in bf16": ("mixture", {}, Actor, torch.bfloat16),
    "reward": ("reward", {}, Critic, None),
}


@pytest.mark.parametrize(
    ("model", "changes", "kind", "dtype"),
    [pytest.param(*case, id=name, marks=() if name == "tied" else pytest.mark.slow) for name, case in MODELS.items()],
)
def test_each_rank_reads_and_writes_its_own_rows(
    ranks: RankPool,
    tiny: Callable[..., Path],
    tmp_path: Path,
    model: str,
    changes: dict[str, Any],
    kind: Any,
    dtype: torch.dtype | None,
) -> None:
    path, world = tiny(model, num_hidden_layers=6, **changes), 3
    found = ranks.run(load_and_save, path, tmp_path / "out", kind, dtype, world=world)
    stored = load_file(path / "model.safetensors")
    whole = sum(tensor.numel() for tensor in stored.values())
    size = 4 if dtype is None else dtype.itemsize
    assert sum(rank.read for rank in found) == sum(rank.held for rank in found) * 4 // size == whole * 4
    assert sum(rank.written for rank in found) == whole * size
    for rank in found:
        assert rank.read <= 1.1 * whole * 4 / (2 if model == "mixture" else world)  # two of four experts
        # FSDP2 gathers one block, or the ends.
        assert rank.largest < whole / 2
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor.to(saved[name].dtype)) for name, tensor in stored.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == json.loads((path / "config.json").read_text())["architectures"]
    assert config["dtype"] == ("float32" if dtype is None else "bfloat16")


@pytest.mark.parametrize(
    "family",
    ["granitemoe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cohere2", "gemma3_text", "deepseek_v3"))],
)
def test_names_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    """Also of a family without a table in ckpt, and where transformers renames tensors."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "in")
    worker = Actor.from_pretrained(tmp_path / "in", backend="transformers", device="cpu")
    worker.save_pretrained(tmp_path / "out")
    stored, saved = (load_file(tmp_path / part / "model.safetensors") for part in ("in", "out"))
    assert saved.keys() == stored.keys() == dict(worker.stream_weights()).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def published(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published files of Qwen3-VL-MoE hold the matrices of experts transposed; those of `save_pretrained` do not."""
    return {name: x.transpose(1, 2).contiguous() if "experts" in name else x for name, x in held.items()}


@pytest.mark.parametrize(
    ("family", "world"),
    [
        pytest.param(family, world, marks=() if (family, world) == ("qwen3_vl_moe", 2) else pytest.mark.slow)
        for family in ("kimi_k25", "qwen3_vl_moe")
        for world in (1, 2, 3)
    ],
)
def test_converted_tensors_are_read_and_written_by_slices(
    ranks: RankPool, tmp_path: Path, family: str, world: int
) -> None:
    """Files of Kimi-K2.5 have the queries, keys and values of the tower fused, and permuted for its rotation."""
    model = tiny_model(family, num_hidden_layers=6)
    model.save_pretrained(tmp_path / "in")
    paths = [tmp_path / "in"]
    if family == "qwen3_vl_moe":
        paths.insert(0, rewritten(tmp_path / "in", tmp_path / "published", published))
    for path in paths:
        stored = load_file(path / "model.safetensors")
        found = ranks.run(load_and_save, path, tmp_path / "out", Actor, None, world=world)
        whole = sum(tensor.numel() for tensor in stored.values())
        assert sum(rank.written for rank in found) == whole * 4
        for rank in found:
            assert rank.read == rank.held
            assert rank.read <= 1.1 * whole * 4 / (2 if world == 3 else world)  # two of four experts
            assert world == 1 or rank.largest < whole / 2
        saved = load_file(tmp_path / "out" / "model.safetensors")
        assert saved.keys() == stored.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
        again = type(model).from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def stream(group: ProcessGroup | None, path: Path) -> dict[str, Tensor]:
    dims = ParallelDims(dp=1 if group is None else group.size())
    worker = Actor.from_pretrained(path, backend="transformers", dims=dims, mesh=mesh_of(dims), device="cpu")
    return {name: tensor.clone() for name, tensor in worker.stream_weights()}


@pytest.mark.slow
def test_streams_are_as_the_files(ranks: RankPool, tmp_path: Path) -> None:
    model = tiny_model("qwen3_vl_moe")
    model.save_pretrained(tmp_path / "in")
    path = rewritten(tmp_path / "in", tmp_path / "published", published)
    stored = load_file(path / "model.safetensors")
    for found in ranks.run(stream, path, world=2):
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_tensors_that_make_no_stack_are_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def without(held: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in held.items() if key != name}

    def narrow(held: dict[str, Tensor]) -> dict[str, Tensor]:
        return held | {name: held[name][:, :-1].contiguous()}

    for number, change in enumerate((without, narrow)):
        path = rewritten(tiny("mixture"), tmp_path / str(number), change)
        with pytest.raises(
            ValueError, match=r"tensors of shapes .* do not join to model.layers.1.mlp.experts.gate_up_proj"
        ):
            Actor.from_pretrained(path, backend="transformers", device="cpu")


def rewritten(path: Path, out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    shutil.copytree(path, out)
    save_file(change(load_file(path / "model.safetensors")), out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    twice = rewritten(path, tmp_path / "twice", lambda held: {**held, "lm_head.weight": held[embedding].clone()})
    other = rewritten(path, tmp_path / "other", lambda held: {**held, "lm_head.weight": held[embedding] + 1})
    head = rewritten(path, tmp_path / "head", lambda held: {"lm_head.weight": held.pop(embedding), **held})
    for folder in (twice, head):
        model = Actor.from_pretrained(folder, backend="transformers", device="cpu").engine.module
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, load_file(path / "model.safetensors")[embedding])
    with pytest.raises(ValueError, match=r"embed_tokens.weight differs from lm_head.weight, and config.json ties them"):
        Actor.from_pretrained(other, backend="transformers", device="cpu")


@pytest.mark.parametrize(
    ("where", "name", "value", "problem"),
    [
        (slices, "_pieces", lambda *_: None, r"converts the tensor \S+"),
        (PreTrainedModel, "initialize_weights", lambda _: None, "does not initialise all buffers"),
    ],
    ids=["a conversion that is no block", "a buffer that transformers does not compute"],
)
def test_what_slices_cannot_express_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, problem: str
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(ValueError, match=f"transformers {problem} of model_type='qwen3_moe', .*use backend='parallel'"):
        Actor.from_pretrained(tiny("mixture"), backend="transformers", device="cpu")
