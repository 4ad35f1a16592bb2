"""Every public name sends what docs/communication.md says; the tests count it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import parallel_layers as pl
from parallel_layers import inference, invariant, linear_attention, moe
from parallel_layers.attention import AttentionConfig, LatentConfig, ParallelLatentAttention, context_parallel
from parallel_layers.data.micro_batches import split_micro_batches
from parallel_layers.distributed import collectives
from parallel_layers.head import (
    TeacherHead,
    TeacherTopK,
    linear_distillation,
    linear_token_statistics,
    vocab_parallel_log_probs,
)
from parallel_layers.linear import available_overlaps, column_parallel_linear, row_parallel_linear
from parallel_layers.linear.execution import Placement
from parallel_layers.linear_attention import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    KimiDeltaAttention,
    KimiDeltaConfig,
    Mamba2,
    Mamba2Config,
)
from parallel_layers.memory import checkpoint
from parallel_layers.module import view_of
from parallel_layers.testing import RankPool
from parallel_layers.training.gradient_sums import sum_norm_gradients_once

PAGE = (Path(__file__).parents[4] / "docs/communication.md").read_text()
TOKENS, HIDDEN, VOCAB = 8, 32, 12
SIZES = LatentConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5, q_lora_rank=14)
LATENT = AttentionConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, latent=SIZES)
DELTA = GatedDeltaNetConfig(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=5)
KIMI = KimiDeltaConfig(num_heads=4, head_dim=6)
MAMBA = Mamba2Config(num_heads=8, head_dim=6, num_groups=4, state_size=5)
ONE_GROUP = Mamba2Config(num_heads=8, head_dim=6, num_groups=1, state_size=5)
DECODER = pl.DecoderConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, intermediate_size=48)
EXPERTS = moe.MoEConfig(num_experts=4, top_k=2, intermediate_size=16)

# What torch's operators are called in the table. Of an exchange with the neighbours the send is counted.
NAMES = {
    "allreduce_": "AR",
    "_allgather_base_": "AG",
    "allgather_into_tensor_coalesced_": "AG",
    "_reduce_scatter_base_": "RS",
    "reduce_scatter_tensor_coalesced_": "RS",
    "alltoall_base_": "A2A",
    "send": "P2P",
    "broadcast_": "broadcasts",
}


@contextmanager
def collectives_in(counts: Counter[str]) -> Iterator[None]:
    """Count what runs inside, in operators and in autograd's functions too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    # `profile.events()` orders all events first, which takes longer than the case.
    events = [event.name() for event in profile.profiler.kineto_results.events()]
    names = [name.removeprefix("c10d::") for name in events if name.startswith("c10d::")]
    counts.update(NAMES.get(name, name) for name in names if name != "recv_")


Case = Callable[[ProcessGroup], Any]
"""Runs on every rank of a group. What comes out is differentiated, if it can be."""


def numbers(*shape: int) -> Tensor:
    """An intermediate result, as layers have it."""
    return torch.randn(shape, requires_grad=True) * 1


def tokens(group: ProcessGroup, sp: bool = False) -> Tensor:
    """Hidden states: of all tokens, or of this rank's."""
    return numbers(TOKENS // group.size() if sp else TOKENS, HIDDEN)


def layer(build: Callable[[ProcessGroup, bool], nn.Module], *arguments: Any) -> dict[str, Case]:
    return {
        "": lambda group: build(group, False)(tokens(group), *arguments),
        "sp": lambda group: build(group, True)(tokens(group, sp=True), *arguments),
    }


def row_parallel(
    sp: bool, change: Callable[[nn.Module], nn.Module] = lambda linear: linear, size: int = HIDDEN
) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        linear = pl.RowParallelLinear(size, HIDDEN, bias=True, placement=pl.Placement(group, sp))
        return change(linear)(numbers(TOKENS, size // group.size()))

    return run


def one_kv_head(bias: bool) -> Case:
    return lambda group: pl.QKVParallelLinear(HIDDEN, 4, 1, 8, bias=bias, placement=pl.Placement(group))(tokens(group))


def head(log_probs: Callable[..., Any]) -> dict[str, Case]:
    def run(group: ProcessGroup, sp: bool) -> Any:
        weight = torch.randn(VOCAB // group.size(), HIDDEN, requires_grad=True)
        options = {"group": group, "sequence_parallel": sp, "vocab_size": VOCAB}
        return log_probs(tokens(group, sp), weight, torch.arange(TOKENS), **options)

    return {"": lambda group: run(group, False), "sp": lambda group: run(group, True)}


def distilled(sp: bool, **options: Any) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        heads = [torch.randn(VOCAB // group.size(), HIDDEN, requires_grad=True) for _ in range(2)]
        shards: dict[str, Any] = {"group": group, "sequence_parallel": sp, "vocab_size": VOCAB}
        teacher = TeacherHead(tokens(group, sp).detach(), heads[1].detach(), **shards)
        return linear_distillation(tokens(group, sp), heads[0], teacher, **shards, **options)

    return run


def listed(sp: bool) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        weight = torch.randn(VOCAB // group.size(), HIDDEN, requires_grad=True)
        teacher = TeacherTopK(torch.arange(3).expand(TOKENS, 3), torch.full((TOKENS, 3), -2.0))
        shards: dict[str, Any] = {"group": group, "sequence_parallel": sp, "vocab_size": VOCAB}
        return linear_distillation(tokens(group, sp), weight, teacher, **shards)

    return run


def values(sp: bool) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        head = pl.VocabParallelHead(HIDDEN, 2, group=group, sequence_parallel=sp, bias=True, replicated=True)
        return head.values(tokens(group, sp))

    return run


def loss(function: Callable[..., Tensor], *labels: Tensor) -> dict[str, Case]:
    return {"": lambda group: function(numbers(TOKENS, VOCAB // group.size()), *labels, group=group, vocab_size=VOCAB)}


def attention(attend: Callable[..., Tensor], **options: Any) -> Case:
    """Tokens that any number of ranks up to 4 divides into two chunks each."""
    length, bounds = 24, torch.tensor([0, 24], dtype=torch.int32)
    return lambda group: attend(
        *(numbers(length // group.size(), heads, 8) for heads in (12, 12, 12)), bounds, length, group=group, **options
    )


def recurrence(operator: Callable[..., Any]) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
        q, k, v = (numbers(TOKENS // group.size(), 2, 6) for _ in range(3))
        gates = numbers(TOKENS // group.size(), 2).sigmoid()
        return operator(q, k, v, -gates, gates, bounds, group=group)[0]

    return run


def exchanged_state_space(group: ProcessGroup) -> Tensor:
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
    x, b, c = (numbers(TOKENS // group.size(), 2, 6) for _ in range(3))
    dt = numbers(TOKENS // group.size(), 2).sigmoid()
    return linear_attention.ulysses_state_space(x, dt, -torch.ones(2), b, c, bounds, group=group)[0]


def convolution(group: ProcessGroup) -> Tensor:
    bounds, weight = torch.tensor([0, TOKENS], dtype=torch.int32), numbers(HIDDEN, 4)
    return linear_attention.context_parallel_convolution(tokens(group, True), weight, bounds, group=group)[0]


def routed(sp: bool, records: bool) -> Case:
    """By a router that is not trained: what is counted is the context's."""

    def run(group: ProcessGroup) -> Tensor:
        router = moe.TopKRouter(HIDDEN, EXPERTS, group=group if sp else None).requires_grad_(False)
        context = moe.RoutingContext(replay=moe.RouterReplay() if records else None)
        return router(tokens(group, sp), context=context).weights

    return run


def experts(ep: bool) -> Case:
    def run(group: ProcessGroup) -> Tensor:
        own = {"group": None if ep else group, "expert_group": group if ep else None}
        chosen, weights = torch.rand(TOKENS, 4).topk(2).indices, torch.rand(TOKENS, 2, requires_grad=True)
        return moe.GroupedExperts(HIDDEN, 16, 4, **own)(tokens(group), chosen, weights)

    return run


def viewed(attributes: Callable[[nn.Module], dict[str, Any]]) -> Case:
    """Experts of several ranks in a view of these attributes; each rank has tokens of its own."""

    def run(group: ProcessGroup) -> Tensor:
        layer = moe.MoE(HIDDEN, EXPERTS, expert_group=group, expert_tensor_parallel=False)
        with torch.no_grad():
            return view_of(layer, lambda _, copy: copy.__dict__.update(attributes(copy)))(tokens(group))

    return run


def draw(function: Callable[..., Any] = inference.sample, **options: Any) -> Case:
    return lambda group: function(torch.randn(5, 8), torch.rand(5), group=group, **options)


def auxiliary(function: Callable[..., Tensor], *arguments: Any) -> dict[str, Case]:
    return {
        "": lambda group: function(numbers(TOKENS, 4), *arguments),
        "with a group": lambda group: function(numbers(TOKENS, 4), *arguments, group=group),
    }


def clipped(group: ProcessGroup) -> Tensor:
    linear = pl.ColumnParallelLinear(HIDDEN, HIDDEN, placement=pl.Placement(group))
    linear.weight.grad = torch.ones_like(linear.weight)
    return pl.clip_grad_norm_(linear, 1.0, groups=[group])


def norm_gradient_summed_once(group: ProcessGroup) -> None:
    norm = pl.RMSNorm(HIDDEN, group=group, sequence_parallel=True)
    with sum_norm_gradients_once(norm, group):
        norm(tokens(group, sp=True)).sum().backward()


def column_function(sp: bool) -> Case:
    return lambda group: column_parallel_linear(
        tokens(group, sp), numbers(4, HIDDEN), placement=pl.Placement(group, sp)
    )


def row_function(sp: bool) -> Case:
    return lambda group: row_parallel_linear(
        numbers(TOKENS, HIDDEN), numbers(4, HIDDEN), placement=pl.Placement(group, sp)
    )


def collective(name: str, **options: Any) -> Case:
    return lambda group: getattr(collectives, name)(tokens(group), group, **options)


LABELS = torch.arange(TOKENS)
CHOSEN = torch.arange(TOKENS)[:, None] % 4
ROTARY_AND_BOUNDS = (torch.randn(TOKENS, 8), torch.randn(TOKENS, 8)), torch.tensor([0, TOKENS]).int(), TOKENS

# By name and by the label of the case in the table's cells ("": the first).
CASES: dict[str, dict[str, Case]] = {
    "copy_to_tensor_parallel": {"": collective("copy_to_tensor_parallel")},
    "reduce_from_tensor_parallel": {"": collective("reduce_from_tensor_parallel")},
    "scatter_to_tensor_parallel": {"": collective("scatter_to_tensor_parallel")},
    "gather_from_tensor_parallel": {
        "": collective("gather_from_tensor_parallel"),
        "`reduce_gradient`": collective("gather_from_tensor_parallel", reduce_gradient=True),
    },
    "reduce_scatter_to_tensor_parallel": {"": collective("reduce_scatter_to_tensor_parallel")},
    "scatter_to_sequence_parallel": {"": collective("scatter_to_sequence_parallel")},
    "gather_from_sequence_parallel": {
        "": collective("gather_from_sequence_parallel"),
        "without `reduce_gradient`": collective("gather_from_sequence_parallel", reduce_gradient=False),
    },
    "reduce_scatter_to_sequence_parallel": {"": collective("reduce_scatter_to_sequence_parallel")},
    "all_to_all": {"": collective("all_to_all")},
    "ColumnParallelLinear": layer(
        lambda group, sp: pl.ColumnParallelLinear(HIDDEN, 4, bias=True, placement=pl.Placement(group, sp))
    ),
    "column_parallel_linear": {"": column_function(False), "sp": column_function(True)},
    "MergedColumnParallelLinear": layer(
        lambda group, sp: pl.MergedColumnParallelLinear(HIDDEN, [4, 8], bias=True, placement=pl.Placement(group, sp))
    ),
    "QKVParallelLinear": {
        **layer(lambda group, sp: pl.QKVParallelLinear(HIDDEN, 4, 2, 8, bias=True, placement=pl.Placement(group, sp))),
        "KV heads on several ranks": one_kv_head(bias=False),
        "these with a bias": one_kv_head(bias=True),
    },
    "RowParallelLinear": {"": row_parallel(False), "sp": row_parallel(True)},
    "row_parallel_linear": {"": row_function(False), "sp": row_function(True)},
    "VocabParallelEmbedding": {
        "": lambda group: pl.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)(LABELS),
        "sp": lambda group: pl.VocabParallelEmbedding(VOCAB, HIDDEN, group=group, sequence_parallel=True)(LABELS),
    },
    "RMSNorm": layer(lambda group, sp: pl.RMSNorm(HIDDEN, group=group, sequence_parallel=sp)),
    "ParallelAttention": layer(
        lambda group, sp: pl.ParallelAttention(DECODER, placement=pl.Placement(group, sp)), *ROTARY_AND_BOUNDS
    ),
    "ParallelLatentAttention": layer(
        lambda group, sp: ParallelLatentAttention(LATENT, placement=pl.Placement(group, sp)),
        *ROTARY_AND_BOUNDS,
    ),
    "GatedDeltaNet": layer(
        lambda group, sp: GatedDeltaNet(HIDDEN, DELTA, placement=pl.Placement(group, sp)), ROTARY_AND_BOUNDS[1]
    ),
    "KimiDeltaAttention": layer(
        lambda group, sp: KimiDeltaAttention(HIDDEN, KIMI, placement=pl.Placement(group, sp)), ROTARY_AND_BOUNDS[1]
    ),
    "Mamba2": {
        **layer(lambda group, sp: Mamba2(HIDDEN, MAMBA, placement=pl.Placement(group, sp)), ROTARY_AND_BOUNDS[1]),
        "a group on several ranks": lambda group: Mamba2(HIDDEN, ONE_GROUP, placement=pl.Placement(group))(
            tokens(group), ROTARY_AND_BOUNDS[1]
        ),
    },
    "ParallelMLP": layer(lambda group, sp: pl.ParallelMLP(HIDDEN, 48, placement=pl.Placement(group, sp))),
    "DecoderLayer": layer(
        lambda group, sp: pl.DecoderLayer(DECODER, placement=pl.Placement(group, sp)), *ROTARY_AND_BOUNDS
    ),
    "MoE": layer(lambda group, sp: moe.MoE(HIDDEN, EXPERTS, placement=Placement(group, sp))),
    "TopKRouter": layer(lambda group, sp: moe.TopKRouter(HIDDEN, EXPERTS, group=group if sp else None)),
    "GroupedExperts": {"": experts(ep=False), "ep": experts(ep=True)},
    "RoutingContext": {"": routed(False, False), "sp": routed(True, False), "sp, recording": routed(True, True)},
    "load_balancing_loss": auxiliary(moe.load_balancing_loss, CHOSEN, LABELS >= 0),
    "sequence_balance_loss": auxiliary(moe.sequence_balance_loss, CHOSEN, CHOSEN[:, 0] * 0, 1),
    "router_z_loss": auxiliary(moe.router_z_loss, LABELS >= 0),
    "decoding_attributes": {"ep": viewed(inference.decoding_attributes)},
    "gathered_attributes": {"ep": viewed(moe.gathered_attributes)},
    "sample": {
        "": lambda _: inference.sample(torch.randn(5, 8), torch.rand(5)),
        "vocabulary-parallel": draw(),
        "with top-k": draw(top_k=3),
        "with min-p": draw(min_p=0.5),
        "with top-p": draw(top_p=0.5),
    },
    "sample_with_mask": {
        "": lambda _: inference.sample_with_mask(torch.randn(5, 8), torch.rand(5), top_p=0.5),
        "with top-k": draw(inference.sample_with_mask, top_k=3),
        "with top-p": draw(inference.sample_with_mask, top_p=0.5),
    },
    "linear_log_probs": head(pl.linear_log_probs),
    "VocabParallelHead": layer(
        lambda group, sp: pl.VocabParallelHead(HIDDEN, VOCAB, group=group, sequence_parallel=sp), torch.arange(TOKENS)
    )
    | {"values": values(False), "values, sp": values(True)},
    "linear_distillation": {
        "": distilled(False),
        "sp": distilled(True),
        "mixtures": distilled(False, divergence="jensen_shannon", mixture=0.5),
    },
    "linear_token_statistics": head(lambda *args, **options: list(linear_token_statistics(*args, top_n=3, **options))),
    "TeacherTopK": {"": listed(False), "sp": listed(True)},
    "vocab_parallel_log_probs": loss(vocab_parallel_log_probs, LABELS),
    "tp_invariant": {
        "row-parallel": row_parallel(False, invariant.tp_invariant),
        "row-parallel, sp": row_parallel(True, invariant.tp_invariant),
        "routed experts": lambda group: invariant.tp_invariant(
            moe.MoE(HIDDEN, EXPERTS, placement=pl.Placement(group, False))
        )(tokens(group)),
    },
    "invariant.linear_log_probs": head(invariant.linear_log_probs),
    "split_sequence": {"": lambda group: context_parallel.split_sequence(tokens(group), group)},
    "gather_sequence": {"": lambda group: context_parallel.gather_sequence(tokens(group), group)},
    "ulysses_attention": {"": attention(context_parallel.ulysses_attention)},
    "ring_attention": {
        "": attention(context_parallel.ring_attention),
        "window": attention(context_parallel.ring_attention, window=3),
    },
    "context_parallel_delta_rule": {"": recurrence(linear_attention.context_parallel_delta_rule)},
    "ulysses_delta_rule": {"": recurrence(linear_attention.ulysses_delta_rule)},
    "ulysses_state_space": {"": exchanged_state_space},
    "context_parallel_convolution": {"": convolution},
    "split_micro_batches": {"": lambda group: split_micro_batches([3, 1, 2], 4, group=group)},
    "clip_grad_norm_": {"": clipped},
    "sum_norm_gradients_once": {"": norm_gradient_summed_once},
    "checkpoint": {"": lambda group: checkpoint(torch.tanh, tokens(group))},
    "available_overlaps": {"": lambda group: available_overlaps(group, "cpu")},
}


def sent(group: ProcessGroup, name: str, label: str) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the forward and of the backward."""
    forward, backward = Counter[str](), Counter[str]()
    CASES[name][label](group)  # heads compare their ranks' numbers of rows once
    with collectives_in(forward):
        out = CASES[name][label](group)
    out = out.log_probs + out.entropy if isinstance(out, pl.LogProbs) else getattr(out, "weights", out)
    with collectives_in(backward):
        if isinstance(out, Tensor) and out.requires_grad:
            out.square().sum().backward()
    return dict(forward), dict(backward)


Cells = tuple[dict[str, str], dict[str, str]]
"""The traffic of forward and backward, by the label of each case."""


def rows() -> Iterator[tuple[list[str], Cells]]:
    """The table: the names of each row, and its cells for forward and backward by the labels of their cases.

    A name that has been before is another module's, which stands in the section's heading.
    """
    before: set[str] = set()
    module = ""
    for line in PAGE[PAGE.index("| name | forward | backward |") :].splitlines()[2:]:
        if not line.startswith("|"):
            return
        names, *cells = (cell.strip() for cell in line.split("|")[1:4])
        if names.startswith("**"):
            module = (re.findall(r"parallel_layers\.(\w+)`", names) or [""])[0]
        found = [f"{module}.{name}" if name in before else name for name in re.findall(r"`(\w+)`", names)]
        before |= set(found)
        forward, backward = (dict(labelled(text) for text in cell.split("; ")) for cell in cells)
        yield found, (forward, backward)


def labelled(text: str) -> tuple[str, str]:
    label, colon, rest = text.rpartition(": ")
    return (label, rest) if colon else ("", text)


TABLE = {name: cells for names, cells in rows() for name in names}


def counts(cells: dict[str, str], label: str, ranks: int) -> Counter[str]:
    """Return what the cell says of a case, or if it says nothing of that, of the first."""
    text = cells.get(label, cells[""])
    found: Counter[str] = Counter()
    for number, of_n, name in re.findall(r"(?:(\d+|(n(?: - 1)?)) )?\b(AR|AG|RS|A2A|P2P|broadcasts)\b", text):
        found[name] += ranks - number.count("- 1") if of_n else int(number or 1)
    return found + counts(cells, "", ranks) if text.startswith("+") else found


def stated(name: str, label: str, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    both = []
    for direction, cells in enumerate(TABLE[name]):
        like = re.fullmatch(r"as `(\w+)`", cells[""])
        cells = TABLE[like.group(1)][direction] if like else cells
        both.append(dict(counts(cells, label, ranks)))
    return both[0], both[1]


@pytest.mark.parametrize(
    ("name", "label"), [(name, label) for name, cases in CASES.items() for label in cases], ids=str
)
def test_the_table_says_what_is_sent(ranks: RankPool, name: str, label: str) -> None:
    assert ranks.run(sent, name, label, world=2) == [stated(name, label, 2)] * 2


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_ring_sends_more_often_the_more_ranks_it_has(ranks: RankPool, world: int) -> None:
    expected = stated("ring_attention", "", world)
    assert expected == ({"P2P": world - 1}, {"P2P": 2 * (world - 1)})
    assert ranks.run(sent, "ring_attention", "", world=world) == [expected] * world


def asked_twice(group: ProcessGroup) -> list[dict[str, int]]:
    fresh = dist.new_group(list(range(group.size())))
    first, second = Counter[str](), Counter[str]()
    for counted in (first, second):
        with collectives_in(counted):
            available_overlaps(fresh, "cuda")
    return [dict(first), dict(second)]


ON_CUDA = "on CUDA, once for each group"


@pytest.mark.gpu(2)
def test_the_ways_to_overlap_are_found_out_once(nccl_ranks: RankPool) -> None:
    first, nothing = stated("available_overlaps", ON_CUDA, 2)[0], {}
    assert nccl_ranks.run(asked_twice) == [[first, nothing]] * 2


def test_every_case_in_the_table_is_counted() -> None:
    for names, cells in rows():
        labels = {label for cell in cells for label in cell}
        if any(counts(cell, label, 2) for cell in cells for label in labels if label in cell):
            counted = {label for name in names for label in CASES.get(name, {})}
            assert counted >= labels - {"", ON_CUDA}, names
            assert counted, names
    assert CASES.keys() <= TABLE.keys()
