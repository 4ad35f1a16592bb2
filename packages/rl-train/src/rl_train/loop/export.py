"""`rl-train export`: a training checkpoint of a run as a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ckpt import Checkpoint
from ckpt.files import Store, mirrored
from ckpt.training import latest_step, saved_steps, training_to_hf
from parallel_layers import ParallelDims
from parallel_models.engine import checkpoint_folder, stored_dtype
from rl_models import Critic
from rl_models.api import Worker
from rl_train.cluster.launch import Devices
from rl_train.data.sources import exists
from rl_train.loop.checked_models import with_dtype
from rl_train.loop.file_objectives import OBJECTIVES
from rl_train.loop.folder import MARK
from rl_train.loop.resume import COMMAND
from rl_train.options.derived import engine_options
from rl_train.options.file_options import FILE_RECIPES
from rl_train.options.options import TrainOptions
from rl_train.options.run_options import RunOptions
from rl_train.report.lines import read_options


class SavedModel(NamedTuple):
    """A training checkpoint of a model: the options of its run, the folder of its checkpoints, and the step.

    `files` is the folder on this machine, also where `folder` is at a URL.
    """

    options: RunOptions
    folder: Path
    files: Path
    step: int


@contextmanager
def open_step(path: Path) -> Iterator[SavedModel]:
    """Yield the training checkpoint that a path names.

    Args:
        path: `RUN`, `RUN/training/MODEL`, or a step in it, `RUN/training/MODEL/step-00000020`; without a step the
            newest one, and without a model the policy's, or the reward model's. `RUN` may be a URL.

    Raises:
        ValueError: The path is no run's, or there is no such checkpoint; names those that there are.
    """
    # Above the bucket of a URL pathlib has the working folder.
    folders = [path, *filter(Store.of, path.parents)] if Store.of(path) else [path, *path.absolute().parents]
    run = next((folder for folder in folders if exists(folder / MARK)), None)
    if run is None:
        raise ValueError(f"{path} is in no run, a folder with {MARK}; give the --out of a run, or a step in it")
    with mirrored(run, lambda name: name == MARK or name.startswith("training/")) as local:
        values = read_options(local, "give the --out of a run")
        kind = FILE_RECIPES.get(str(values.get(COMMAND)), TrainOptions)
        options = kind(**{name: values[name] for name in kind.names() if values.get(name) is not None})
        inside = path.absolute().relative_to(run.absolute()).parts
        names = [part for part in inside if part != "training" and not part.startswith("step-")] or options.trained
        folder, step = Path("training", names[0]), re.fullmatch(r"step-(\d+)", inside[-1] if inside else "")
        number, steps = latest_step(local / folder) if step is None else int(step[1]), saved_steps(local / folder)
        if number not in steps:
            what = "training checkpoint" if step is None else f"checkpoint {path.name}"
            raise ValueError(f"{run / folder} has no {what}; its steps are {steps}")
        yield SavedModel(options, run / folder, local / folder, number)


def export(path: Path, out: Path, progress: Callable[[int, int], None]) -> SavedModel:
    """Write a training checkpoint as a Hugging Face checkpoint, adapters merged; return which one it was.

    Without adapters the weights are copied through a bounded buffer. With adapters the model is loaded on the CPU.

    Raises:
        ValueError: As for `open_step`; or `out` holds something else than a checkpoint, or is the run's first model.
    """
    with open_step(path) as saved:
        options, model = saved.options, Path(checkpoint_folder(saved.options.model))
        if out.resolve() == model.resolve():
            raise ValueError(f"{out} is the model that the run began with; choose another folder")
        if options.lora is None:
            step = saved.files / f"step-{saved.step:08d}"
            dtype = None if options.engine.dtype else stored_dtype(Checkpoint(model))
            training_to_hf(step, out, dtype=dtype, copy_from=model, progress=progress)
            return saved
        kind, cpu = _kind(saved), Devices.find("cpu")
        engine = with_dtype(engine_options(options, ParallelDims(), kind.role), Checkpoint(model), cpu)
        worker = kind.from_pretrained(model, backend=options.backend, device=cpu.current, **vars(engine))
        worker.load_training(saved.files, step=saved.step)
        worker.save_pretrained(out)
        return saved


def _kind(saved: SavedModel) -> type[Worker]:
    """Return the class of a saved model."""
    if isinstance(saved.options, TrainOptions):
        from rl_train.loop.checked_run import policy_kind

        return Critic if saved.folder.name == "critic" else policy_kind(saved.options)
    return OBJECTIVES[saved.options.learned].kind
