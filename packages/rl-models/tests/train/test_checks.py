"""What a run refuses before anything is started."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_models.train.options import TrainOptions
from rl_models.train.run import plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coefficient": float("nan")}, "kl_coefficient=nan must be a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be a finite number"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        (
            {"reference": Path("elsewhere")},
            "reference=elsewhere is for the KL penalty, and kl_coefficient=0.0 has none",
        ),
        ({"virtual_stages": 2}, "needs pp > 1"),
        ({"sequence_parallel": True}, "sequence_parallel=True needs tp > 1"),
        ({"router_balance": 0.1}, r"router_losses=.*balance=0.1.* is for a mixture of experts, which llama is not"),
        ({"out": Path("file") / "run"}, "file is a file, so file/run cannot be a folder"),
        ({"model": Path("with-a-broken-end")}, "with-a-broken-end/generation_config.json is not valid JSON: "),
        ({"model": Path("without-weights")}, "has neither model.safetensors nor"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    model: Path,
    prompts: Path,
    folder_of_rewards: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    shutil.copytree(model, "without-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(model, "with-a-broken-end")
    Path("with-a-broken-end/generation_config.json").write_text("{")
    given: dict[str, Any] = {"model": model, "prompts": prompts, "reward": "rewards:alphabet", "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        plan(TrainOptions(**given | options))


@pytest.mark.usefixtures("folder_of_rewards")
@pytest.mark.parametrize(
    ("option", "module", "message"),
    [
        ("ray", "ray", r"needs Ray, which is not installed: pip install 'rl-models\[ray\]'"),
        ("tensorboard", "torch.utils.tensorboard", r"needs TensorBoard; pip install 'rl-models\[tensorboard\]'"),
    ],
)
def test_an_extra_that_is_not_installed_is_missed_before_it_starts(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        plan(TrainOptions(model=model, prompts=prompts, reward="rewards:alphabet", out=out, **{option: True}))
    assert not out.exists()
