"""`ShardOptimizer`: the optimizer of the parameters that a rank holds, with fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ckpt import Block
from ckpt.layout import on_this_rank
from ckpt.transfer import WholeMatrices
from parallel_layers import clip_grad_norm_
from parallel_layers.memory import StreamedTensors
from parallel_layers.module import is_dtensor
from parallel_layers.training import has_weight_decay
from parallel_models.engine.engine import Shards
from parallel_models.generation.session import end_sessions
from parallel_models.optimizers.adamw import AdamW
from parallel_models.optimizers.interface import Optimizer, OptimizerOptions
from parallel_models.optimizers.moments import STORAGES
from parallel_models.optimizers.muon import Muon, is_hidden_matrix
from parallel_models.optimizers.rounding import coordinates
from parallel_models.optimizers.rules import Rule, Weight


class ShardOptimizer(Optimizer):
    """AdamW, or Muon and AdamW, over a module's parameters on this rank, with fp32 master weights.

    A bf16 parameter is its fp32 master weight, rounded after each step, so that small updates are not lost. Gradients
    of bf16 parameters are summed in fp32 over micro-batches. fp32 parameters are their own master weights. AdamW works
    elementwise, so the local part of a DTensor is enough; Muon's matrices are gathered one at a time.

    `module` is already sharded; `parallel_layers.clip_grad_norm_` describes `groups` and `pipeline_group`. `shards`
    describe the parameters as parts of a checkpoint's tensors, and the ranks of `everyone` hold the whole model. Every
    rank of `everyone` builds the optimizer.

    Raises:
        ValueError: A parameter is fp16, whose small gradients vanish without a loss scale.
    """

    def __init__(
        self,
        module: nn.Module,
        options: OptimizerOptions,
        *,
        shards: Shards | None = None,
        everyone: ProcessGroup | None = None,
        groups: Sequence[ProcessGroup | None] = (),
        pipeline_group: ProcessGroup | None = None,
    ) -> None:
        self.module, self.options, self.groups, self.pipeline_group = module, options, groups, pipeline_group
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if any(parameter.dtype == torch.float16 for parameter in trained.values()):
            raise ValueError(
                "a model in fp16 needs a loss scale, which only backend='megatron' has: small gradients vanish without "
                "one; load the model with dtype=torch.bfloat16 or torch.float32"
            )
        device = next((parameter.device for parameter in trained.values()), torch.device("cpu"))
        host = StreamedTensors(device) if options.offload else None
        self._masters = _masters(list(trained.values()), host)
        self._rule: dict[Tensor, Rule] = {}
        self._rules: list[Rule] = []
        places = {}
        if not STORAGES[options.moments].exact or options.algorithm == "muon":
            blocks = _blocks(shards) if shards is not None else {}
            places = {
                master: coordinates(blocks.get(p) or Block.whole(name, tuple(master.shape)), device)
                for (name, p), master in zip(trained.items(), self._masters.values(), strict=True)
            }
        hidden: set[Tensor] = set()
        if options.algorithm == "muon":
            assert shards is not None
            matrices = WholeMatrices(shards.chunks, shards.layout, everyone, is_hidden_matrix)
            hidden = set(matrices.parameters)
            masters = {parameter: self._masters[parameter] for parameter in hidden}
            muon = Muon(masters, matrices, options, places, host)
            self._rule |= dict.fromkeys(masters.values(), muon)
            self._rules.append(muon)  # also on a rank that has no matrix: every rank takes part
        decays: dict[float, list[Tensor]] = {}
        for name, parameter in trained.items():
            if parameter not in hidden:
                decay = options.weight_decay if has_weight_decay(name, parameter) else 0.0
                decays.setdefault(decay, []).append(self._masters[parameter])
        adamw = AdamW(decays, options, places, host)
        self._rule |= {master: adamw for masters in decays.values() for master in masters}
        self._rules.append(adamw)

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Clip, step, and drop the gradients; return the norm before clipping."""
        end_sessions()
        norm = float(
            clip_grad_norm_(
                self.module, self.options.max_grad_norm, groups=self.groups, pipeline_group=self.pipeline_group
            )
        )
        if math.isfinite(norm):
            weights = {
                master: Weight(
                    None if parameter.grad is None else _local(parameter.grad).contiguous(),
                    None if parameter.dtype == master.dtype else _local(parameter),
                )
                for parameter, master in self._masters.items()
            }
            for rule in self._rules:
                rule.step(learning_rate, weights)
        for parameter in self._masters:
            parameter.grad = None
        return norm

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter; a frozen parameter has none."""
        if not parameter.requires_grad:
            return {}
        master = self._masters[parameter]  # a KeyError if FSDP2 has gathered the parameters
        slots = self._rule[master].state(master)
        return slots if parameter.dtype == master.dtype else {**slots, "master": master}

    def slots(self, parameter: Tensor) -> frozenset[str]:
        """See `Optimizer`."""
        return self._rule[self._masters[parameter]].slots

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter; a frozen parameter has none."""
        if not parameter.requires_grad:
            return
        master = self._masters[parameter]
        if parameter.dtype != master.dtype or "master" in state:
            # fp32 parameters are their own master weights, also in a run that was saved in bf16.
            master.copy_(state.get("master", _local(parameter)))
        slots = {name: value for name, value in state.items() if name != "master"}
        self._rule[master].load_state(master, slots)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the moments, and the master weights that are not parameters."""
        for parameter, master in self._masters.items():
            if parameter.dtype != master.dtype:
                yield master
        for rule in self._rules:
            yield from rule.tensors()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


@torch.no_grad()
def _masters(parameters: Sequence[Tensor], host: StreamedTensors | None) -> dict[Tensor, Tensor]:
    """Return the master weight of each parameter: a bf16 parameter's in fp32, in host memory if given."""
    low = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter in low:
        if not is_dtensor(parameter):
            # FSDP2 has its own dtype for sums of gradients, see `parallel_models.training.fsdp`.
            parameter.grad_dtype = torch.float32
    if host is None:
        wide = [_local(parameter).float() for parameter in low]
    else:
        wide = host.zeros([torch.empty(_local(p).shape, dtype=torch.float32, device="meta") for p in low])
        for parameter, master in zip(low, wide, strict=True):
            master.copy_(_local(parameter))
    masters = dict(zip(low, wide, strict=True))
    return {parameter: masters.get(parameter, _local(parameter)) for parameter in parameters}


def _blocks(shards: Shards) -> dict[Tensor, Block]:
    """Return the block of this rank's part of each parameter."""
    blocks: dict[Tensor, Block] = {}
    for place, parameters in shards.chunks:
        for name, parameter in parameters.items():
            block = shards.layout.at(place)[name]
            if any(shards.layout.canonical[source].copy_of is not None for source in block.names):
                continue  # a second name of a parameter that is listed by its first name, too
            _, box = on_this_rank(name, parameter, block.shape)
            blocks[parameter] = block.part(box)
    return blocks
