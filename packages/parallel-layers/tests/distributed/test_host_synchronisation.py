"""On a GPU no layer makes the host wait: not a decoder layer whole, not the head, however its products overlap.

By the profiler, which sees every call of the CUDA runtime, whoever makes it. (On a CPU `decoder/test_graphs.py` looks
for values that are read.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile, record_function

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    RotaryEmbedding,
    linear_log_probs,
    next_token_labels,
)
from parallel_layers.attention import LatentConfig
from parallel_layers.attention.context_parallel.sequence_layout import split_sequence
from parallel_layers.linear.execution import Placement
from parallel_layers.linear.transports import available_overlaps
from parallel_layers.moe import MoEConfig, RoutingContext
from parallel_layers.testing import RankPool

CONFIG = DecoderConfig(hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1024)
VOCABULARY = 1024
WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy", "_local_scalar_dense", "aten::nonzero")
"""In the names of what makes the host wait; asynchronous copies do not, unless one of the others follows them."""


def waits(call: Callable[[], Any]) -> list[str]:
    """Return what makes the host wait in `call`, on any thread."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        with record_function("the call"):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CPU]
    (whole,) = [event.time_range for event in events if event.name == "the call"]
    names = [event.name for event in events if whole.start <= event.time_range.start < whole.end]
    assert any("Launch" in name for name in names), "the profiler must have seen the runtime"
    return [name for name in names if any(w in name for w in WAITS) and "Async" not in name]


def waits_once_warm(step: Callable[[], None], group: ProcessGroup) -> list[str]:
    """`waits`, when kernels have been compiled and every rank is there."""
    for _ in range(2):
        step()
    torch.distributed.barrier(group)
    return waits(step)


def build(group: ProcessGroup | None, overlap: str, num_tokens: int) -> Callable[[], None]:
    """A layer and the head, forward and backward."""
    device = torch.device("cuda", torch.cuda.current_device())
    sp = group is not None
    layer = DecoderLayer(CONFIG, placement=Placement(group, sp), dtype=torch.bfloat16, device=device)
    for module in layer.modules():
        if hasattr(module, "execution"):
            module.execution = replace(module.execution, overlap=overlap)
    size = 1 if group is None else group.size()
    head = torch.randn(VOCABULARY // size, CONFIG.hidden_size, device=device).bfloat16().requires_grad_()
    ids = torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    packed = PackedSequence.from_sequences([ids[:100], ids[100:]])
    labels, rotary = next_token_labels(packed), RotaryEmbedding(64, device=device)(packed.position_ids)
    x: Tensor = torch.randn(num_tokens // size, CONFIG.hidden_size, device=device).bfloat16().requires_grad_()

    def step() -> None:
        hidden = layer(x, rotary, packed.cu_seqlens, packed.max_seqlen)
        options = {"group": group, "sequence_parallel": sp, "vocab_size": VOCABULARY}
        linear_log_probs(hidden, head, labels, **options).log_probs.sum().backward()

    return step


@pytest.mark.gpu(1)
def test_one_gpu() -> None:
    step = build(None, "auto", 1000)
    for _ in range(2):  # compiles kernels
        step()
    assert waits(step) == []


@pytest.mark.gpu(1)
def test_the_profiler_sees_a_wait() -> None:
    x = torch.ones(8, device="cuda")
    assert waits(lambda: (x + 1).sum().item())
    assert waits(lambda: (x + 1).cpu())


def waits_of_every_way(group: ProcessGroup) -> dict[str, list[str]]:
    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    for way in ("auto", *available_overlaps(group, device)):
        step = build(group, way, 10000)
        found[way] = waits_once_warm(step, group)
    return found


@pytest.mark.gpu(2)
def test_two_gpus(nccl_ranks: RankPool) -> None:
    for found in nccl_ranks.run(waits_of_every_way):
        assert {"auto", "serial", "collectives"} <= set(found)
        assert not any(found.values()), found


EXPERTS = MoEConfig(
    num_experts=8, top_k=2, intermediate_size=64, shared_intermediate_size=64, balance_loss=0.1,
    sequence_balance_loss=0.1, z_loss=0.1,
)  # fmt: skip
LATENT = LatentConfig(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48, q_lora_rank=96)
DEEPSEEK = replace(CONFIG, num_kv_heads=8, head_dim=None, latent=LATENT, rotary_interleaved=True, moe=EXPERTS)
# On two ranks, each over the pack's tokens: a layer, and whether they share the tokens or the layer.
LAYERS: dict[str, tuple[DecoderConfig, str]] = {
    "ulysses": (replace(CONFIG, attention_sinks=True), "cp"),
    "ulysses, heads that do not divide": (replace(CONFIG, num_heads=7, num_kv_heads=1), "cp"),
    "ring": (replace(CONFIG, context_parallel="ring", attention_sinks=True), "cp"),
    "ring in a window": (replace(CONFIG, context_parallel="ring", window=300), "cp"),
    "latents on a ring": (replace(DEEPSEEK, context_parallel="ring"), "cp"),
    "experts": (replace(CONFIG, moe=EXPERTS), "tp"),
    "latents, experts": (DEEPSEEK, "tp"),
}


def waits_of_layers(group: ProcessGroup) -> dict[str, list[str]]:
    """Forward and backward of each layer, with the losses of its router."""
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.zeros(4000, dtype=torch.int64, device=device)
    packed = PackedSequence.from_sequences([ids[:1], ids[:1500], ids[:0], ids[:2499]])
    tables = RotaryEmbedding(64, device=device)(packed.position_ids)
    found = {}
    for name, (config, axis) in LAYERS.items():
        shared: dict[str, Any] = (
            {"context_group": group} if axis == "cp" else {"placement": Placement(group, sequence_parallel=True)}
        )
        layer = DecoderLayer(config, dtype=torch.bfloat16, device=device, **shared)
        mine, context = tables, RoutingContext.of(packed)
        if axis == "cp":
            layout = "zigzag" if config.context_parallel == "ring" else "contiguous"
            mine = tuple(split_sequence(table, group, layout=layout) for table in tables)
            assert context.segments is not None
            context.segments = split_sequence(context.segments, group, layout=layout)
        x = (
            torch.randn(packed.num_tokens // group.size(), CONFIG.hidden_size, device=device)
            .bfloat16()
            .requires_grad_()
        )

        def step(layer=layer, mine=mine, context=context, x=x) -> None:
            layer(x, mine, packed.cu_seqlens, packed.max_seqlen, routing=context).sum().backward()

        found[name] = waits_once_warm(step, group)
    return found


@pytest.mark.gpu(2)
def test_contexts_and_experts_on_two_gpus(nccl_ranks: RankPool) -> None:
    for found in nccl_ranks.run(waits_of_layers, timeout=300):
        assert not any(found.values()), found
