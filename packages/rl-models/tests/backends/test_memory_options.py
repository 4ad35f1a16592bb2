"""Options that save memory: log-probs and all gradients are those without the option, on every backend that has it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from meshes import mesh_of
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.linear import LinearLayer, Product, float8
from parallel_layers.memory import ActivationOffload, savings
from parallel_layers.module import is_dtensor
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, LossInputs, MegatronOptions, PipelineOptions
from rl_models.losses import LossTerms


class Found(NamedTuple):
    """The log-probs and gradients of one rank, and how often each part of the decoder ran in the update."""

    log_probs: Tensor
    gradients: dict[str, Tensor]
    calls: dict[str, int]


def loss(inputs: LossInputs) -> LossTerms:
    return LossTerms(inputs.log_probs * inputs["weight"] + inputs.entropy)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (length,), generator=generator) for length in (11, 1, 17, 6)]
    return Batch.from_sequences(rows, weight=[torch.randn(len(row), generator=generator) for row in rows])


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach().clone()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor.clone()


def gradients_of(actor: Actor, batch: Batch, held: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return what is `held` of each gradient of the loss."""
    gradients: dict[str, Tensor] = {}

    def step(*_: Any) -> float:
        for name, parameter in actor.engine.module.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradients[name] = held(parameter.grad if gradient is None else gradient)
        return 0.0

    actor.optimizer.step = step  # type: ignore[method-assign]
    actor.update(batch, loss)
    return gradients


def _learn(path: Path, backend: str, dims: ParallelDims, options: dict[str, Any]) -> Found:
    actor = Actor.from_pretrained(path, backend=backend, dims=dims, mesh=mesh_of(dims), device="cpu", **options)
    batch = make_batch()
    batch = batch.select(range(actor.grid.rank("dp"), len(batch), dims.dp))
    if actor.engine.routed_layers:
        # Experts that no router would choose.
        experts = torch.tensor([0, 3]).expand(batch.num_tokens, len(actor.engine.routed_layers), 2)
        batch = batch.with_fields(routing=experts.to(torch.int16))
    log_probs = actor.log_probs(batch).log_probs
    calls: Counter[str] = Counter()
    for name, module in actor.engine.module.named_modules():
        if name.endswith(("q_proj", "qkv_proj", "linear_qkv", "mlp.down_proj", "mlp.experts", "linear_fc2")):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    gradients = gradients_of(actor, batch, _local)
    return Found(log_probs, gradients, dict(calls))


def both(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, options: list[dict[str, Any]], stages: int = 1
) -> list[Found]:
    """Return what this rank finds without an option, and with each of the options; `stages`: virtual stages."""
    pipeline = {} if stages == 1 else {"pipeline": PipelineOptions(virtual_stages=stages)}
    with cpu_stand_in() if backend == "megatron" else contextlib.nullcontext():
        return [_learn(path, backend, dims, pipeline | each) for each in ({}, *options)]


def parts(found: Found, *, mlp: bool = False) -> set[str]:
    """Return the names of the parts that were counted, or of those of MLPs and mixtures alone."""
    return {name for name in found.calls if not mlp or name.endswith(("down_proj", "experts", "linear_fc2"))}


@pytest.mark.parametrize(
    ("backend", "model", "dims"),
    [
        pytest.param("transformers", "llama", ParallelDims(dp=2), marks=pytest.mark.slow),
        pytest.param("transformers", "mixture", ParallelDims(cp=2), marks=pytest.mark.slow),
        pytest.param("megatron", "llama", ParallelDims(tp=2), marks=pytest.mark.slow),
        ("megatron", "mixture", ParallelDims(ep=2, dp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recomputed_numbers_are_the_same_bits(
    ranks: RankPool, tiny: Callable[..., Path], backend: str, model: str, dims: ParallelDims
) -> None:
    options = [{"recompute": choice} for choice in ("full", "selective", [1])]
    for plain, full, selective, one in ranks.run(both, tiny(model), backend, dims, options, world=2):
        for found in (full, selective, one):
            assert torch.equal(found.log_probs, plain.log_probs)
            assert all(torch.equal(found.gradients[name], gradient) for name, gradient in plain.gradients.items())
        for found, twice in zip(
            (full, selective, one),
            (parts(plain), parts(plain, mlp=True), {name for name in parts(plain) if "layers.1." in name}),
            strict=True,
        ):
            assert twice
            assert {name: count / plain.calls[name] for name, count in found.calls.items()} == {
                name: 2 if name in twice else 1 for name in plain.calls
            }


class Float8(Product):
    """Stands for Transformer Engine's product: all operands are rounded to FP8 under one scale a tensor."""

    differentiable: ClassVar[bool] = True

    def __init__(self, weight: Tensor, recipe: object) -> None:
        self.linear = SimpleNamespace(_is_fsdp2=False)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return _Float8.apply(x, weight)


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(_rounded(x), _rounded(weight))
        return F.linear(*ctx.to_save)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = _rounded(gradient)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


def _rounded(x: Tensor) -> Tensor:
    kind = torch.float8_e4m3fn
    scale = x.abs().max() / torch.finfo(kind).max
    return (x / scale).to(kind).to(x.dtype) * scale if scale > 0 else x


def with_savings(
    group: ProcessGroup, path: Path, backend: str, dims: ParallelDims, options: list[dict[str, Any]], stages: int = 1
) -> tuple[list[Found], Counter[str]]:
    """Return what `both` does, with a stand-in for FP8, and how many layers were offloaded, in how many chains."""
    sent = Counter[str]()

    class Offload(ActivationOffload):
        def begin(self, *, first: bool) -> Any:
            sent.update(["layers", "chains"][: 1 + first])
            return super().begin(first=first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "why_not_float8", lambda recipe: None)
        patch.setattr(float8, "Float8Product", Float8)
        patch.setattr(savings, "ActivationOffload", partial(Offload, min_bytes=0))
        return both(group, path, backend, dims, options, stages), sent


SAVINGS: list[dict[str, Any]] = [
    {"tiled_mlp": 3},
    {"offload_activations": True},
    {"offload_activations": True, "recompute": "full"},
    {"tiled_mlp": 2, "recompute": "selective", "offload_activations": True},
]


@pytest.mark.parametrize(
    ("backend", "model", "dims", "stages"),
    [
        ("megatron", "llama", ParallelDims(pp=2), 2),
        ("parallel", "mixture", ParallelDims(dp=2, ep=2), 1),  # FSDP2 gathers the experts within a layer
        *(
            pytest.param(backend, model, dims, stages, marks=pytest.mark.slow)
            for backend, model, dims, stages in [
                ("transformers", "llama", ParallelDims(dp=2), 1),
                ("megatron", "llama", ParallelDims(tp=2), 1),
                ("megatron", "llama", ParallelDims(pp=2), 1),
                ("megatron", "llama", ParallelDims(dp=2), 1),
                ("megatron", "llama", ParallelDims(cp=2), 1),
                ("parallel", "llama", ParallelDims(tp=2), 1),
                ("parallel", "llama", ParallelDims(pp=2), 1),
                ("parallel", "llama", ParallelDims(pp=2), 2),
                ("parallel", "gemma4-e2b", ParallelDims(pp=2), 1),
                ("parallel", "gemma4-e2b", ParallelDims(pp=2), 2),
                ("parallel", "llama", ParallelDims(dp=2), 1),
                ("transformers", "llama", ParallelDims(cp=2), 1),
            ]
        ),
    ],
    ids=str,
)
def test_tiles_and_offload_change_no_number(
    ranks: RankPool, tiny: Callable[..., Path], backend: str, model: str, dims: ParallelDims, stages: int
) -> None:
    layers = 4 if dims.pp > 1 else 2
    path = tiny(model, num_hidden_layers=layers)
    tried = [options for options in SAVINGS if model != "mixture" or "tiled_mlp" not in options]  # it has no dense MLP
    for (plain, *others), sent in ranks.run(with_savings, path, backend, dims, tried, stages, world=2):
        assert sent["layers"] >= sum("offload_activations" in options for options in tried) * layers // dims.pp
        assert sent["chains"] * layers // dims.pp == sent["layers"] * stages  # each chunk begins a chain
        for found, options in zip(others, tried, strict=True):
            torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=0, atol=1e-5)
            assert found.gradients.keys() == plain.gradients.keys()
            for name, gradient in plain.gradients.items():
                atol = 1e-5 * max(1.0, float(gradient.abs().max()))
                torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=atol, msg=f"{options} {name}")


@pytest.mark.parametrize(
    ("model", "dims"),
    [
        pytest.param("llama", ParallelDims(dp=2), marks=pytest.mark.slow),
        ("llama", ParallelDims(tp=2)),
        pytest.param("mixture", ParallelDims(dp=2), marks=pytest.mark.slow),
        pytest.param("mixture", ParallelDims(tp=2), marks=pytest.mark.slow),
        ("mixture", ParallelDims(dp=2, ep=2)),
    ],
    ids=str,
)
def test_products_in_float8_are_near(
    ranks: RankPool, tiny: Callable[..., Path], model: str, dims: ParallelDims
) -> None:
    """With a stand-in for Transformer Engine, which needs a GPU; all gradients come through FP8, experts' too."""
    path = tiny(model, **({"moe_intermediate_size": 32} if model == "mixture" else {}))
    options = [{"float8": "current"}, {"float8": "current", "recompute": "full"}]
    for (plain, found, again), _ in ranks.run(with_savings, path, "parallel", dims, options, world=2):
        assert 1e-4 < (found.log_probs - plain.log_probs).abs().max() < 0.5
        ours, theirs = (torch.cat([x.flatten() for x in each.gradients.values()]) for each in (found, plain))
        assert F.cosine_similarity(ours, theirs, dim=0) > 0.9
        changed = {
            name for name, gradient in plain.gradients.items() if not torch.equal(found.gradients[name], gradient)
        }
        assert {name for name in plain.gradients if "proj" in name} <= changed
        assert torch.equal(again.log_probs, found.log_probs)
        assert all(torch.equal(again.gradients[name], gradient) for name, gradient in found.gradients.items())


def in_float8_over(group: ProcessGroup, path: Path, dims: ParallelDims) -> dict[str, Tensor]:
    """Return the whole gradients of two sequences, each a micro-batch of its own: scales cover a micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8, "why_not_float8", lambda recipe: None)
        patch.setattr(float8, "Float8Product", Float8)
        sizes: dict[str, Any] = {"dims": dims, "mesh": mesh_of(dims), "max_tokens_per_micro_batch": 17}
        actor = Actor.from_pretrained(path, device="cpu", float8="current", **sizes)
        linears = [module for module in actor.engine.module.modules() if isinstance(module, LinearLayer)]
        products = [linear.execution.product for linear in linears if linear.float8]
        assert {product.linear._is_fsdp2 for product in products} == {dims.dp > 1}
        rows = [torch.randint(61, (17,), generator=torch.Generator().manual_seed(row)) for row in range(2)]
        batch = Batch.from_sequences(rows, weight=[row / 61 for row in rows])
        return gradients_of(actor, batch.select(range(actor.grid.rank("dp"), len(batch), dims.dp)), _whole)


@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_float8_under_fsdp2_gives_the_gradients_of_one_rank(
    ranks: RankPool, tiny: Callable[..., Path], model: str
) -> None:
    """The scale of a weight covers the gathered weight, of experts' weights, too; sums of two terms have equal bits."""
    path = tiny(model, **({"moe_intermediate_size": 32} if model == "mixture" else {}))
    (whole,) = ranks.run(in_float8_over, path, ParallelDims(), world=1)
    for found in ranks.run(in_float8_over, path, ParallelDims(dp=2), world=2):
        assert found.keys() == whole.keys()
        assert [name for name, gradient in whole.items() if not torch.equal(found[name], gradient)] == []


def test_options_that_save_memory_are_refused_by_name(tiny: Callable[..., Path]) -> None:
    for options, message in (
        ({"tiled_mlp": 0}, "tiled_mlp=0 must be"),
        ({"float8": "current", "tp_invariant": True}, "float8='current' excludes tp_invariant=True"),
        ({"float8": "delayed"}, "float8='delayed' is unknown; use 'current' or 'block' or 'mxfp8'"),
        ({"float8": "current"}, "recipe='current' cannot be used: it needs the transformer-engine package"),
    ):
        with pytest.raises(ValueError, match=message):
            Actor.from_pretrained(tiny("llama"), device="cpu", **options)
    for backend, message in (("parallel", "qwen3_moe has no dense MLP"), ("transformers", "Qwen3Moe.* no dense MLP")):
        with pytest.raises(ValueError, match=rf"tiled_mlp=2: .*{message}"):
            Actor.from_pretrained(tiny("mixture"), backend=backend, device="cpu", tiled_mlp=2)


def refusals(group: ProcessGroup, cases: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Return the message of each case on Megatron-Core."""
    messages = []
    with cpu_stand_in():
        for path, options in cases:
            with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches
                Actor.from_pretrained(path, backend="megatron", device="cpu", **options)
            messages.append(str(error.value))
    return messages


def test_megatron_refuses_by_name(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    on_te = {"float8": "current", "megatron": MegatronOptions(layers="transformer_engine")}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("mixture", {"tiled_mlp": 2}, "tiled_mlp=2: qwen3_moe has no dense MLP"),
        ("llama", {"recompute": [2]}, "recompute: there are no layers [2]"),
        ("llama", {"float8": "block", "tiled_mlp": 2}, "does not offer float8='block' with tiled_mlp=2"),
        ("llama", {"float8": "current"}, "add megatron=MegatronOptions(layers='transformer_engine')"),
        ("llama", on_te, "recipe='current' cannot be used: it needs the transformer-engine package"),
    ]
    (messages,) = ranks.run(refusals, [(tiny(model), options) for model, options, _ in cases], world=1)
    for message, (_, _, words) in zip(messages, cases, strict=True):
        assert words in message


@pytest.mark.parametrize(("recipe", "multiple"), [("current", 16), ("block", 128), ("mxfp8", 32)])
def test_megatron_in_float8_wants_multiples(
    ranks: RankPool, tiny: Callable[..., Path], recipe: str, multiple: int
) -> None:
    """Without Transformer Engine Megatron-Core takes the options, and computes in the weights' dtype."""
    found = ranks.run(in_float8, tiny("llama", vocab_size=64), recipe, world=1)[0]
    assert found == (multiple, f"multiples of {multiple}, and decoder." if multiple > 16 else None)


def in_float8(group: ProcessGroup, path: Path, recipe: str) -> tuple[int, str | None]:
    """Return the multiple of tokens and the refusal of the weights' sizes, on Megatron-Core's own layers."""
    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt, require_multiples
    from rl_models.backends.options import FLOAT8

    with cpu_stand_in(), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        chunks = build_gpt(path, grid, **FLOAT8[recipe])
        try:
            require_multiples(chunks, recipe)
        except ValueError as error:
            words = str(error).partition(" needs weights whose sizes are ")[2]
            return chunks[0].tokens_multiple_of, words.partition("decoder.")[0] + "decoder."
        return chunks[0].tokens_multiple_of, None
