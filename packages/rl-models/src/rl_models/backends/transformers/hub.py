"""Loading and saving transformers models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notes of transformers inside."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_model(
    auto_class: Any,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    may_lack: str = "$^",
    may_have: str = "$^",
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a local folder by `auto_class.from_pretrained`, in evaluation mode.

    transformers only warns of missing, unexpected and misshapen tensors; raise here.

    Args:
        auto_class, path, **options: Class, such as `AutoModelForCausalLM`, and arguments of its `from_pretrained`.
        dtype: The dtype of the parameters; None: as stored.
        may_lack: Regular expression of parameters that the checkpoint may lack; they keep their initial values.
        may_have: Regular expression of tensors that the checkpoint may have beyond the model's.

    Returns:
        The model and the names of the parameters that the checkpoint lacked.

    Raises:
        ValueError: The checkpoint lacks tensors, has others, or has tensors of another shape.
    """
    with quiet():
        # The error below names tensors of another shape; transformers would only log the names.
        model, info = auto_class.from_pretrained(
            path,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    lacked = sorted(info["missing_keys"])
    missing = [name for name in lacked if not re.fullmatch(may_lack, name)]
    unexpected = [name for name in sorted(info["unexpected_keys"]) if not re.fullmatch(may_have, name)]
    misshapen = [
        f"{name}: {tuple(stored)} where the model has {tuple(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    refuse_misfits(path, missing, unexpected, misshapen)
    return model.eval(), lacked


def refuse_misfits(
    path: str | os.PathLike[str], missing: list[str], unexpected: list[str], misshapen: list[str]
) -> None:
    """Raise ValueError if a checkpoint lacks tensors, has others, or has tensors of another shape."""
    for problem, names in (
        ("lacks", missing),
        ("has unexpected", unexpected),
        ("has the wrong shape for", misshapen),
    ):
        if names:
            number = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            raise ValueError(
                f"{path} {problem} {', '.join(names[:3])} ({number}); the files do not belong to its config.json"
            )


def with_score(auto_class: Any, path: str | os.PathLike[str]) -> type[PreTrainedModel]:
    """Return the language model's class of a checkpoint, with a value head `score` beside its own head."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    language_model: Any = auto_class._model_mapping[type(config)]

    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        config.num_labels = 1
        language_model.__init__(self, config, *args, **options)
        self.score = nn.Linear(config.get_text_config().hidden_size, 1)

    # Under the name of transformers' own class, which a saved config names and conversions of tensors go by.
    own = {"__init__": build, "__module__": language_model.__module__, "from_config": classmethod(_from_config)}
    return type(language_model.__name__, (language_model,), own)


def _from_config(kind: Any, /, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
    """Make a model of a class of transformers as `AutoModel.from_config` does; a class of ours needs no trust."""
    return kind._from_config(config, **options)


def save_model(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Save a model by `save_pretrained` on this process; a model with sharded parameters gives its whole `tensors`.

    Raises:
        RuntimeError: transformers has written nothing.
    """
    # transformers writes on global rank 0, which may be outside the model's grid.
    model.__dict__["should_save_on_this_rank"] = lambda is_main_process: True
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
    finally:
        del model.__dict__["should_save_on_this_rank"]
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise RuntimeError(f"transformers has saved nothing to {folder}: save_pretrained skipped this rank")


def own_memory(model: PreTrainedModel) -> None:
    """Copy tensors that map the checkpoint's files, which `Worker.offload` could not free."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.detach().clone()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds: parameters (tied parameters once) and saved buffers."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}
