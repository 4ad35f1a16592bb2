"""The program that reads a script of verl knows only options that verl has; `.ci/upstream verl` runs this."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed; `.ci/upstream verl` has it")


def test_verl_has_the_options_of_the_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(__file__).resolve().parents[1] / "examples" / "migrate"
    monkeypatch.syspath_prepend(str(folder))
    import from_verl as program  # type: ignore[import-not-found]

    words = shlex.split((folder / "verl_grpo.sh").read_text(), comments=True)
    given = [word for word in words if "=" in word]
    with initialize_config_dir(str(Path(verl.__file__).parents[1] / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=given)  # refuses what verl does not have
        defaults = compose("ppo_trainer")
    read = (program.MINI_BATCH, program.KL_LOSS, program.DEVICES, program.NODES, program.ULYSSES)
    absent = object()
    names = (*program.OPTIONS, *program.NEEDLESS, *read)
    assert not [name for name in names if OmegaConf.select(config, name, default=absent) is absent]
    for name, value in program.DEFAULTS.items():
        theirs = OmegaConf.select(defaults, name)
        assert (type(theirs)(value) if isinstance(theirs, float | int) else value) == theirs, name
