"""Options that a backend lacks, or that do not go together, are refused by name before anything is computed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from hf_patches.testing import tiny_model
from parallel_layers import ParallelDims
from parallel_layers.model import LoraOptions
from parallel_models import Grid, RouterLosses, SamplingOptions
from rl_models import Actor, Critic, MegatronOptions, OptimizerOptions, PipelineOptions
from rl_models.backends import BACKENDS, BackendOptions, offered


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def test_options_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend='jax' is not available; available: parallel, megatron, transformers"):
        Actor.from_pretrained(model, backend="jax")
    with pytest.raises(ValueError, match="backend='no_such:ROW': importing no_such raised ModuleNotFoundError"):
        Actor.from_pretrained(model, backend="no_such:ROW")
    with pytest.raises(ValueError, match=r"pi of math must be a rl_models.backends.Backend, got float"):
        Actor.from_pretrained(model, backend="math:pi")
    with pytest.raises(ValueError, match="no process group"):
        Actor.from_pretrained(model, dims=ParallelDims(tp=2))
    with pytest.raises(ValueError, match="sequence_parallel=True needs tp > 1"):
        Actor.from_pretrained(model, sequence_parallel=True)
    with pytest.raises(ValueError, match="does not offer sequence_parallel"):
        Actor.from_pretrained(model, backend="transformers", sequence_parallel=True)
    with pytest.raises(ValueError, match="is no checkpoint folder"):
        Actor.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not offer lora with layers='transformer_engine'"):
        BackendOptions(lora=LoraOptions(), megatron=MegatronOptions("transformer_engine"))
    with pytest.raises(ValueError, match=r"'megatron' does not offer replicate=2; it offers dp, pp, cp, tp, ep$"):
        offered("megatron", "causal_lm", Grid(ParallelDims(dp=2, replicate=2), torch.device("cpu")))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            BackendOptions,
            ("sequence_parallel", "offload_activations", "share_prefixes", "tp_invariant", "deterministic"),
        ),
        (MegatronOptions, ("distributed_optimizer",)),
        (OptimizerOptions, ("offload",)),
        (partial(SamplingOptions, 4), ("keep_sampling_mask",)),
        (LoraOptions, ("rslora", "shared_experts")),
    ],
)
def test_a_text_is_no_flag(options: Callable[..., object], names: tuple[str, ...]) -> None:
    """Any text would count as True, "no" as well."""
    for name in names:
        with pytest.raises(ValueError, match=f"^{name}='no' must be True or False"):
            options(**{name: "no"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: BackendOptions(float8="fp4"), "float8='fp4' is unknown; use 'current' or 'block' or 'mxfp8' or None"),  # type: ignore[arg-type]
        (
            lambda: BackendOptions(context_parallel="rings"),
            "context_parallel='rings' is unknown; use 'ulysses' or 'ring' or 'heads'",
        ),  # type: ignore[arg-type]
        (
            lambda: BackendOptions(router_losses={"z": 1}),
            r"router_losses=\{'z': 1\} must be RouterLosses\(...\), not dict",
        ),  # type: ignore[arg-type]
        (lambda: BackendOptions(lora={"rank": 2}), r"lora=\{'rank': 2\} must be LoraOptions\(...\), or a folder"),  # type: ignore[arg-type]
        (lambda: RouterLosses(balance=math.nan), "balance=nan must be a finite number"),
        (lambda: RouterLosses(z=-1), "z=-1 must be at least 0"),
        (lambda: PipelineOptions(virtual_stages=1.5), "virtual_stages=1.5 must be an integer, not float"),  # type: ignore[arg-type]
        (lambda: PipelineOptions(split="12"), r"split=\['1', '2'\] must give every chunk at least one layer"),
        (lambda: PipelineOptions(split=[2, 0]), r"split=\[2, 0\] must give every chunk at least one layer"),
        (lambda: OptimizerOptions(betas=0.9), "betas=0.9 must be two numbers"),  # type: ignore[arg-type]
        (lambda: OptimizerOptions(schedule="cosine"), r"schedule='cosine' must be Schedule\(...\), not str"),  # type: ignore[arg-type]
        (
            lambda: Actor.from_pretrained("", optimizer=1e-5),
            r"optimizer=1e-05 must be OptimizerOptions\(...\), not float",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_is_no_option_is_refused_by_name(options: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        options()


@pytest.mark.parametrize(("backend", "needs"), [("megatron", "megatron_utils"), ("transformers", "hf_patches")])
def test_a_backend_without_its_package_names_the_package(
    model: Path, monkeypatch: pytest.MonkeyPatch, backend: str, needs: str
) -> None:
    for name in [name for name in sys.modules if name.startswith((BACKENDS[backend].module, needs))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, needs, None)
    with pytest.raises(ImportError, match=rf"pip install \./packages/{needs.replace('_', '-')}$"):
        Actor.from_pretrained(model, backend=backend, device="cpu")


# Written out: a backend that comes to offer one of them, or to lack another, changes this list.
LACKED = [
    ("parallel", "megatron", MegatronOptions(layers="transformer_engine")),
    ("megatron", "router_losses", RouterLosses(balance=0.1)),
    ("megatron", "share_prefixes", True),
    ("megatron", "keep_probabilities", True),
    ("megatron", "tp_invariant", True),
    ("megatron", "base_format", "fp8"),
    ("megatron", "mtp_loss_scaling_factor", 0.1),
    ("transformers", "base_format", "fp8"),
    ("transformers", "pipeline", PipelineOptions(virtual_stages=2)),
    ("transformers", "context_parallel", "ring"),
    ("transformers", "router_losses", RouterLosses(z=1e-3)),
    ("transformers", "float8", "block"),
    ("transformers", "tp_invariant", True),
    ("transformers", "mtp_loss_scaling_factor", 0.1),
    ("transformers", "megatron", MegatronOptions(distributed_optimizer=False)),
]


@pytest.mark.parametrize(("backend", "name", "value"), LACKED, ids=[f"{backend}-{name}" for backend, name, _ in LACKED])
def test_an_option_that_a_backend_lacks_is_refused_by_name(model: Path, backend: str, name: str, value: Any) -> None:
    more = {"lora": LoraOptions()} if name == "base_format" else {}
    for kind in (Actor, Critic):
        reason = re.escape(BACKENDS[backend].lacks[name])
        with pytest.raises(ValueError, match=f"^backend='{backend}' does not offer {name}=.*: {reason}; leave it out$"):
            kind.from_pretrained(model, backend=backend, device="cpu", **{name: value}, **more)


def test_all_that_a_backend_lacks_is_tested() -> None:
    lacks = [(backend, name) for backend, row in BACKENDS.items() for name in row.lacks]
    assert sorted(lacks) == sorted((backend, name) for backend, name, _ in LACKED)


def test_a_critic_of_a_type_that_transformers_takes_for_no_actor_is_refused(tmp_path: Path) -> None:
    tiny_model("mistral3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no value of model_type='mistral3': transformers has no causal language"):
        Critic.from_pretrained(tmp_path, backend="transformers", device="cpu")


def test_an_invariant_head_keeps_no_probabilities(model: Path) -> None:
    with pytest.raises(ValueError, match=r"keep_probabilities=True excludes tp_invariant=True; leave one of them out"):
        Actor.from_pretrained(model, device="cpu", keep_probabilities=True, tp_invariant=True)


def test_free_memory_decides_no_bits_of_a_deterministic_model() -> None:
    assert BackendOptions().kept_probabilities == "auto"
    assert BackendOptions(deterministic=True).kept_probabilities is False
    assert BackendOptions(tp_invariant=True).kept_probabilities is False
    assert BackendOptions(keep_probabilities=True, deterministic=True).kept_probabilities is True
    with pytest.raises(ValueError, match=r"keep_probabilities='all' must be False, True or 'auto'"):
        BackendOptions(keep_probabilities="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["parallel", "transformers"])
def test_a_type_that_no_model_computes_in_is_refused(model: Path, backend: str) -> None:
    for dtype in ("bfloat16", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"dtype={dtype!r} must be one of torch.float32, torch.bfloat16"):
            Actor.from_pretrained(model, backend=backend, device="cpu", dtype=dtype)  # type: ignore[arg-type]


def test_a_stored_type_that_no_model_computes_in_is_refused(model: Path, tmp_path: Path) -> None:
    layout = ckpt.layout_for(model)
    ckpt.save_hf(tmp_path / "eight", ckpt.load_hf(model, layout), layout, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"eight is stored in torch.float8_e4m3fn, .* dtype=torch.bfloat16"):
        Actor.from_pretrained(tmp_path / "eight", device="cpu")
    Actor.from_pretrained(tmp_path / "eight", device="cpu", dtype=torch.bfloat16)
