"""Router replay: record the experts that each layer of a mixture chooses, or send tokens to recorded experts.

`parallel_layers.moe.RouterReplay` holds the experts of one batch by layer number, so routing of one backend replays on
another (arXiv:2510.11370). The replay travels in the plan of the batch, which attention receives also in the recompute
of gradient checkpointing; attention hands the plan to the router of its layer. A router of transformers chooses by one
`topk` over the scores of all E experts. While the router runs, this `topk` returns the recorded experts with the
router's own scores of them, so gradients reach the scores.

Shapes: T tokens, E experts, k experts a token.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_patches.backbone import decoder_layers
from hf_patches.batch import PLAN_KEYWORD, BatchPlan
from hf_patches.journal import Journal
from hf_patches.linear_attention import find_mixers
from hf_patches.swaps import called_names, rebound
from parallel_layers.moe import RouterReplay

_ROUTER_CLASS = re.compile(r"Top[kK]Router$")
_EXPERTS = re.compile(r"(Experts|Moe|MoE)$")


class ReplayedRouter:
    """Replaces the `forward` of one router, in layer `number` of the model."""

    def __init__(self, router: nn.Module, number: int) -> None:
        self.router, self.number, self.original = router, number, router.forward
        self.plan: BatchPlan | None = None

    def take_plan(self, mixer: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        """Pre-hook of the token mixer of the same layer, which runs before the router, also in a recompute."""
        self.plan = kwargs.get(PLAN_KEYWORD)

    def forward(self, hidden: Tensor, *correction: Tensor) -> Any:
        """Return the output of the router for its own choice or for the recorded choice.

        MiniMax-M2 passes the correction bias of the scores as an argument.
        """
        plan, self.plan = self.plan, None
        if plan is None or plan.replay is None:
            return self.original(hidden, *correction)
        replay = plan.replay

        def select(experts: Tensor) -> Tensor:
            if replay.recording:
                replay.select(self.number, plan.gather(experts))
                return experts
            first_token = plan.local_tokens.start
            return replay.select(self.number, experts, first_token=first_token, num_tokens=plan.num_tokens)

        num_experts, top_k = len(self.router.get_parameter("weight")), int(self.router.top_k)  # type: ignore[arg-type]
        with _TopKOverride(select, num_experts, top_k) as choosing:
            output = self.original(hidden, *correction)
        if choosing.choices != 1:
            raise RuntimeError(
                f"{type(self.router).__name__} chose {choosing.choices} times by topk instead of once: its routing "
                "cannot be recorded or replayed in this version of transformers"
            )
        return output


class PlanningLayer:
    """Replaces the `forward` of a layer without a token mixer, and hands its router the plan of the batch.

    A recompute needs the plan, too. transformers 5.23 checkpoints inside the `forward` of a layer, so that
    the plan must be handed over inside the checkpoint.
    """

    def __init__(self, layer: nn.Module, router: ReplayedRouter) -> None:
        self.layer: Any = layer
        self.router, self.original = router, rebound(layer, {})
        self.checkpoints_inside = type(layer).forward.__code__.co_name == "forward_with_checkpointing"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        checkpoints = self.checkpoints_inside and self.layer.gradient_checkpointing and self.layer.training
        if checkpoints and torch.is_grad_enabled():
            return self.layer._gradient_checkpointing_func(partial(self._run, **kwargs), *args)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.router.plan = kwargs.get(PLAN_KEYWORD)
        return self.original(*args, **kwargs)


class _TopKOverride(TorchFunctionMode):
    """Answers topk(scores `[T, E]`, k) with the experts of `select` and their scores before groups were masked."""

    def __init__(self, select: Callable[[Tensor], Tensor], num_experts: int, top_k: int) -> None:
        super().__init__()
        self.select, self.num_experts, self.top_k = select, num_experts, top_k
        self.choices = 0
        # By id of a masked tensor: the tensor itself (which keeps the id taken) and the tensor before the mask.
        self.unmasked: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.masked_fill:
            self.unmasked[id(result)] = (result, args[0])
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, chosen = args[0], result.indices
        if scores.dim() != 2 or (scores.shape[-1], chosen.shape[-1]) != (self.num_experts, self.top_k):
            return result  # the choice of groups
        self.choices += 1
        experts = self.select(chosen)
        if experts is chosen:
            return result
        _, scores = self.unmasked.get(id(scores), (scores, scores))
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def has_experts(backbone: nn.Module) -> bool:
    """Return whether tokens are sent to experts, so that tokens of all sequences share GEMMs."""
    return any(_EXPERTS.search(type(module).__name__) for module in backbone.modules())


def find_routers(layers: nn.ModuleList) -> dict[int, nn.Module]:
    """Return the router of each decoder layer with routed experts, by layer number.

    There are none if routers only score, and code outside them chooses the experts (transformers below 5.15).

    Raises:
        ValueError: A layer has several routers.
    """
    router_of: dict[int, nn.Module] = {}
    for number, layer in enumerate(layers):
        routers = [module for module in layer.modules() if _ROUTER_CLASS.search(type(module).__name__)]
        if len(routers) > 1:
            raise ValueError(f"layer {number} has {len(routers)} routers, expected one; leave out router_replay")
        if routers:
            router_of[number] = routers[0]
    return router_of if all("topk" in called_names(router) for router in router_of.values()) else {}


def hook_routers(
    backbone: nn.Module, names: Mapping[nn.Module, str], journal: Journal, *, required: bool
) -> dict[int, ReplayedRouter]:
    """Let the routers record and replay their experts; return the replaced routers by layer number.

    The token mixer of each layer, which runs before its router, hands the router the plan of the batch; a layer without
    token mixer does so itself.

    Raises:
        ValueError: Routers are required and there are none.
    """
    layers = decoder_layers(backbone)
    replayed_routers = {}
    for number, router in find_routers(layers).items():
        replayed_routers[number] = replayed = ReplayedRouter(router, number)
        journal.set_attribute(router, "forward", replayed.forward, names[router], "records and replays routing")
        layer, what = layers[number], "hands its layer's router the batch's plan"
        mixers = find_mixers(layer) or [module for name, module in layer.named_children() if name == "self_attn"]
        if mixers:
            hook = mixers[0].register_forward_pre_hook(replayed.take_plan, with_kwargs=True)
            journal.add_hook(hook, names[mixers[0]], what)
        else:
            journal.set_attribute(layer, "forward", PlanningLayer(layer, replayed).forward, names[layer], what)
    if required and not replayed_routers:
        raise ValueError("router_replay=True: the model has no routers of experts; leave it out")
    return replayed_routers


def padded_replay(replay: RouterReplay, padding: int) -> RouterReplay:
    """Return the replay for a batch with `padding` more tokens at its end, whose experts the routers choose freely."""
    if replay.recording or not padding:
        return replay
    longer = replay.replaying()
    longer.experts = {
        layer: torch.cat([chosen, chosen.new_full((padding, chosen.shape[1]), -1)])
        for layer, chosen in replay.experts.items()
    }
    return longer
