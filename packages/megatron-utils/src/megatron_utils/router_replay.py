"""Router replay on Megatron-Core: record where tokens went, send them there again, forward and under recompute.

What is recorded and replayed is `parallel_layers.moe.RouterReplay`, an object for one micro-batch, keyed by global
layer number; so routing recorded on one backend replays on another (https://arxiv.org/abs/2510.11370). Megatron-Core's
own `RouterReplay` lists every router of the process in a class variable, without layer numbers; here a router's hook is
set for the time of a `with` block and nothing is global.

Between backends and grids, routing travels per sequence, in the caller's order: `[L_i, M, k]` int16 for the M layers of
the model that are mixtures, k experts a token.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_utils.gpt.modules import CONTEXT_PARALLEL
from megatron_utils.grid import MegatronGrid
from parallel_layers import PackedSequence
from parallel_layers.attention.context_parallel import split_sequence
from parallel_layers.moe import RouterReplay

TopK = Callable[..., tuple[Tensor, Tensor]]


class RoutingSession:
    """The hooks of one model's routers, while `router_replay` is entered."""

    def __init__(self) -> None:
        self._current: RouterReplay | None = None
        self._recomputes = False

    @contextlib.contextmanager
    def micro_batch(self, replay: RouterReplay, *, backward: bool = False) -> Iterator[None]:
        """Within this, the model's forward records into `replay`, or replays it.

        Args:
            replay: of the micro-batch whose forward runs inside.
            backward: a backward will follow, later and maybe after other micro-batches' forwards. What it recomputes
                is routed by the same `replay`, for the backwards of a stage come in the order of its forwards.
        """
        if self._current is not None:
            raise RuntimeError("a micro-batch's forward is already running; leave it before entering another")
        self._current, self._recomputes = replay, backward
        try:
            yield
        finally:
            self._current = None


class _Hook:
    """What a Megatron router asks for its experts, in the place of its own `RouterReplay`."""

    def __init__(self, session: RoutingSession, router: TopKRouter) -> None:
        self._session = session
        # Megatron counts layers from 1.
        self._layer = router.layer_number - 1
        self._tp: ProcessGroup | None = router.tp_group if router.config.sequence_parallel else None
        self._cp: ProcessGroup = router.cp_group
        # Those among whom the tokens of a pack are divided.
        self._everyone: ProcessGroup = router.tp_cp_group
        self._layout = CONTEXT_PARALLEL[router.config.cp_comm_type][1]
        self._to_recompute: deque[RouterReplay] = deque()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts `[T', k]` of this rank's tokens; the scores are the router's own, gradient and all."""
        replay = self._session._current
        if replay is not None:
            # A checkpointed region runs without a graph first; its recomputation comes in the backward.
            if self._session._recomputes and not torch.is_grad_enabled():
                self._to_recompute.append(replay)
        elif self._to_recompute:
            replay = self._to_recompute.popleft()
        else:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        size = self._cp.size() * (self._tp.size() if self._tp else 1)
        if size == 1:
            experts = replay.select(self._layer, chosen)
        else:
            mine = self._places(len(chosen) * size, chosen.device)
            whole = chosen.new_full((len(chosen) * size, topk), -1).index_copy_(0, mine, chosen)
            if replay.recording:
                dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self._everyone)
            experts = replay.select(self._layer, whole)[mine]
        return scores.gather(1, experts), experts

    def _places(self, num_tokens: int, device: torch.device) -> Tensor:
        """Where this rank's tokens stand in the pack: `[T']` int64."""
        places = split_sequence(torch.arange(num_tokens, device=device), self._cp, layout=self._layout)
        return places if self._tp is None else places.chunk(self._tp.size())[self._tp.rank()]


@contextlib.contextmanager
def router_replay(chunks: Sequence[nn.Module]) -> Iterator[RoutingSession]:
    """Put hooks on the routers of a model's chunks, and take them off again, whatever happens inside.

    A pipeline stage may have none of the model's routers.

    Raises:
        ValueError: The model has no routers, or a router that chooses its experts in code of its own and never asks
            the hook; the error names the option.
    """
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    if not routers and not any(moe_layers(chunk.config) for chunk in chunks if hasattr(chunk, "config")):
        raise ValueError("the model has no mixture-of-experts layer; there is no routing to record or replay")
    for config in {id(router.config): router.config for router in routers}.values():
        for option, value in _WITHOUT_HOOK.items():
            if getattr(config, option) == value:
                raise ValueError(
                    f"{option}={value!r}: this router chooses experts without asking the replay, so nothing would be "
                    "recorded or replayed; build the model without this option"
                )
    session = RoutingSession()
    before = [router.router_replay for router in routers]
    for router in routers:
        router.router_replay = _Hook(session, router)
    try:
        yield session
    finally:
        for router, own in zip(routers, before, strict=True):
            router.router_replay = own


# Options of `TransformerConfig` with which Megatron-Core's routing never calls the hook.
_WITHOUT_HOOK = {"moe_router_fusion": True, "moe_router_load_balancing_type": "sinkhorn"}


def moe_layers(config: Any) -> list[int]:
    """The global numbers, from 0, of a model's layers that are mixtures (`config` is Megatron's)."""
    if not config.num_moe_experts:
        return []
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return [layer for layer in range(config.num_layers) if layer % pattern == 0]
    return [layer for layer, is_moe in enumerate(pattern) if is_moe]


def complete_recordings(
    replays: Sequence[RouterReplay], micro_batches: Sequence[PackedSequence], config: Any, grid: MegatronGrid
) -> None:
    """Give every stage of a pipeline what the others have recorded: one all-reduce over the stages a micro-batch."""
    layers, k = moe_layers(config), config.moe_router_topk
    for replay, packed in zip(replays, micro_batches, strict=True):
        # gloo and NCCL both reduce int32.
        table = packed.input_ids.new_full((packed.num_tokens, len(layers), k), -1, dtype=torch.int32)
        for column, layer in enumerate(layers):
            if layer in replay.experts:
                table[:, column] = replay.experts[layer][: packed.num_tokens].to(table.dtype)
        if grid.dims.pp > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=grid.groups.pp)
        replay.experts = dict(zip(layers, table.unbind(1), strict=True))


def collect_routing(
    replays: Sequence[RouterReplay], micro_batches: Sequence[PackedSequence], config: Any, grid: MegatronGrid
) -> list[list[Tensor]]:
    """What was recorded, whole and per sequence: for each micro-batch, for each of its sequences, `[L_i, M, k]` int16.

    Every stage of a pipeline has recorded its own layers; all of them get all. `restore_order` puts the sequences into
    the caller's order.
    """
    complete_recordings(replays, micro_batches, config, grid)
    return [
        packed.split(replay.as_tensor().to(torch.int16)) for replay, packed in zip(replays, micro_batches, strict=True)
    ]


def make_replay(
    routing: Sequence[Tensor], packed: PackedSequence, layers: Sequence[int], *, num_experts: int
) -> RouterReplay:
    """A replay for one packed batch from routing per sequence, whatever grid or backend recorded it.

    Padding tokens get distinct experts, spread evenly, so that they burden none.

    Args:
        routing: `[L_i, M, k]` integers for each sequence of `packed`, in its order.
        packed: the batch that will run.
        layers: the global numbers of the M mixture layers (`moe_layers`).
        num_experts: E.

    Raises:
        ValueError: a sequence whose routing has another shape, or a row that is missing (-1), out of range or names an
            expert twice: with its layer and token.
    """
    lengths = packed.lengths
    if len(routing) != len(lengths):
        raise ValueError(f"routing of {len(routing)} sequences for a batch of {len(lengths)}")
    top_k = routing[0].shape[-1] if routing else 1
    for index, (table, length) in enumerate(zip(routing, lengths, strict=True)):
        if table.shape != (length, len(layers), top_k):
            raise ValueError(
                f"routing of sequence {index} has shape {list(table.shape)}, not [{length}, {len(layers)}, {top_k}]"
            )
        if (missing := (table < 0).nonzero()).numel():
            token, column, _ = missing[0].tolist()
            raise ValueError(f"routing of sequence {index} is missing at layer {layers[column]}, token {token}")
    device = packed.input_ids.device
    like = torch.empty(0, top_k, dtype=torch.int64, device=device)
    padding = spread_experts(packed.padding, num_experts, like)[:, None].expand(-1, len(layers), -1)
    whole = torch.cat([*(table.to(device, torch.int64) for table in routing), padding])
    return RouterReplay.from_tensor(whole, layers, num_experts=num_experts)


def spread_experts(num_tokens: int, num_experts: int, like_Tk: Tensor) -> Tensor:
    """Experts `[num_tokens, k]` for padding: distinct for each token, and as many tokens for each as can be."""
    top_k = like_Tk.shape[1]
    numbers = torch.arange(num_tokens * top_k, dtype=like_Tk.dtype, device=like_Tk.device)
    return numbers.view(num_tokens, top_k) % num_experts
