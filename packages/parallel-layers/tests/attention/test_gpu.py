"""Every attention backend that is installed, against the reference in fp32 on the same numbers; and no host sync."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from parallel_layers.attention import LatentConfig, available_backends
from parallel_layers.attention.backends import BACKENDS, why_not
from parallel_layers.attention.kernel_interface import Scoring, Segments
from parallel_layers.attention.packed import packed_attention
from parallel_layers.attention.reference import REFERENCE
from parallel_layers.inference import DecodeSteps, PagedKVCache
from parallel_layers.mlp.layer import ParallelMLP
from parallel_layers.model.decoder import DecoderConfig, DecoderLayer
from parallel_layers.moe import ClampedSwiGLU, MoEConfig
from parallel_layers.norm.rms import RMSNorm
from parallel_layers.rotary.embedding import RotaryEmbedding

pytestmark = pytest.mark.gpu

LENGTHS = [300, 1, 0, 1000, 129, 64, 7]
KERNELS = [name for name in BACKENDS if name not in ("reference", "exact")]  # which read boundaries on the host
OPTIONS: dict[str, dict[str, Any]] = {
    "both ways": {"causal": False},
    "window": {"window": 64},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}
CASES: dict[str, dict[str, Any]] = {
    ", ".join(names) or "causal": {key: value for name in names for key, value in OPTIONS[name].items()}
    for count in range(len(OPTIONS) + 1)
    for names in combinations(OPTIONS, count)
} | {"window of one": {"window": 1}, "scale": {"scale": 0.3}}


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def skip_unless_able(backend: str, head_dim: int, value_dim: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A backend that cannot do a case must have refused it by name and with the reason."""
    softcap, sinks = options.get("softcap"), torch.zeros(2, device="cuda") if "sinks" in options else None
    needs = head_dim, softcap is not None, sinks is not None, value_dim
    if (reason := why_not(backend, "cuda", dtype, *needs)) is None:
        return
    q, k, v = (torch.zeros(4, 2, size, device="cuda", dtype=dtype) for size in (head_dim, head_dim, value_dim))
    with pytest.raises(ValueError, match=re.escape(f"backend='{backend}' cannot do this case: {reason}; use 'auto'")):
        packed_attention(q, k, v, boundaries([4]), 4, softcap=softcap, sinks=sinks, backend=backend)
    pytest.skip(f"{backend}: {reason}")


def relative_error(x: Tensor, truth: Tensor) -> float:
    """In norm; absolute where the truth is next to nothing: the gradient of queries that see one key each is zero."""
    return ((x.double() - truth.double()).norm() / truth.double().norm().clamp(min=1)).item()


def compare(
    backend: str,
    lengths_q: list[int],
    lengths_k: list[int] | None = None,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    """The output and every gradient: at most 1.5 times as far from fp64 as the reference in the same dtype."""
    value_dim = head_dim if value_dim is None else value_dim
    size = max(head_dim, value_dim)
    sizes = (head_dim, value_dim) if heads[0] == heads[1] else (size, size)
    skip_unless_able(backend, *sizes, dtype, options)
    torch.manual_seed(0)
    tokens, keys = sum(lengths_q), sum(lengths_k if lengths_k is not None else lengths_q)
    shapes = [(tokens, heads[0], head_dim), (keys, heads[1], head_dim), (keys, heads[1], value_dim)]
    data = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    seed = torch.randn(tokens, heads[0], value_dim, device="cuda").to(dtype)
    if options.pop("sinks", False):
        data.append(torch.randn(heads[0], device="cuda").to(dtype))
    if lengths_k is not None:
        options |= {"cu_seqlens_k": boundaries(lengths_k), "max_seqlen_k": max(lengths_k)}

    def run(name: str, wide: torch.dtype) -> list[Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in data]
        extra = {"sinks": leaves[3]} if len(leaves) == 4 else {}
        bounds = boundaries(lengths_q)
        out = packed_attention(*leaves[:3], bounds, max(lengths_q), backend=name, **options, **extra)
        return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(wide))]

    ours, plain, truth = run(backend, dtype), run("reference", dtype), run("reference", torch.float64)
    # The reference keeps probabilities in fp32; the flash kernels round them to the inputs' dtype before the products.
    floor = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[dtype]
    for name, mine, theirs, exact in zip(("out", "d_q", "d_k", "d_v", "d_sinks"), ours, plain, truth, strict=False):
        assert mine.isfinite().all(), name
        assert relative_error(mine, exact) <= 1.5 * max(relative_error(theirs, exact), floor), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", KERNELS)
def test_cases(backend: str, case: str) -> None:
    compare(backend, LENGTHS, **CASES[case])


@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", KERNELS)
def test_head_sizes(backend: str, head_dim: int) -> None:
    compare(backend, LENGTHS, head_dim=head_dim)
    compare(backend, LENGTHS, head_dim=head_dim, heads=(6, 6))


@pytest.mark.parametrize("backend", KERNELS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 300, 777]), max_size=8),
    place=st.integers(0, 8),
    window=st.none() | st.sampled_from([1, 2, 63, 64, 65, 500]),
)
def test_any_lengths(backend: str, lengths: list[int], place: int, window: int | None) -> None:
    """On both sides of the kernels' tiles. One segment is always long: errors are relative to the whole pack's."""
    compare(backend, [*lengths[:place], 200, *lengths[place:]], head_dim=64, window=window)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (96, 64), (64, 128), (128, 72)])
@pytest.mark.parametrize("backend", KERNELS)
def test_value_heads_of_another_size(backend: str, head_dim: int, value_dim: int) -> None:
    """Smaller, as DeepSeek's, and larger."""
    compare(backend, LENGTHS, head_dim=head_dim, value_dim=value_dim)


@pytest.mark.parametrize("case", CASES)
def test_keys_of_192_and_values_of_128_with_every_option(case: str) -> None:
    compare("flash-attn-4", LENGTHS, heads=(6, 6), head_dim=192, value_dim=128, **CASES[case])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", KERNELS)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    compare(backend, LENGTHS, dtype=dtype)


@pytest.mark.parametrize("case", ["causal", "both ways", "window", "sinks"])
@pytest.mark.parametrize("backend", KERNELS)
def test_other_numbers_of_keys(backend: str, case: str) -> None:
    """More keys than queries, fewer, and none: what a ring of ranks asks for."""
    compare(backend, [0, 100, 200, 30, 60], [50, 300, 0, 30, 20], **CASES[case])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("lengths", "lengths_k"), [([], []), ([0, 0], [0, 40]), ([3, 1], [0, 0])])
def test_nothing_to_do(backend: str, lengths: list[int], lengths_k: list[int]) -> None:
    skip_unless_able(backend, 64, 64, torch.bfloat16, {})
    q, k, v = (
        torch.randn(sum(n), heads, 64, device="cuda").bfloat16().requires_grad_()
        for n, heads in ((lengths, 4), (lengths_k, 2), (lengths_k, 2))
    )
    bounds = {"cu_seqlens": boundaries(lengths), "cu_seqlens_k": boundaries(lengths_k)}
    out = packed_attention(q, k, v, **bounds, max_seqlen=3, max_seqlen_k=40, backend=backend)
    assert out.shape == q.shape
    assert not out.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("case", ["causal", "both ways", "window", "softcap"])
@pytest.mark.parametrize("backend", [name for name in KERNELS if BACKENDS[name].lse])
def test_log_sum_exp(backend: str, case: str) -> None:
    """The kernel's own output and log-sum-exp, which ring attention and sinks use."""
    skip_unless_able(backend, 64, 64, torch.bfloat16, CASES[case])
    q, k, v = torch.randn(3, sum(LENGTHS), 4, 64, device="cuda").bfloat16()
    bounds_k = boundaries([300, 1, 0, 1000, 0, 64, 136])  # one segment's queries have no keys
    segments = Segments.of(boundaries(LENGTHS), 1000, bounds_k, 1000)
    scoring = Scoring(**{"causal": True, "window": None, "scale": 0.125, "softcap": None, **CASES[case]})
    out, lse = BACKENDS[backend].kernel.forward(q, k, v, segments, scoring)
    wide = (x.float() for x in (q, k, v))
    expected_out, expected_lse = REFERENCE.forward(*wide, segments, scoring)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.float(), expected_out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", ["causal", "window", "softcap"])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_segment_never_feels_another_bit_for_bit(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other segment's data changed: this one's output and gradients keep every bit.

    With torch's deterministic algorithms: some of the kernels' backwards add up in any order without them.
    """
    skip_unless_able(backend, 64, 64, torch.bfloat16, CASES[case])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    cu_seqlens, total = boundaries(LENGTHS), sum(LENGTHS)
    data = [torch.randn(total, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2, 4)]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        out = packed_attention(*leaves, cu_seqlens, max(LENGTHS), backend=backend, **CASES[case])
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    torch.use_deterministic_algorithms(True)
    try:
        before = run(data)
        for start, end in pairwise(cu_seqlens.tolist()):
            others = torch.ones(total, 1, 1, dtype=torch.bool, device="cuda")
            others[start:end] = False
            after = run([torch.where(others, 3 * x + 1, x) for x in data])
            for x, y in zip(before, after, strict=True):
                assert torch.equal(x[start:end], y[start:end])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", KERNELS)
def test_used_keys(backend: str) -> None:
    skip_unless_able(backend, 64, 64, torch.bfloat16, {})
    q = torch.randn(7, 4, 64, device="cuda").bfloat16()
    k, v = torch.randn(2, 3 * 200, 2, 64, device="cuda").bfloat16()
    options = {
        "cu_seqlens_k": boundaries([200, 200, 200]),
        "max_seqlen_k": 200,
        "used_k": torch.tensor([150, 3, 0], device="cuda", dtype=torch.int32),
    }
    bounds = boundaries([1, 3, 3])
    out = packed_attention(q, k, v, bounds, 3, backend=backend, **options)
    expected = packed_attention(q, k, v, bounds, 3, backend="reference", **options)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert not out[4:].any()


@torch.no_grad()
def test_latents_are_read_once_for_all_heads() -> None:
    """A decoding step of MLA over 19 MB of cache, which repeated for each of 128 heads would be 2.4 GB."""
    torch.manual_seed(0)
    used = [1024, 1, 0, 777, *range(1000, 1012)]
    q = torch.randn(16, 128, 576, device="cuda").bfloat16()
    k = torch.randn(16 * 1024, 1, 576, device="cuda").bfloat16()
    options: dict[str, Any] = {
        "cu_seqlens_k": boundaries([1024] * 16),
        "max_seqlen_k": 1024,
        "used_k": torch.tensor(used, device="cuda", dtype=torch.int32),
        "scale": 192**-0.5,
    }
    bounds = boundaries([1] * 16)
    expected = packed_attention(q.float(), k.float(), k[..., :512].float(), bounds, 1, backend="reference", **options)
    packed_attention(q, k, k[..., :512], bounds, 1, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_host_sync():
        out = packed_attention(q, k, k[..., :512], bounds, 1, **options)
    assert torch.cuda.max_memory_allocated() - before < 400e6
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert not out[2].any()


def test_auto_takes_the_first_that_is_able() -> None:
    q, k, v = torch.randn(3, 8, 4, 64, device="cuda").bfloat16()
    out = packed_attention(q, k, v, boundaries([8]), 8)
    assert torch.equal(out, packed_attention(q, k, v, boundaries([8]), 8, backend=available_backends()[0]))


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


CONFIG = DecoderConfig(hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512, qk_norm="head")


EXPERTS = MoEConfig(num_experts=8, top_k=2, intermediate_size=64, balance_loss=0.1, shared_intermediate_size=64)
GPT_OSS = MoEConfig(
    num_experts=8, top_k=2, intermediate_size=64, router_bias=True, expert_bias=True, activation=ClampedSwiGLU()
)
LATENT = LatentConfig(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48, q_lora_rank=96)
LAYERS = {f"qwen3, {backend}": replace(CONFIG, attention_backend=backend) for backend in KERNELS} | {
    "moe": replace(CONFIG, moe=EXPERTS),
    "gpt-oss": replace(CONFIG, qk_norm=None, attention_sinks=True, attention_bias=True, window=64, moe=GPT_OSS),
    "gemma2": replace(CONFIG, qk_norm=None, attention_softcap=2.0, norm_placement="sandwich", norm_unit_offset=True),
    "deepseek": replace(CONFIG, qk_norm=None, num_kv_heads=4, head_dim=None, latent=LATENT, rotary_interleaved=True),
}


def layer_of(config: DecoderConfig) -> tuple[DecoderLayer, RotaryEmbedding]:
    """The layer; skips where no kernel does the config (the reference, on a GPU, waits)."""
    needs = "cuda", torch.bfloat16, 64, config.attention_softcap is not None, config.attention_sinks
    kernels = KERNELS if config.attention_backend == "auto" else [config.attention_backend]
    reasons = [why_not(kernel, *needs) for kernel in kernels]
    if None not in reasons:
        pytest.skip("; ".join(map(str, reasons)))
    torch.manual_seed(0)
    return DecoderLayer(config, dtype=torch.bfloat16, device="cuda"), RotaryEmbedding(64, device="cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_never_waits_for_the_device(name: str) -> None:
    layer, rotary = layer_of(LAYERS[name])
    x = torch.randn(sum(LENGTHS), 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions, bounds = torch.cat([torch.arange(n) for n in LENGTHS]).cuda(), boundaries(LENGTHS)
    for attempt in range(2):  # the first compiles
        if attempt == 0:
            layer(x, rotary(positions), bounds, max(LENGTHS)).sum().backward()
        else:
            with no_host_sync():
                layer(x, rotary(positions), bounds, max(LENGTHS)).sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, config in LAYERS.items() if config.moe is None])
def test_decoding_with_a_cache(name: str) -> None:
    """Step by step equals one forward over everything, and no step waits for the device."""
    layer, rotary = layer_of(LAYERS[name])
    # Norms after the sublayers scale rounding errors up to the outputs' size, 2 to 8, where bf16 has steps of 2^-6 to
    # 2^-5. Another rounding of the attention's output moves the layer's by up to 0.05 beyond rtol; a lost key moves it
    # by 0.36 or more.
    atol = 2**-4 if LAYERS[name].norm_placement == "sandwich" else 2e-2
    sequences = [torch.randn(n, 256, device="cuda").bfloat16() for n in (40, 20)]
    whole = [layer(x, rotary(torch.arange(len(x), device="cuda")), boundaries([len(x)]), len(x)) for x in sequences]
    cache = PagedKVCache([layer.self_attn.cache_shape], 2, 64, dtype=torch.bfloat16, device="cuda")
    starts = [0, 0]
    for step, new in enumerate([[31, 11], *[[1, 1]] * 3, *[[3, 3]] * 2]):
        x = torch.cat([s[a : a + n] for s, a, n in zip(sequences, starts, new, strict=True)])
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, new, strict=True)]).cuda()
        bounds = boundaries(new)

        def forward(cache: PagedKVCache | DecodeSteps, x: Tensor, positions: Tensor, bounds: Tensor) -> Tensor:
            out = layer(x, rotary(positions), bounds, max(new), cache=cache.layer(0))  # noqa: B023
            cache.advance(bounds)
            return out

        if step == 0:
            out = forward(cache, x, positions, bounds)
            cache.reserve([9, 9])
        else:
            view = DecodeSteps(cache, cache.lengths, new[0])
            with nullcontext() if step == 1 else no_host_sync():
                out = forward(view, x, positions, bounds)
            cache.lengths.add_(new[0])
        for part, full, a, n in zip(out.split(new), whole, starts, new, strict=True):
            torch.testing.assert_close(part, full[a : a + n], rtol=2e-2, atol=atol)
        starts = [a + n for a, n in zip(starts, new, strict=True)]


@pytest.mark.parametrize("name", ["norm", "mlp", "qwen3", "moe"])
def test_compiled_layer(name: str) -> None:
    """Inductor's code: one graph for the first length and one for all others; outputs and every gradient."""
    from torch._dynamo.testing import CompileCounterWithBackend

    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    layer: nn.Module
    if name in ("norm", "mlp"):
        layer = RMSNorm(256, **place) if name == "norm" else ParallelMLP(256, 512, **place)
    else:  # of all experts: a choice near a tie would be another after another rounding
        moe = replace(EXPERTS, top_k=EXPERTS.num_experts) if name == "moe" else None
        layer = DecoderLayer(replace(CONFIG, moe=moe), **place)
    rotary = RotaryEmbedding(64, device="cuda")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for lengths in ([100, 28], [300, 1, 0, 77], [250, 31]):
        x = torch.randn(sum(lengths), 256, requires_grad=True, **place)
        seed = torch.randn_like(x)
        positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
        arguments = (rotary(positions), boundaries(lengths), max(lengths)) if isinstance(layer, DecoderLayer) else ()
        leaves, found = [x, *layer.parameters()], []
        for run in (compiled, layer):
            out = run(x, *arguments)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, seed)])
        for ours, theirs in zip(*found, strict=True):
            assert relative_error(ours, theirs) < 3e-2
    assert counter.frame_count == 2
