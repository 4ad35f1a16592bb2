"""A model's log-probs have the same bits at every tensor-parallel size, in every pack and at every place in it."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import (
    ColumnParallelLinear,
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    invariant,
    linear_log_probs,
    next_token_labels,
)
from parallel_layers.attention.config import LatentConfig
from parallel_layers.attention.context_parallel.ring import ring_attention
from parallel_layers.distributed.collectives import gather_from_tensor_parallel, scatter_to_tensor_parallel
from parallel_layers.head import chunked, fused
from parallel_layers.invariant import tp_invariant
from parallel_layers.linear.execution import Placement
from parallel_layers.linear_attention.config import GatedDeltaNetConfig, KimiDeltaConfig
from parallel_layers.mlp.activations import ClampedSwiGLU
from parallel_layers.moe import MoEConfig, TopKRouter
from parallel_layers.testing import RankPool

LLAMA = DecoderConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=12, intermediate_size=40)
CONFIGS = {
    "llama": LLAMA,
    "qwen": replace(LLAMA, attention_bias=True, output_bias=True, qk_norm="head", window=5, mlp_bias=True),
    "gemma": replace(
        LLAMA, activation="gelu_tanh", norm_unit_offset=True, norm_placement="sandwich", attention_softcap=3.0
    ),
    "cohere": replace(LLAMA, normalization="layer", norm_placement="parallel", rotary_interleaved=True),
    "plain": replace(LLAMA, activation="relu2", gated_mlp=False, num_kv_heads=1, rotary_interleaved=True),
    "latent": DecoderConfig(
        hidden_size=24, num_heads=4, num_kv_heads=4, intermediate_size=40,
        latent=LatentConfig(
            kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, q_lora_rank=20
        ),
    ),
    "mixture": replace(
        LLAMA,
        moe=MoEConfig(
            num_experts=6, top_k=3, intermediate_size=20, shared_intermediate_size=12, shared_expert_gate=True
        ),
    ),
    "gpt-oss": replace(
        LLAMA, attention_sinks=True, window=5,
        moe=MoEConfig(
            num_experts=6, top_k=2, intermediate_size=20, router_bias=True, expert_bias=True, input_major_experts=True,
            alternating_gate_up=True, activation=ClampedSwiGLU(),
        ),
    ),
    "deepseek": replace(
        LLAMA,
        moe=MoEConfig(
            num_experts=8, top_k=3, intermediate_size=20, scoring="sigmoid", correction_bias=True, num_groups=4,
            top_k_groups=2, routed_scaling_factor=2.5, shared_intermediate_size=12,
        ),
    ),
}  # fmt: skip
PLAIN = {("gpt-oss", torch.bfloat16)}  # the other cases are slow
VOCABULARY = 514  # divisible by 2 ranks, not by 4, whose second begins elsewhere
LENGTHS = [9, 1, 14, 5]


class Model(nn.Module):
    """Embedding, two layers, final norm and head, whose parameters are the same at every size of the group."""

    def __init__(
        self, config: DecoderConfig, group: ProcessGroup | None, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        place: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, "dtype": dtype}
        placement = Placement(group, sequence_parallel)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.embed = VocabParallelEmbedding(VOCABULARY, config.hidden_size, **place)
        self.layers = nn.ModuleList(DecoderLayer(config, placement=placement, dtype=dtype) for _ in range(2))
        self.norm = config.build_norm(placement, dtype=dtype)
        self.head = VocabParallelEmbedding(VOCABULARY, config.hidden_size, group=group, dtype=dtype)
        self.rotary = RotaryEmbedding(4 if config.latent else 12)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(0.1)
                    if parameter.dim() == 2:  # experts differ
                        parameter.mul_(torch.arange(len(parameter))[:, None])
                elif "norm" in name:
                    parameter.mul_(1.3).add_(0.05)

    def hidden(self, packed: PackedSequence) -> Tensor:
        x = self.embed(packed.input_ids)
        for layer in self.layers:
            x = layer(x, self.rotary(packed.position_ids), packed.cu_seqlens, packed.max_seqlen)
        return self.norm(x)

    def log_probs(self, packed: PackedSequence, function: Any) -> tuple[Tensor, Tensor]:
        return function(
            self.hidden(packed), self.head.weight, next_token_labels(packed), group=self.group, temperature=0.7,
            sequence_parallel=self.sequence_parallel, vocab_size=VOCABULARY,
        )  # fmt: skip


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def score(view: Model, rows: list[Tensor], multiple_of: int) -> list[Tensor]:
    """`[L, 2]` of each sequence: log-probs and entropies."""
    packed = PackedSequence.from_sequences(rows, multiple_of=multiple_of)
    with torch.no_grad():
        return packed.split(torch.stack(view.log_probs(packed, invariant.linear_log_probs), dim=1))


def _score(group: ProcessGroup | None, config: DecoderConfig, dtype: torch.dtype) -> list[list[Tensor]]:
    """The same sequences in many packs, with and without sequence parallelism."""
    rows = sequences()
    found = []
    for sequence_parallel in (False, True) if group is not None else (False,):
        multiple = group.size() if group is not None and sequence_parallel else 1
        view = tp_invariant(Model(config, group, sequence_parallel, dtype))
        found.append(score(view, rows, multiple))
        found.append([score(view, [row], multiple)[0] for row in rows])
        found.append(score(view, rows[::-1], multiple)[::-1])
        found.append(score(view, [torch.arange(33), *rows], multiple)[1:])
        found.append(score(view, rows[:2], 7 * multiple) + score(view, rows[2:], 8 * multiple))
    return found


CASES = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in PLAIN else pytest.mark.slow)
    for name in CONFIGS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_bitwise_equal(ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    first, *others = _score(None, CONFIGS[name], dtype)
    for world in (2, 4):
        for rank in ranks.run(_score, CONFIGS[name], dtype, world=world):
            others += rank
    assert len(others) == 4 + 10 * 2 + 10 * 4
    for found in others:
        for ours, theirs in zip(found, first, strict=True):
            assert torch.equal(ours, theirs)


def test_the_ordinary_model_is_not(ranks: RankPool) -> None:
    """The model of the test above is large enough for other bits to appear without invariance."""
    packed = PackedSequence.from_sequences(sequences())
    model = Model(LLAMA, None, False, torch.float32)
    with torch.no_grad():
        ordinary = model.log_probs(packed, linear_log_probs)[0]
        ours = tp_invariant(model).log_probs(packed, invariant.linear_log_probs)[0]
    torch.testing.assert_close(ours, ordinary, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, ordinary)
    for theirs in ranks.run(_ordinary, packed, world=2):
        assert not torch.equal(theirs, ordinary)


@torch.no_grad()
def _ordinary(group: ProcessGroup, packed: PackedSequence) -> Tensor:
    return Model(LLAMA, group, False, torch.float32).log_probs(packed, linear_log_probs)[0]


def _gradients(group: ProcessGroup | None, config: DecoderConfig, sequence_parallel: bool) -> list[list[Tensor]]:
    """Log-probs, entropies and the gradients of every parameter, of the view, and of the model in fp64."""
    model = Model(config, group, sequence_parallel, torch.float32)
    exact = Model(config, group, sequence_parallel, torch.float64)
    exact.load_state_dict(model.state_dict())
    packed = PackedSequence.from_sequences(sequences(), multiple_of=1 if group is None else group.size())
    weights = torch.randn(2, packed.num_tokens, generator=torch.Generator().manual_seed(2))
    results = []
    for one, function in ((tp_invariant(model), invariant.linear_log_probs), (exact, linear_log_probs)):
        out = one.log_probs(packed, function)
        gradients = torch.autograd.grad(
            out, list(one.parameters()), [w.to(y.dtype) for w, y in zip(weights, out, strict=True)]
        )
        results.append([value.detach().float() for value in (*out, *gradients)])
    return results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("qwen", "gpt-oss") else pytest.mark.slow) for name in CONFIGS]
)
@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gradients_are_the_ordinary_ones(ranks: RankPool, name: str, world: int, sequence_parallel: bool) -> None:
    arguments = CONFIGS[name], sequence_parallel
    found = [_gradients(None, *arguments)] if world == 1 else ranks.run(_gradients, *arguments, world=world)
    for ours, theirs in found:
        for mine, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5 + 2e-5 * float(expected.abs().max()))


def _options(group: ProcessGroup | None) -> list[Tensor]:
    """Whole outputs of layers with a bias; and their gradients against the ordinary ones'."""
    torch.manual_seed(0)
    place: dict[str, Any] = {"placement": Placement(group), "bias": True}
    layers = [
        ColumnParallelLinear(16, 24, **place),
        RowParallelLinear(16, 24, **place),
    ]
    x = torch.randn(5, 3, 16)
    outputs = []
    for layer in layers:
        with torch.no_grad():
            bias = torch.linspace(-1, 1, 24)
            layer.bias.copy_(bias.chunk(24 // len(layer.bias))[0 if len(layer.bias) == 24 else group.rank()])
        results = []
        for module in (tp_invariant(layer), layer):
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            if layer is layers[0]:
                y = gather_from_tensor_parallel(module(leaf), group)
            else:
                y = module(scatter_to_tensor_parallel(leaf, group))
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad, layer.weight.grad))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
        empty = tp_invariant(layer)(x[:0, :, : layer.weight.shape[1]])
        assert empty.shape == (0, 3, len(layer.weight))
        outputs.append(results[0][0])
    return outputs


def test_options(ranks: RankPool) -> None:
    expected = _options(None)
    for found in (*ranks.run(_options, world=2), *ranks.run(_options, world=4)):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


def _refusals(group: ProcessGroup) -> None:
    hidden, labels = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    undivided = r"tp=3 does not divide blocks=4, .*; use tp in \{1, 2, 4\}$"
    with pytest.raises(ValueError, match=undivided):
        tp_invariant(RowParallelLinear(24, 8, placement=Placement(group)))
    with pytest.raises(ValueError, match=undivided):
        invariant.linear_log_probs(hidden, torch.zeros(86, 8), labels, group=group, vocab_size=256)
    with pytest.raises(ValueError, match="blocks=3 must be a power of two"):
        tp_invariant(ColumnParallelLinear(24, 24, placement=Placement(group)), blocks=3)


def test_ranks_that_do_not_divide(ranks: RankPool) -> None:
    ranks.run(_refusals, world=3)


def _padded_vocabulary(group: ProcessGroup) -> None:
    hidden, head, labels = torch.zeros(4, 8), torch.zeros(260, 8), torch.zeros(4, dtype=torch.int64)
    words = r"at tp=2 each rank holds 260 rows, so that rank 1 begins at entry 260 of 514.* ceil\(514 / 2\) = 257 rows"
    with pytest.raises(ValueError, match=words):
        invariant.linear_log_probs(hidden, head, labels, group=group, vocab_size=514)


def test_ranks_that_begin_elsewhere(ranks: RankPool) -> None:
    ranks.run(_padded_vocabulary, world=2)


def test_what_has_no_invariant_form() -> None:
    def layer(**changes: Any) -> DecoderLayer:
        return DecoderLayer(replace(LLAMA, **changes))

    experts = MoEConfig(num_experts=4, top_k=2, intermediate_size=8)
    linear = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)
    delta = KimiDeltaConfig(num_heads=2, head_dim=8)
    for model, words in (
        (layer(moe=replace(experts, scaled_router=True)), "gate: a router with scaled inputs has no invariant form"),
        (
            layer(moe=replace(experts, intermediate_size=10)),
            "experts: moe_intermediate_size=10 is not divisible by blocks=4",
        ),
        (layer(linear_attention=linear), "linear_attn: linear attention has no invariant form"),
        (layer(linear_attention=delta), "linear_attn: linear attention has no invariant form"),
        (layer(qk_norm="full"), "q_norm: a norm over all ranks' heads"),
        (layer(value_norm=True), "self_attn: a norm of values has no invariant form"),
        (layer(attention_backend="sdpa"), "attention backend='sdpa' depends on the rest of the pack"),
        (layer(intermediate_size=42), r"mlp\.down_proj: in_features=42 is not divisible by blocks=4"),
    ):
        with pytest.raises(ValueError, match=words):
            tp_invariant(model)
    ring = layer()
    ring.self_attn.attend = partial(ring_attention, group=None)
    with pytest.raises(ValueError, match="self_attn: ring attention depends on where a sequence lies"):
        tp_invariant(ring)
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, not torch\.float64"):
        tp_invariant(ColumnParallelLinear(4, 4, dtype=torch.float64))(torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize(("backend", "expected"), [("auto", "invariant"), ("exact", "exact")])
@pytest.mark.parametrize("name", ["llama", "latent"])
def test_attention_has_an_invariant_backend(name: str, backend: str, expected: str) -> None:
    """On a CPU the bits of "auto" can be equal by chance."""
    view = tp_invariant(DecoderLayer(replace(CONFIGS[name], attention_backend=backend)))
    assert view.self_attn.options["backend"] == expected


@torch.no_grad()
@pytest.mark.parametrize("tokens", [5, 16])
def test_what_the_kernels_of_the_head_are_given(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sixteens of tokens, whatever there are: a stand-in for the kernels sees no other, and results are right."""
    hidden, weight, labels = torch.randn(tokens, 8), torch.randn(30, 8), torch.arange(tokens)
    temperature = torch.rand(tokens) + 0.5
    expected = linear_log_probs(hidden, weight, labels, temperature=temperature)
    seen = []

    def statistics(hidden: Tensor, weight: Tensor, labels: Tensor, transform: Any, mask: Any) -> Tensor:
        seen.append((len(hidden), len(labels), len(transform.temperature), len(weight)))
        return chunked.head_statistics(hidden, weight, labels, transform, mask)

    monkeypatch.setattr(fused, "supports", lambda hidden, weight: True)
    monkeypatch.setattr(fused, "head_statistics", statistics)
    found = invariant.linear_log_probs(hidden, weight, labels, temperature=temperature)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert seen == [(16, 16, 16, size) for size in (8, 7, 1, 8, 6)]  # where ranks of 2 and of 4 begin


@torch.no_grad()
def test_a_router_takes_each_token_by_itself() -> None:
    """Logits and weights of a token alone; ties go to the same experts. The ordinary router has other bits."""
    config = MoEConfig(num_experts=64, top_k=6, intermediate_size=8)
    x = torch.randn(33, 768, generator=torch.Generator().manual_seed(0))
    differs = []
    for scoring in ("softmax", "sigmoid"):
        router = TopKRouter(768, replace(config, scoring=scoring, correction_bias=scoring == "sigmoid"))
        router.weight[1::2] = router.weight[::2]
        for module in (tp_invariant(router), router):
            whole, parts = module(x), [module(row) for row in x.split([1, 7, 25])]
            joined = map(torch.cat, zip(*parts, strict=True))
            differs.append(not all(torch.equal(a, b) for a, b in zip(whole, joined, strict=True)))
    assert differs == [False, True] * 2


def test_a_view_leaves_the_model_as_it_was() -> None:
    layer = RowParallelLinear(8, 4)
    view = tp_invariant(layer)
    assert "forward" not in layer.__dict__
    assert view.weight is layer.weight


def _under_autocast(group: ProcessGroup) -> None:
    place: dict[str, Any] = {"placement": Placement(group), "bias": True}
    x = torch.linspace(-1, 1, 5 * 16).view(5, 16).bfloat16()
    for kind, columns in ((ColumnParallelLinear, 16), (RowParallelLinear, 16 // group.size())):
        layer, narrow = kind(16, 8, **place), kind(16, 8, dtype=torch.bfloat16, **place)
        narrow.load_state_dict(layer.state_dict())
        mine = x[:, :columns]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = tp_invariant(layer)(mine.float())
        assert torch.equal(found, tp_invariant(narrow)(mine))


def test_autocast_reaches_the_products(ranks: RankPool) -> None:
    ranks.run(_under_autocast, world=2)
