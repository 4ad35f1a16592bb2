"""Router replay on Megatron-Core: record the experts of tokens and use them again, forward and under recompute.

`parallel_layers.moe.RouterReplay` holds the experts of one micro-batch by global layer number, so routing of one
backend replays on another (arXiv:2510.11370). Megatron-Core's own `RouterReplay` lists every router of the process in a
class variable; here each router has a hook for the time of a `with` block, and nothing is global.

Between backends and grids, routing travels per sequence in the caller's order: `[L_i, M, k]` int16, for the M mixture
layers of the model and k experts per token.
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
from parallel_layers.attention import split_sequence
from parallel_layers.moe import RouterReplay

TopK = Callable[..., tuple[Tensor, Tensor]]


class RoutingSession:
    """The hooks of one model's routers inside `router_replay`."""

    def __init__(self) -> None:
        self._current: RouterReplay | None = None
        self._recomputes = False

    @contextlib.contextmanager
    def micro_batch(self, replay: RouterReplay, *, backward: bool = False) -> Iterator[None]:
        """Let the forward inside the block record into `replay`, or replay it.

        Args:
            replay: The replay of the micro-batch whose forward runs inside.
            backward: Whether a backward follows, perhaps after the forwards of other micro-batches. Its recomputation
                uses the same `replay`, because the backwards of a stage come in the order of its forwards.

        Raises:
            RuntimeError: The forward of another micro-batch is running.
        """
        if self._current is not None:
            raise RuntimeError("a micro-batch's forward is already running; leave it before entering another")
        self._current, self._recomputes = replay, backward
        try:
            yield
        finally:
            self._current = None


class _Hook:
    """Replaces Megatron's own `RouterReplay`: a router asks it for experts."""

    def __init__(self, session: RoutingSession, router: TopKRouter) -> None:
        self._session = session
        # Megatron counts layers from 1.
        self._layer = router.layer_number - 1
        self._tp: ProcessGroup | None = router.tp_group if router.config.sequence_parallel else None
        self._cp: ProcessGroup = router.cp_group
        # The ranks that share the tokens of a pack.
        self._everyone: ProcessGroup = router.tp_cp_group
        self._layout = CONTEXT_PARALLEL[router.config.cp_comm_type][1]
        self._to_recompute: deque[RouterReplay] = deque()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Return scores and experts `[T', k]` of this rank's tokens; gradients reach the router's own scores."""
        replay = self._session._current
        if replay is not None:
            if self._session._recomputes:
                self._to_recompute.append(replay)  # the backward may run the router again
        elif self._to_recompute:
            replay = self._to_recompute.popleft()
        else:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        size = self._cp.size() * (self._tp.size() if self._tp else 1)
        if size == 1:
            experts = replay.select(self._layer, chosen)
        else:
            positions = self._places(len(chosen) * size, chosen.device)
            gathered = chosen.new_full((len(chosen) * size, topk), -1).index_copy_(0, positions, chosen)
            if replay.recording:
                dist.all_reduce(gathered, op=dist.ReduceOp.MAX, group=self._everyone)
            experts = replay.select(self._layer, gathered)[positions]
        return scores.gather(1, experts), experts

    def _places(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the places of this rank's tokens in the pack: `[T']` int64."""
        places = split_sequence(torch.arange(num_tokens, device=device), self._cp, layout=self._layout)
        return places if self._tp is None else places.chunk(self._tp.size())[self._tp.rank()]


@contextlib.contextmanager
def router_replay(chunks: Sequence[nn.Module]) -> Iterator[RoutingSession]:
    """Put hooks on the routers of a model's chunks for one block; yield the session.

    A pipeline stage may hold no routers of the model.

    Raises:
        ValueError: The model has no routers, or a router chooses its experts without asking the hook; the error
            names the option.
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
    originals = [router.router_replay for router in routers]
    for router in routers:
        router.router_replay = _Hook(session, router)
    try:
        yield session
    finally:
        for router, original in zip(routers, originals, strict=True):
            router.router_replay = original


# Options of `TransformerConfig` with which Megatron-Core's routing never calls the hook.
_WITHOUT_HOOK = {"moe_router_fusion": True, "moe_router_load_balancing_type": "sinkhorn"}


def moe_layers(config: Any) -> list[int]:
    """Return the global numbers, from 0, of the mixture layers; `config` is Megatron's."""
    if not config.num_moe_experts:
        return []
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return [layer for layer in range(config.num_layers) if layer % pattern == 0]
    return [layer for layer, is_moe in enumerate(pattern) if is_moe]


def complete_recordings(
    replays: Sequence[RouterReplay], micro_batches: Sequence[PackedSequence], config: Any, grid: MegatronGrid
) -> None:
    """Give every pipeline stage the records of the other stages, by one all-reduce per micro-batch."""
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
    """Return the recorded routing of each sequence of each micro-batch: `[L_i, M, k]` int16.

    Every pipeline stage gets the layers of all stages. `parallel_layers.data.micro_batches.restore_order` restores the
    caller's order of the sequences.
    """
    complete_recordings(replays, micro_batches, config, grid)
    return [
        packed.split(replay.as_tensor().to(torch.int16)) for replay, packed in zip(replays, micro_batches, strict=True)
    ]


def make_replay(
    routing: Sequence[Tensor], packed: PackedSequence, layers: Sequence[int], *, num_experts: int
) -> RouterReplay:
    """Return a replay for one packed batch from the routing of its sequences, recorded on any grid or backend.

    Padding tokens get distinct experts, spread evenly over all.

    Args:
        routing: `[L_i, M, k]` integers for each sequence of `packed`, in its order.
        packed: The batch that will run.
        layers: The global numbers of the M mixture layers (`moe_layers`).
        num_experts: The number of experts of a layer.

    Raises:
        ValueError: The routing of a sequence has another shape, or a row is missing (-1), is out of range, or names an
            expert twice; names the layer and the token.
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
    joined = torch.cat([*(table.to(device, torch.int64) for table in routing), padding])
    return RouterReplay.from_tensor(joined, layers, num_experts=num_experts)


def spread_experts(num_tokens: int, num_experts: int, like_Tk: Tensor) -> Tensor:
    """Return experts `[num_tokens, k]` for padding, distinct for each token and spread evenly over all."""
    top_k = like_Tk.shape[1]
    numbers = torch.arange(num_tokens * top_k, dtype=like_Tk.dtype, device=like_Tk.device)
    return numbers.view(num_tokens, top_k) % num_experts
