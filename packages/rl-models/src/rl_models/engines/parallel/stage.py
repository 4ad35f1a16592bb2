"""`Stage`: one chunk of a model as FSDP2 and a pipeline call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from rl_models.models.decoder import Chunk
from rl_models.models.language_models import PackedModel

# The result of the chunk before (None in the first chunk) -> the input of the next chunk, or the outputs.
Task = Callable[[Tensor | None], Any]


class Stage(nn.Module):
    """The parameters of one chunk of a model, and a `forward` that runs the next of its tasks.

    FSDP2 and torch's pipelines need one fixed `forward`; tasks adapt calls with varying arguments to it.

    Args:
        model: The model, which keeps its own names for the same parameters.
        chunk: One of `model.chunks`.
    """

    def __init__(self, model: PackedModel, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk
        self.blocks = nn.ModuleList(model.model.layers[str(i)] for i in chunk.layers)
        ends: list[nn.Module] = [model.model.embed_tokens] if chunk.first else []
        if chunk.last:
            ends += [model.model.norm, *(getattr(model, name) for name in ("lm_head", "score") if hasattr(model, name))]
        self.ends = nn.ModuleList(ends)
        self._tasks: Iterator[Task] = iter(())

    def give(self, tasks: Iterable[Task]) -> None:
        """Set the tasks of the next calls of `forward`, one each."""
        self._tasks = iter(tasks)

    def run(self, task: Task, hidden: Tensor | None = None) -> Any:
        """Do one task."""
        self.give([task])
        return self(hidden)

    def forward(self, hidden: Tensor | None = None) -> Any:
        """Do the next task."""
        return next(self._tasks)(hidden)
