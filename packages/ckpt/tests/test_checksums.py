from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from ckpt import Place, layout_for, load_hf, open_checkpoint, save_hf

Checkpoints = Callable[..., Path]


@pytest.fixture
def saved(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    layout = layout_for(checkpoint("llama"))
    save_hf(tmp_path / "saved", load_hf(checkpoint("llama"), layout), layout, max_shard_size="20KB", checksums=True)
    return tmp_path / "saved"


def damage(folder: Path, tensor: str) -> None:
    """Flip one bit of a tensor."""
    file, info = open_checkpoint(folder).tensors[tensor]
    with open(folder / file, "r+b") as opened:
        opened.seek(info.offset + info.nbytes // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_found_and_named(saved: Path) -> None:
    load_hf(saved, layout_for(saved), check=True)
    damage(saved, "model.layers.1.mlp.up_proj.weight")
    load_hf(saved, layout_for(saved))
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight in .* is damaged: its checksum"):
        load_hf(saved, layout_for(saved), check=True)


def test_checksums_leave_a_file_that_others_can_read(saved: Path) -> None:
    for file in saved.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert all(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 (not a mapping)


def test_a_check_without_recorded_checksums_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(ValueError, match="no recorded checksums; save with checksums=True"):
        load_hf(checkpoint("llama"), layout_for(checkpoint("llama")), check=True)


def load_checked(group: Any, source: str) -> str:
    try:
        load_hf(source, layout_for(source), Place(tp=(group.rank(), 2)), group=group, check=True)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_ranks_share_the_checking_and_all_hear_of_damage(saved: Path, ranks: Any) -> None:
    assert ranks.run(load_checked, str(saved), world=2) == ["loaded", "loaded"]
    damage(saved, "model.norm.weight")
    assert all("model.norm.weight" in text for text in ranks.run(load_checked, str(saved), world=2, timeout=10))
