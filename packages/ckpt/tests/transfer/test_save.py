from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from counted import counted
from safetensors import safe_open
from torch import Tensor

from ckpt import Checkpoint, Place, layout_for, load_hf, save_hf
from ckpt.files.written_files import parse_size

Checkpoints = Callable[..., Path]
ReadAll = Callable[[Path], dict[str, Tensor]]
AssertSame = Callable[[dict[str, Tensor], dict[str, Tensor]], None]


def save_as_rank(group: Any, source: str, target: str, tp: int, **options: Any) -> dict[str, int]:
    """Load this rank's shard and save it again; returns what the rank read and wrote."""
    layout = layout_for(source)
    place = Place(tp=(group.rank() % tp, tp))
    with counted("preadv") as read, counted("pwritev") as written:
        tensors = load_hf(source, layout, place, group=group)
        save_hf(target, tensors, layout, place, group=group, **options)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"read": sum(read), "written": sum(written), "held": held}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        *(pytest.param(name, tp, marks=pytest.mark.slow) for name, tp in (("llama", 1), ("llama-bias", 2))),
        ("llama-tied", 2),
        ("qwen2", 4),
    ],
)
def test_load_then_save_is_bit_identical(
    name: str, tp: int, checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path, ranks: Any
) -> None:
    source, target = checkpoint(name, vocab_size=51), tmp_path / "saved"
    counts = ranks.run(save_as_rank, str(source), str(target), tp, world=tp, max_shard_size="30KB")
    assert_same(read_all(target), read_all(source))
    assert len(Checkpoint.open(target).headers) > 1
    assert all(count["read"] <= 1.02 * count["held"] for count in counts)
    # Every byte is written once, by somebody.
    stored = sum(info.nbytes for _, info in Checkpoint.open(target).tensors.values())
    assert sum(count["written"] for count in counts) == stored
    assert json.loads((target / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("size", [1, 4096, 10_000, "20KB", "16KiB", 50_000])
def test_shards_have_at_most_the_chosen_size(
    size: int | str, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    """Only a tensor that is larger by itself makes a larger file, and it is alone there."""
    source, target = checkpoint("llama"), tmp_path / "saved"
    layout = layout_for(source)
    save_hf(target, load_hf(source, layout), layout, max_shard_size=size)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    expected = {name: tensor.nbytes for name, tensor in read_all(source).items()}
    assert index["metadata"]["total_size"] == sum(expected.values())
    files: dict[str, list[str]] = {}
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files[file.name] = list(opened.keys())
    assert {name: file for file, names in files.items() for name in names} == index["weight_map"]
    assert index["weight_map"].keys() == expected.keys()
    assert sum(len(names) for names in files.values()) == len(expected)
    held = [sum(expected[name] for name in names) for names in files.values()]
    for (file, names), data_bytes in zip(files.items(), held, strict=True):
        header = int.from_bytes((target / file).read_bytes()[:8], "little")
        assert (target / file).stat().st_size == 8 + header + data_bytes
        assert data_bytes <= parse_size(size) or len(names) == 1
    # No file is begun while the one before has room for its first tensor.
    first = [next(name for name in layout.canonical if name in names) for names in files.values()]
    assert all(before + expected[name] > parse_size(size) for before, name in zip(held, first[1:], strict=False))
    assert len(files) > 1


def test_replicas_share_the_writing(checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path, ranks: Any) -> None:
    """Two data-parallel copies of a tp 2 grid: each rank writes about a quarter."""
    source = checkpoint("llama")
    counts = ranks.run(save_as_rank, str(source), str(tmp_path / "saved"), 2, world=4)
    total = sum(count["written"] for count in counts)
    assert total == sum(tensor.numel() * 4 for tensor in read_all(source).values())
    assert max(count["written"] for count in counts) < 0.3 * total


def test_transformers_reads_the_result(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, target = checkpoint("qwen2-tied"), tmp_path / "saved"
    layout = layout_for(source)
    save_hf(target, load_hf(source, layout), layout, max_shard_size="40KB")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    actual, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(10)[None]
    assert torch.equal(actual(tokens).logits, expected(tokens).logits)


def test_a_value_model_is_written_as_token_classification(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source, target = checkpoint("llama"), tmp_path / "critic"
    layout = layout_for(source, role="value")
    tensors = load_hf(source, layout)
    tensors |= {"score.weight": torch.randn(1, 32), "score.bias": torch.randn(1)}
    save_hf(target, tensors, layout)
    model, info = transformers.AutoModelForTokenClassification.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(model.score.weight, tensors["score.weight"])
    again = load_hf(target, layout_for(target, role="value"))
    assert again.keys() == tensors.keys()


def test_a_value_model_without_a_bias_keeps_its_key_set(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_for(source, role="value")
    tensors = {**load_hf(source, layout), "score.weight": torch.ones(1, 32)}
    save_hf(tmp_path / "critic", tensors, layout)
    assert load_hf(tmp_path / "critic", layout).keys() == tensors.keys()


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_both_heads_are_written_for_either_class_of_transformers(
    name: str, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    source, target = checkpoint(name), tmp_path / "both"
    layout = layout_for(source, role="causal_lm_with_value")
    plain = load_hf(source, layout)
    assert plain.keys() == load_hf(source, layout_for(source)).keys()
    hidden = layout.canonical["model.norm.weight"].shape[0]
    tensors = {**plain, "score.weight": torch.randn(1, hidden), "score.bias": torch.randn(1)}
    save_hf(target, tensors, layout)
    written = read_all(target)
    for key, tensor in read_all(source).items():
        assert torch.equal(written.pop(key), tensor)
    assert written.keys() == {"score.weight", "score.bias"}
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [type(transformers.AutoModelForCausalLM.from_pretrained(source)).__name__]

    actor, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    critic, info = transformers.AutoModelForTokenClassification.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(critic.score.weight, tensors["score.weight"])
    assert torch.equal(critic.score.bias, tensors["score.bias"])
    assert torch.equal(actor.model.norm.weight, critic.model.norm.weight)

    again = load_hf(target, layout_for(target, role="causal_lm_with_value"))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())
    # A language model has no use for the value head, nor a value model for the other.
    assert load_hf(target, layout_for(target)).keys() == plain.keys()
    assert load_hf(target, layout_for(target, role="value")).keys() == tensors.keys() - {"lm_head.weight"}


def test_types_are_cast_and_recorded(checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    layout = layout_for(source)
    save_hf(target, load_hf(source, layout), layout, dtype=torch.bfloat16)
    original = read_all(source)
    for name, tensor in read_all(target).items():
        assert torch.equal(tensor, original[name].bfloat16())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_layout_of_a_config_object_is_saved_with_a_class(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint(name)
    named = transformers.AutoConfig.from_pretrained(source)
    made = type(named)(**{key: value for key, value in named.to_dict().items() if key != "architectures"})
    assert made.architectures is None
    layout = layout_for(made)
    save_hf(tmp_path / "saved", load_hf(source, layout), layout)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["architectures"] == named.architectures
    assert saved["dtype"] == "float32"


def test_strided_tensors_are_written_as_they_read(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = {name: tensor.t().contiguous().t() for name, tensor in load_hf(source, layout).items()}
    save_hf(tmp_path / "saved", tensors, layout)
    assert_same(read_all(tmp_path / "saved"), read_all(source))


def test_tokenizer_files_are_copied_on_request(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "merges.txt",
        "notes.md",
        "run.py",
    ):
        (source / name).write_text(name)
    layout = layout_for(checkpoint("llama"))
    save_hf(tmp_path / "saved", load_hf(checkpoint("llama"), layout), layout, copy_from=source)
    copied = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt"} | {
        "config.json",
        "model.safetensors",
    }


def test_a_save_replaces_a_checkpoint_and_nothing_else(
    checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    source, target = checkpoint("llama"), tmp_path / "saved"
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    save_hf(target, tensors, layout, max_shard_size="20KB")
    save_hf(target, {name: tensor + 1 for name, tensor in tensors.items()}, layout)
    assert sorted(entry.name for entry in target.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(read_all(target)["model.norm.weight"], tensors["model.norm.weight"] + 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"thesis exists and is no checkpoint \(\['chapter1.tex'\]\)"):
        save_hf(tmp_path / "thesis", tensors, layout)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing \['model.norm.weight'\] \(1\)"),
        (lambda t: t.update({"odd": torch.zeros(1)}), r"unexpected \['odd'\] \(1\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight at whole has shape \(3,\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.complex64)}),
            "complex64 cannot be stored",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(edit: Any, message: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout = layout_for(checkpoint("llama"))
    tensors = load_hf(checkpoint("llama"), layout)
    edit(tensors)
    with pytest.raises(ValueError, match=message):
        save_hf(tmp_path / "saved", tensors, layout)
    assert list(tmp_path.iterdir()) == []


def test_what_no_reader_takes_is_not_written(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("llama")
    layout = layout_for(source)
    tensors = load_hf(source, layout)
    integers = {name: tensor.to(torch.int32) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is of type torch.int32"):
        save_hf(tmp_path / "saved", integers, layout)
    with pytest.raises(ValueError, match=r"dtype=torch.bool cannot hold weights"):
        save_hf(tmp_path / "saved", tensors, layout, dtype=torch.bool)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_alone_cannot_save_a_part(checkpoint: Checkpoints, tmp_path: Path) -> None:
    layout, place = layout_for(checkpoint("llama")), Place(tp=(0, 2))
    tensors = load_hf(checkpoint("llama"), layout, place)
    with pytest.raises(ValueError, match=r"do not hold all of model.embed_tokens.weight.*tp=0/2.*whole grid"):
        save_hf(tmp_path / "saved", tensors, layout, place)


def test_one_process_saves_the_chunks_of_a_whole_grid(
    checkpoint: Checkpoints, read_all: ReadAll, assert_same: AssertSame, tmp_path: Path
) -> None:
    layout = layout_for(checkpoint("llama-tied"), target="megatron")
    places = [Place(tp=(t, 2), pp=(p, 2)) for p in range(2) for t in range(2)]
    tensors = [load_hf(checkpoint("llama-tied"), layout, place) for place in places]
    save_hf(tmp_path / "saved", tensors, layout, places)
    assert_same(read_all(tmp_path / "saved"), read_all(checkpoint("llama-tied")))


def apart(tensors: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """The same tensors, with every copy of the embedding filled with a value."""
    names = {"model.embed_tokens.weight", "lm_head.weight", "embedding.word_embeddings.weight", "output_layer.weight"}
    return {name: torch.full_like(tensor, value) if name in names else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("target", ["parallel", "megatron"])
def test_copies_of_a_tied_embedding_that_differ_are_refused(
    target: Any, checkpoint: Checkpoints, read_all: ReadAll, tmp_path: Path
) -> None:
    layout = layout_for(checkpoint("llama-tied", vocab_size=51), target)
    places = [Place(tp=(t, 2), pp=(p, 2)) for p in range(2) for t in range(2)]
    tensors = [load_hf(checkpoint("llama-tied", vocab_size=51), layout, place) for place in places]
    differing = [apart(held, 1 + place.pp[0]) for held, place in zip(tensors, places, strict=True)]
    message = (
        r"embed_tokens.weight has copies that differ .*at pp=0/2,tp=0/2.*other values on .*at pp=1/2,tp=0/2.*reduce"
    )
    with pytest.raises(ValueError, match=message):
        save_hf(tmp_path / "saved", differing, layout, places)
    assert list(tmp_path.iterdir()) == []
    save_hf(tmp_path / "saved", [apart(held, 1) for held in tensors], layout, places)
    assert torch.equal(read_all(tmp_path / "saved")["model.embed_tokens.weight"], torch.ones(51, 32))


def save_stage(group: Any, source: str, target: str, differs: list[int]) -> str:
    """Save a tied model of two stages, some of the ranks with one element of the embedding changed."""
    layout, place = layout_for(source), Place(tp=(group.rank() % 2, 2), pp=(group.rank() // 2, 2))
    tensors = apart(load_hf(source, layout, place), 1)
    if group.rank() in differs:
        tensors["lm_head.weight"][-1, -1] += 1
    try:
        save_hf(target, tensors, layout, place, group=group)
    except ValueError as error:
        return str(error)
    return "saved"


def test_stages_whose_tied_copies_differ_are_told_on_every_rank(
    checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    source, target = str(checkpoint("llama-tied")), str(tmp_path / "saved")
    seen = ranks.run(save_stage, source, target, [3], world=4, timeout=20)
    assert len(set(seen)) == 1
    assert "model.embed_tokens.weight has copies that differ in ((25, 50), (0, 32))" in seen[0]
    assert "rank 1 (model.embed_tokens.weight at pp=0/2,tp=1/2); other values on rank 3 (lm_head.weight" in seen[0]
    assert list(tmp_path.iterdir()) == []
    assert ranks.run(save_stage, source, target, [], world=4, timeout=20) == ["saved"] * 4


def failing_rank(group: Any, source: str, target: str, fault: str) -> str:
    """Save with one rank's tensors spoilt; returns what this rank saw."""
    layout, place = layout_for(source), Place(tp=(group.rank(), 2))
    tensors = load_hf(source, layout, place, group=group)
    if group.rank() == 1 and fault == "missing":
        del tensors["model.norm.weight"]
    if group.rank() == 1 and fault == "dtype":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    if group.rank() == 1 and fault == "nan":
        tensors["model.layers.1.mlp.down_proj.weight"][3, 2] = torch.nan
    if group.rank() == 1 and fault == "places":
        tensors = [tensors, tensors]  # type: ignore[assignment]
    try:
        save_hf(target, tensors, layout, place, group=group)
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "missing ['model.norm.weight']"),
        ("dtype", "F32 on rank 0 and F64 on rank 1"),
        ("places", "2 sets"),
        ("nan", "down_proj.weight holds NaN or inf"),
    ],
)
def test_a_fault_on_one_rank_is_an_error_on_all(
    fault: str, message: str, checkpoint: Checkpoints, tmp_path: Path, ranks: Any
) -> None:
    seen = ranks.run(failing_rank, str(checkpoint("llama")), str(tmp_path / "saved"), fault, world=2, timeout=10)
    assert all(message in text for text in seen), seen
    assert list(tmp_path.iterdir()) == []


def load_as_rank(group: Any, source: str) -> str:
    layout = layout_for(source)
    # One rank looks for files where there are none, as on a node whose mount is gone.
    path = source + "-elsewhere" if group.rank() == 1 else source
    try:
        load_hf(path, layout, Place(tp=(group.rank(), 2)), group=group)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_rank_that_cannot_load_stops_all(checkpoint: Checkpoints, ranks: Any) -> None:
    seen = ranks.run(load_as_rank, str(checkpoint("llama")), world=2, timeout=10)
    assert seen[0].startswith("rank 1: ")
    assert all("-elsewhere does not exist" in text for text in seen)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 2**29), (1000, 1000), ("7", 7), ("1 kb", 1000)]
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5 gigabytes", 0, -1, "", "GB", 1.5])
def test_odd_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        parse_size(text)


def test_transposed_views_are_written_in_long_runs(
    checkpoint: Checkpoints, tmp_path: Path, read_all: ReadAll, assert_same: AssertSame
) -> None:
    source = checkpoint("llama-bias")
    tensors = load_hf(source, layout_for(source))
    views = {name: x.t().contiguous().t() if x.dim() == 2 else x for name, x in tensors.items()}
    with counted("pwritev") as written:
        save_hf(tmp_path / "out", views, layout_for(source))
    assert_same(read_all(tmp_path / "out"), read_all(source))
    assert len(written) < 10 * len(views)
