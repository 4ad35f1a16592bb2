"""Shard a patched model over the ranks of a mesh by transformers' own plans for tensor and expert parallelism.

transformers makes DTensors of the parameters that the plans of a family name, and wraps the forwards of their modules.
It would form a mesh of all ranks of the program; here its functions take a mesh of the caller. Two kinds of rules are
replaced: the fused head takes its rows of the vocabulary itself, so that no rank holds logits; and where each rank uses
a norm for its own heads, the gradients of one backward are summed. transformers sums the gradients accumulated so far,
which counts the gradients of earlier micro-batches twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from parallel_layers.distributed import copy_to_tensor_parallel

T = TypeVar("T")

# The first transformers whose functions take a mesh and a plan of module names.
_OLDEST = "5.23"
_NORM_OF_LOCAL_HEADS = "replicated_with_grad_allreduce"
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class TensorParallel:
    """A mesh with one axis over which a model is sharded.

    Attributes:
        mesh: The ranks, which all compute the same tokens.
        experts: Each rank holds whole experts; tokens travel to the ranks of their experts.

    Raises:
        ValueError: The installed transformers cannot shard a model over a mesh of the caller.
    """

    mesh: DeviceMesh
    experts: bool = False

    def __post_init__(self) -> None:
        if Version(transformers.__version__) < Version(_OLDEST):
            raise ValueError(
                f"tensor parallelism needs transformers {_OLDEST} or later, whose functions take a mesh; installed is "
                f"{transformers.__version__}: pip install 'transformers>={_OLDEST}', or leave out tensor parallelism"
            )

    def agree(self, step: Callable[[], T]) -> T:
        """Return the result of a step without collectives; a failure on one rank raises on all ranks.

        Every rank of the mesh calls this method, so that no rank waits for a rank that failed.
        """
        try:
            result, problem = step(), None
        except Exception as error:  # of any kind: a model's code runs in the step
            problem = error
        failed = torch.tensor([problem is not None], dtype=torch.int32, device=self.mesh.device_type)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.mesh.get_group())
        if problem is not None:
            raise problem
        if failed.item():
            raise RuntimeError("another rank of the mesh failed; see its error")
        return result

    def shard(self, model: PreTrainedModel, fused_head: nn.Module | None) -> None:
        """Make DTensors of the parameters of a patched model in place, and let its modules compute with them.

        Raises:
            ValueError: The family has no plan, or a tensor cannot be divided evenly in one box for each rank.
        """
        from transformers.distributed import DistributedConfig
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        size, group = self.mesh.size(), self.mesh.get_group()
        config: Any = model.config.get_text_config()
        for name in _HEADS:
            heads = vars(config).get(name) or size  # a property may refuse to name one number for all layers
            if heads % size:
                fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                raise ValueError(f"{name}={heads} is not divisible by tp={size}; use tp in {{{fits}}}")
        for plan in ("tp_plan", "ep_plan")[: 1 + self.experts]:
            if not getattr(model, plan):
                raise ValueError(f"transformers has no {plan} of this family")
        settings = DistributedConfig(tp_size=size, ep_size=size if self.experts else 1)
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(settings)
        stored = {name for name, _ in model.named_parameters()}
        modules = dict(model.named_modules())
        for name, style in list(tp_plan.items()):
            if style == _NORM_OF_LOCAL_HEADS and name in modules:
                _sum_gradients(modules[name], group)
            is_tied = name not in stored and name not in modules
            if style == _NORM_OF_LOCAL_HEADS or is_tied or modules.get(name, model) is fused_head:
                del tp_plan[name]
        apply_tensor_parallelism(model, self.mesh, tp_plan)
        if self.experts:
            apply_expert_parallelism(model, self.mesh, self.mesh, ep_plan, ep_implementation="all_to_all")
        model.tie_weights()
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                _require_box(name, parameter)


def _require_box(name: str, parameter: DTensor) -> None:
    """Raise ValueError unless each rank holds an equal part of a parameter, in one box."""
    for placement in parameter.placements:
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            raise ValueError(f"transformers divides {name} in stripes; use ep equal to tp, for whole experts")
        length, size = parameter.shape[placement.dim], parameter.device_mesh.size()
        if length % size:
            raise ValueError(f"dim {placement.dim} of {name} has {length} elements, not divisible by tp={size}")


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a module's parameters over a group, whose ranks use the parameters for different heads."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = dict(module._parameters)
        copies = {name: copy_to_tensor_parallel(x, group) for name, x in parameters.items() if x is not None}
        module._parameters.update(copies)  # type: ignore[arg-type]
        try:
            return original(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.forward = forward
