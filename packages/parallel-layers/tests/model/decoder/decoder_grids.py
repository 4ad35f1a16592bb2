"""A DecoderLayer with given weights on every kind of grid: what each rank has of the output and of the gradients."""

import torch
from decoder_families import cu_seqlens_of
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel_layers.attention.context_parallel.sequence_layout import gather_sequence, split_sequence
from parallel_layers.distributed.collectives import gather_from_sequence_parallel
from parallel_layers.distributed.parallel_dims import ParallelDims
from parallel_layers.linear.execution import Placement
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.moe import RouterReplay, RoutingContext


def shard(full: dict[str, Tensor], config: DecoderConfig, rank: int, size: int) -> dict[str, Tensor]:
    """This rank's part of transformers' tensors (weights or gradients), under our names."""
    full = dict(full)
    local: dict[str, Tensor] = {}
    head_dim, kv_heads = config.head_dim, config.num_kv_heads
    for kind in ("weight", "bias"):
        names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if names[1] in full:
            q, *kv = (full.pop(name).unflatten(0, (-1, head_dim)) for name in names if name in full)
            first, count = rank * kv_heads // size, max(1, kv_heads // size)
            parts = [q.chunk(size)[rank], *(x[first : first + count] for x in kv)]
            local[f"self_attn.qkv_proj.{kind}"] = torch.cat(parts).flatten(0, 1)
        for mlp in ("mlp", "mlp.shared_experts"):
            names = [f"{mlp}.{name}_proj.{kind}" for name in ("gate", "up")]
            if names[0] in full:
                full[f"{mlp}.gate_up_proj.{kind}"] = torch.cat([full.pop(name) for name in names])
            if (name := f"{mlp}.gate_up_proj.{kind}") in full:
                local[name] = torch.cat([half.chunk(size)[rank] for half in full.pop(name).chunk(2)])
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"):
        if name in full:
            local[name] = full.pop(name).chunk(size, dim=1)[rank]
    if config.moe is not None and config.moe.input_major_experts:
        local["mlp.experts.down_proj"] = full.pop("mlp.experts.down_proj").chunk(size, dim=1)[rank]
        for name in {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"} & full.keys():
            halves = full.pop(name).chunk(1 if config.moe.alternating_gate_up else 2, dim=-1)
            local[name] = torch.cat([half.chunk(size, dim=-1)[rank] for half in halves], dim=-1)
    if "mlp.experts.down_proj" in full:
        local["mlp.experts.down_proj"] = full.pop("mlp.experts.down_proj").chunk(size, dim=2)[rank]
    for name in {"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"} & full.keys():
        halves = full.pop(name).chunk(2, dim=1)
        local[name] = torch.cat([half.chunk(size, dim=1)[rank] for half in halves], dim=1)
    if "self_attn.sinks" in full:
        local["self_attn.sinks"] = full.pop("self_attn.sinks").chunk(size)[rank]
    for name in ("q_proj", "q_b_proj", "kv_b_proj"):
        if (name := f"self_attn.{name}.weight") in full:
            local[name] = full.pop(name).chunk(size)[rank]
    return local | full  # the rest is replicated


def run_ours(
    group: ProcessGroup | None,
    config: DecoderConfig,
    rotary: tuple[Tensor, Tensor],
    weights: dict[str, Tensor],
    x: Tensor,
    seed: Tensor,
    lengths: list[int],
    experts: Tensor | None = None,
) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """This rank's output and gradients without and with sequence parallelism; `experts` are replayed."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    cu_seqlens = cu_seqlens_of(lengths)
    results = []
    for sequence_parallel in (False, True):
        layer = DecoderLayer(config, placement=Placement(group, sequence_parallel), dtype=x.dtype)
        layer.load_state_dict(shard(weights, config, rank, size))
        leaf, mine = (t.chunk(size)[rank] if sequence_parallel else t for t in (x, seed))
        leaf = leaf.clone().requires_grad_()
        out = layer(leaf, rotary, cu_seqlens, max(lengths), routing=replaying(experts, config))
        out.backward(mine)
        results.append((out.detach(), leaf.grad, {name: p.grad for name, p in layer.named_parameters()}))
    return results


def replaying(experts: Tensor | None, config: DecoderConfig) -> RoutingContext | None:
    if experts is None:
        return None
    assert config.moe is not None
    return RoutingContext(replay=RouterReplay({0: experts}, num_experts=config.moe.num_experts))


def run_with_context_parallel(
    group: ProcessGroup,
    config: DecoderConfig,
    rotary: tuple[Tensor, Tensor],
    weights: dict[str, Tensor],
    x: Tensor,
    seed: Tensor,
    lengths: list[int],
    experts: Tensor | None = None,
) -> tuple[int, Tensor, Tensor, dict[str, Tensor]]:
    """On a grid of cp 2 and tp 2 with sequence parallelism: the tp rank, the gathered tensors, its gradients."""
    mesh = ParallelDims(cp=2, tp=2).build_mesh("cpu", ranks=torch.distributed.get_process_group_ranks(group))
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    layout = "zigzag" if config.context_parallel == "ring" else "contiguous"
    rotary = tuple(split_sequence(table, cp, layout=layout) for table in rotary)
    layer = DecoderLayer(config, placement=Placement(tp, sequence_parallel=True), context_group=cp, dtype=x.dtype)
    layer.load_state_dict(shard(weights, config, tp.rank(), 2))
    if experts is not None:
        experts = split_sequence(experts, cp, layout=layout)
    leaf, mine = (split_sequence(t, cp, layout=layout).chunk(2)[tp.rank()].clone() for t in (x, seed))
    routing = replaying(experts, config)
    out = layer(leaf.requires_grad_(), rotary, cu_seqlens_of(lengths), max(lengths), routing=routing)
    out.backward(mine)
    gathered = (
        gather_sequence(gather_from_sequence_parallel(t, tp), cp, layout=layout) for t in (out.detach(), leaf.grad)
    )
    return tp.rank(), *gathered, {name: p.grad for name, p in layer.named_parameters()}


def summed_over_context(results: list[tuple[int, Tensor, Tensor, dict[str, Tensor]]], rank: int) -> dict[str, Tensor]:
    """Gradients of a rank of the tensor-parallel group: the context-parallel ranks' shares, as a trainer adds them."""
    shares = [gradients for tp_rank, *_, gradients in results if tp_rank == rank]
    return {key: sum(share[key].float() for share in shares) for key in shares[0]}


def run_with_expert_parallel(
    group: ProcessGroup,
    config: DecoderConfig,
    rotary: list[tuple[Tensor, Tensor]],
    weights: dict[str, Tensor],
    x: list[Tensor],
    seed: list[Tensor],
    lengths: list[list[int]],
    experts: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each rank has half of the experts, and sequences of its own."""
    rank = group.rank()
    layer = DecoderLayer(config, expert_group=group, dtype=x[rank].dtype)
    mine = shard(weights, config, 0, 1)
    layer.load_state_dict(
        {key: tensor.chunk(2)[rank] if key.startswith("mlp.experts.") else tensor for key, tensor in mine.items()}
    )
    routing = replaying(None if experts is None else experts[rank], config)
    leaf = x[rank].clone().requires_grad_()
    out = layer(leaf, rotary[rank], cu_seqlens_of(lengths[rank]), max(lengths[rank]), routing=routing)
    out.backward(seed[rank])
    return out.detach(), leaf.grad, {key: p.grad for key, p in layer.named_parameters()}


def joined_over_experts(
    results: list[tuple[Tensor, Tensor, dict[str, Tensor]]],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Experts' gradients are complete, each on its rank; the others are shares, as over data-parallel ranks."""
    outs, d_xs, gradients = zip(*results, strict=True)
    together = {
        key: torch.cat([share[key] for share in gradients])
        if key.startswith("mlp.experts.")
        else sum(share[key].float() for share in gradients)
        for key in gradients[0]
    }
    return torch.cat(outs), torch.cat(d_xs), together
