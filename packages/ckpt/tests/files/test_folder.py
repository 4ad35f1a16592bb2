from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import Checkpoint, Grid, layout_for, load_hf, reshard, verify
from ckpt.files.contents import INDEX
from ckpt.layout import load_config


@pytest.fixture
def sharded(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint that a test may break."""
    return shutil.copytree(checkpoint("llama", max_shard_size="20KB"), tmp_path / "model")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_opens_single_and_sharded_folders_alike(checkpoint: Callable[..., Path], sharded: Path) -> None:
    single = Checkpoint.open(checkpoint("llama"))
    assert single.tensors.keys() == Checkpoint.open(sharded).tensors.keys()
    assert len(Checkpoint.open(sharded).headers) > 1
    assert single.config["model_type"] == "llama"


def test_a_missing_shard_is_named_with_a_tensor(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ValueError, match=rf"{victim.name} is missing: the index names it for 'model"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "a\\b"])
def test_a_path_that_escapes_the_folder_is_refused(file: str, sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": file}))
    with pytest.raises(ValueError, match="outside the folder"):
        Checkpoint.open(sharded)


def test_two_checkpoints_in_one_folder_are_refused(checkpoint: Callable[..., Path], sharded: Path) -> None:
    shutil.copy(checkpoint("llama") / "model.safetensors", sharded)
    with pytest.raises(ValueError, match=r"holds two checkpoints, model.safetensors and the files of .*index.json"):
        Checkpoint.open(sharded)


def test_an_index_may_name_the_single_file_and_count_wrongly(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # Published checkpoints have both; sizes come from the headers.
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    tensors = Checkpoint.open(tmp_path).tensors
    index = {"metadata": {"total_size": 3}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert Checkpoint.open(tmp_path).tensors == tensors


def test_a_snapshot_of_links_is_opened(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # As the cache of huggingface_hub has them: blobs by their hash, and links to them.
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(checkpoint("llama").iterdir()):
        shutil.copy(file, tmp_path / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    first, second = (Checkpoint.open(folder).tensors for folder in (snapshot, checkpoint("llama")))
    assert {name: info for name, (_, info) in first.items()} == {name: info for name, (_, info) in second.items()}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 16060522496\n"
READERS: list[Callable[[Path], object]] = [Checkpoint.open, layout_for, lambda folder: verify(folder, folder)]


@pytest.mark.parametrize("read", READERS)
def test_a_pointer_of_git_lfs_is_named(read: Callable[[Path], object], sharded: Path) -> None:
    file = "config.json" if read is layout_for else sorted(sharded.glob("*.safetensors"))[1].name
    (sharded / file).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{file} is a git-lfs pointer, .*; run `git lfs pull` in its folder"):
        read(sharded)


@pytest.mark.parametrize("read", READERS)
def test_an_adapter_is_refused_alone_and_beside_weights(
    read: Callable[[Path], object], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    shutil.copytree(checkpoint("llama"), beside)
    alone.mkdir()
    for folder in (alone, beside):
        (folder / "adapter_config.json").write_text("{}")
        shutil.copy(checkpoint("llama") / "model.safetensors", folder / "adapter_model.safetensors")
    # A configuration alone is that of the model, whatever lies beside it; `verify` compares adapters, too.
    for folder in {layout_for: (alone,), READERS[2]: (beside,)}.get(read, (alone, beside)):
        with pytest.raises(ValueError, match=r"adapter_config.json says that .* is a LoRA adapter or has one beside"):
            read(folder)


def test_shards_without_their_index_are_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(
        ValueError, match=r"holds \d+ shards, from model-00001-of-\d+.safetensors on, and no .*index.json"
    ):
        Checkpoint.open(sharded)


def test_a_classifier_of_several_labels_is_a_value_model_and_no_language_model(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:3].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    verify(tmp_path, tmp_path)
    loaded = load_hf(tmp_path, layout_for(tmp_path, role="value"))
    assert torch.equal(loaded["score.weight"], tensors["score.weight"])
    for layout in (layout_for(tmp_path), layout_for(load_config(tmp_path), role="value")):
        with pytest.raises(ValueError, match=r"score.weight has shape \(3, 32\) in .*: a classifier of 3 labels"):
            load_hf(tmp_path, layout)


def test_a_sharded_folder_is_named_with_the_way_to_convert(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    reshard(checkpoint("llama"), tmp_path / "shards", Grid(tp=2))
    with pytest.raises(ValueError, match=r"is a sharded checkpoint, .*`ckpt merge`"):
        Checkpoint.open(tmp_path / "shards")


def test_an_index_that_disagrees_with_the_headers_is_refused(sharded: Path) -> None:
    first, second = sorted(file.name for file in sharded.glob("*.safetensors"))[:2]
    good = (sharded / INDEX).read_text()
    edit_index(sharded, lambda weight_map: weight_map.update({"extra.weight": first}))
    with pytest.raises(ValueError, match=r"says that 'extra.weight' is in"):
        Checkpoint.open(sharded)
    (sharded / INDEX).write_text(good)
    edit_index(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"holds 'model.norm.weight', which .* does not name"):
        Checkpoint.open(sharded)
    (sharded / INDEX).write_text(good)
    shutil.copy(sharded / first, sharded / second)
    with pytest.raises(ValueError, match="is in both"):
        Checkpoint.open(sharded)
    (sharded / INDEX).write_text('{"weight_map": [')
    with pytest.raises(ValueError, match=f"{INDEX} is not valid JSON"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"x.*pickled weights.*`ckpt convert \S+/x(/pytorch_model.bin)? OUT` writes"),
        ("consolidated.00.pth", r"pickled weights.*`ckpt convert \S+/consolidated.00.pth OUT`"),
        ("model-Q4.gguf", r"quantized weights.*from_pretrained\(DIR, gguf_file=NAME\)"),
    ],
)
def test_other_formats_are_refused_by_name_with_the_way_to_convert(file: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / file).write_bytes(b"GGUF")
    for path in (folder, folder / file):
        with pytest.raises(ValueError, match=message) as caught:
            Checkpoint.open(path)
        assert file in str(caught.value)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"model.safetensors is a link to a file that does not exist"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        Checkpoint.open(tmp_path / "none")


MEGATRON = r"belongs to a checkpoint of Megatron-Core \({}\) in the older format, .* --ckpt-format torch_dist"
STEP = (
    r"belongs to a step of Megatron-Core \(common.pt\) and is not complete; pass the step's folder, with its .metadata"
)


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (("latest_checkpointed_iteration.txt",), "", MEGATRON.format("latest_checkpointed_iteration.txt")),
        (("mp_rank_00/model_optim_rng.pt",), "", MEGATRON.format("mp_rank_00")),
        (("model_optim_rng.pt",), "", MEGATRON.format("model_optim_rng.pt")),
        (("model_optim_rng.pt",), "model_optim_rng.pt", MEGATRON.format("model_optim_rng.pt")),
        (("common.pt", "__0_0.distcp", ".metadata"), "", STEP),
        (("common.pt", "__0_0.distcp", ".metadata"), "__0_0.distcp", STEP),
        (("__0_0.distcp", ".metadata"), "", r"checkpoint of torch's DCP .*dcp_to_torch_save.* run `ckpt convert`"),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_checkpoints_of_megatron_and_dcp_are_named_with_what_reads_them(
    pickled: bool, names: tuple[str, ...], given: str, message: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(tmp_path / given, pickled=pickled)
