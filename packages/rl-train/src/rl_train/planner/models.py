"""`Planned`: the planned memory of all models of a run on the same devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt import Checkpoint, Role
from parallel_layers import ParallelDims
from parallel_models import model_config
from rl_train.planner.memory import Memory, MemoryOptions
from rl_train.planner.plan import plan_memory


@dataclass(frozen=True)
class Planned:
    """The planned memory of an actor and of the other models on the same devices, of each model on each stage.

    With `offload` one model is on the devices at a time.
    """

    options: MemoryOptions
    models: Mapping[str, list[Memory]]
    offload: bool = False

    @property
    def peak(self) -> int:
        """Return the bytes of the fullest rank: all resting models, plus the working memory of one model."""
        return max(self._peak(stage) for stage in range(self.options.dims.pp))

    def _peak(self, stage: int) -> int:
        models = [memory[stage] for memory in self.models.values()]
        resting = 0 if self.offload else sum(memory.resting for memory in models)
        return max(memory.total if self.offload else resting + memory.total - memory.resting for memory in models)

    @property
    def host(self) -> int:
        """Return the bytes of optimizer state in host memory, of the fullest rank."""
        return max(sum(memory.host for memory in stage) for stage in zip(*self.models.values(), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, in bytes."""
        dims = self.options.dims
        return {
            "dims": dims_text(dims),
            "ranks": dims.world_size,
            "tokens": self.options.tokens,
            "offload": self.offload,
            "savings": savings_text(self.options),
            "peak": self.peak,
            "host": self.host,
            "models": {
                name: [asdict(memory) | {"total": memory.total} for memory in stages]
                for name, stages in self.models.items()
            },
        }


def plan_models(
    model: Checkpoint,
    options: MemoryOptions,
    *,
    critic: bool,
    reference: bool,
    teacher: Checkpoint | None = None,
    judge: Checkpoint | None = None,
    share_backbone: bool = False,
    offload: bool = False,
) -> Planned:
    """Plan an actor, and on request a critic and a reference of the same size; see `plan_memory`.

    With `share_backbone`, actor and critic are one model, an `ActorCritic`. With adapters the critic learns on the
    actor's frozen base, which is counted once unless models are offloaded, and the reference is the actor without them.
    The actor learns from the whole distribution of a `teacher`, of which it holds the head; with adapters a teacher of
    the same checkpoint is the actor without them. A `judge` draws, with the cache of the options, and does not learn.
    """
    if critic and share_backbone:
        raise ValueError(
            "critic (a separate model) and share_backbone (a head on the actor's layers) exclude each other; "
            "leave one of them out"
        )
    trained: dict[str, Role] = {"actor": "causal_lm"}
    if critic:
        trained["critic"] = "value"
    if share_backbone:
        trained = {"actor_critic": "causal_lm_with_value"}
    without_cache = replace(options, cache=None)
    if teacher is not None:
        options = replace(options, teacher_size=model_config(teacher).decoder.hidden_size)
    models = {
        name: plan_memory(model, without_cache if role == "value" else options, role=role, trained=True)
        for name, role in trained.items()
    }
    if options.lora is not None and critic and not offload:
        base = plan_memory(model, without_cache, role="value", trained=False)
        critic_and_base = zip(models["critic"], base, strict=True)
        models["critic"] = [
            replace(memory, weights=memory.weights - frozen.weights) for memory, frozen in critic_and_base
        ]
    if reference and options.lora is None:
        models["reference"] = plan_memory(model, without_cache, role="causal_lm", trained=False)
    frozen_options = replace(without_cache, lora=None, base_format=None)
    if teacher is not None and (options.lora is None or teacher.path != model.path):
        models["teacher"] = plan_memory(teacher, frozen_options, role="causal_lm", trained=False)
    if judge is not None:
        draws = replace(frozen_options, cache=options.cache)
        models["judge"] = plan_memory(judge, draws, role="causal_lm", trained=False)
    return Planned(options, models, offload)


def dims_text(dims: ParallelDims) -> str:
    """Return the grid as text that `ParallelDims.parse` reads."""
    sizes = {name: getattr(dims, name) for name in ("dp", "pp", "cp", "tp", "ep", "replicate")}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"


def savings_text(options: MemoryOptions) -> str:
    """Return the options that save memory, as `rl-train train` takes them."""
    layers = options.recompute
    text = layers if layers is None or isinstance(layers, str) else ",".join(_spans(sorted(set(layers))))
    flags = [f"--recompute {text}"] * (text is not None)
    flags += [f"--tiled-mlp {options.tiled_mlp}"] * (options.tiled_mlp is not None)
    flags += ["--engine.offload-activations"] * options.offload_activations
    flags += ["--optimizer.offload"] * options.optimizer.offload
    return " ".join(flags) or "all saved"


def _spans(numbers: Sequence[int]) -> list[str]:
    """Return ascending numbers as text, such as `["0-5", "8"]`."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
