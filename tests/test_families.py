"""docs/what-runs-where.md is made from the parity tests; an actor of every cell scores and generates like transformers.

A cell names the forms of parallelism of which some parity case has the family, and a backend offers no other.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from tests import test_megatron_checkpoints, test_parity_models
from tests.parity_record import CORES, Case, columns, recorded
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from ckpt.layout import FAMILIES as LAYOUTS
from hf_patches import FAMILIES as HUB_FAMILIES, supported_model_types
from hf_patches.testing import one_by_one, random_sequences
from megatron_utils.gpt import FAMILIES as MEGATRON_FAMILIES
from megatron_utils.testing import cpu_stand_in
from parallel_layers import ParallelDims
from parallel_layers.model import FAMILIES
from parallel_layers.testing import RankPool
from rl_models import Actor, Batch, TokenLogProbs
from rl_models.backends import BACKENDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "what-runs-where.md"
CLAIMED: dict[str, Callable[[str], bool]] = {
    "parallel": FAMILIES.__contains__,
    "megatron": MEGATRON_FAMILIES.__contains__,
    "transformers": lambda family: family in supported_model_types(),
}
ALL = sorted({*FAMILIES, *MEGATRON_FAMILIES, *supported_model_types()})
CELLS = [(family, backend) for backend, claimed in CLAIMED.items() for family in ALL if claimed(family)]
BACKENDS_OF = {family: [backend for name, backend in CELLS if name == family] for family, _ in CELLS}
# The weights of each family go in and out of one of its backends in a plain run, each in turn.
WEIGHTS_ON = {family: found[number % len(found)] for number, (family, found) in enumerate(BACKENDS_OF.items())}


def has_experts(family: str) -> bool:
    return family in LAYOUTS and LAYOUTS[family].has_experts


def is_recurrent(family: str) -> bool:
    """Whether layers have a state, which the caches of `backend="transformers"` do not hold."""
    return family in LAYOUTS and LAYOUTS[family].has_linear_attention


def is_sharded_by_plans(family: str) -> bool:
    """Whether `backend="transformers"` has tp, which hf-patches' proof refuses to Apertus and to models with images."""
    return HUB_FAMILIES[family] is None and family != "apertus"


# `backend="transformers"` scores on these grids below. The other grids have log-probs and every gradient.
HUB_GRIDS = {
    "dp2-cp2": ParallelDims(dp=2, cp=2),
    "tp2": ParallelDims(tp=2),
    "tp2-ep2": ParallelDims(tp=2, ep=2),
}
# The rows of the vocabulary, and the heads of Gemma 4's global layers, that two ranks can share.
EVEN: dict[str, dict[str, int]] = {"gemma4_text": {"vocab_size": 64, "num_global_key_value_heads": 2}}
HUB_CASES = [
    pytest.param(
        family, grid, marks=() if (family, grid) == ("llama", "tp2") else pytest.mark.slow, id=f"{family}-{grid}"
    )
    for family, backend in CELLS
    if backend == "transformers"
    for grid in ("dp2-cp2", "tp2-ep2" if has_experts(family) else "tp2")[: 1 + is_sharded_by_plans(family)]
]


def _parity_cases() -> Iterator[tuple[Case, tuple[str, ParallelDims]]]:
    """Yield each parity case with its family and its grid."""
    for name, grid in (case.values for case in test_parity_models.CASES):
        config = getattr(transformers, f"{test_parity_models.MODELS[name][0]}Config")
        yield ("parallel", name, grid), (config.model_type, test_parity_models.PLACES[grid].dims)
    for name, grid in (case.values for case in test_megatron_checkpoints.CASES):
        family = test_megatron_checkpoints.MODELS[name]["model_type"]
        for column in columns("megatron"):
            yield (column, name, grid), (family, test_megatron_checkpoints.GRIDS[grid][0])
    for family, grid in (case.values for case in HUB_CASES):
        yield ("transformers", family, grid), (family, HUB_GRIDS[grid])


PARITY_CASES = dict(_parity_cases())


def test_every_parity_case_has_passed() -> None:
    """The record names the cases that there are."""
    lacking, gone = PARITY_CASES.keys() - recorded(), recorded() - PARITY_CASES.keys()
    run = "uv run pytest --slow --record tests/test_{parity_models,megatron_checkpoints,families}.py"
    run += ", for Megatron-Core with each of its versions"
    assert not lacking, (
        f"these parity cases have not passed; run them by `{run}` (-k chooses some) and commit the record"
    )
    assert not gone, f"the record tests/parity.json has cases that do not exist any more; `{run} -k llama` drops them"


@cache
def proven() -> Mapping[tuple[str, str], set[str]]:
    """(family, column) -> the forms of parallelism of the parity cases that have passed."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for case in PARITY_CASES.keys() & recorded():
        family, dims = PARITY_CASES[case]
        found[family, case[0]] |= {axis for axis, size in vars(dims).items() if size > 1}
    return found


def offered(family: str, backend: str) -> list[str]:
    """The forms of parallelism that a backend offers; experts are divided where there are some."""
    # How dp is divided into replicas does not depend on the family.
    lacks = {"replicate"} if has_experts(family) else {"replicate", "ep"}
    if backend == "transformers" and not is_sharded_by_plans(family):
        lacks |= {"tp", "ep"}
    return [axis for axis in BACKENDS[backend].axes if axis not in lacks]


def axes(family: str, backend: str, column: str) -> str:
    """The forms of parallelism of a cell."""
    return ", ".join(axis for axis in offered(family, backend) if axis in proven()[family, column])


def test_every_form_of_parallelism_that_is_offered_has_passed_a_parity_case() -> None:
    lacking = {
        (family, column): {*offered(family, backend)} - proven()[family, column]
        for family, backend in CELLS
        for column in columns(backend)
    }
    assert not {cell: forms for cell, forms in lacking.items() if forms}


def test_every_supported_version_of_megatron_core_has_a_column() -> None:
    bounds = (PAGE.parent.parent / "packages" / "megatron-utils" / "pyproject.toml").read_text()
    first, end = re.search(r"megatron-core>=0\.(\d+),<0\.(\d+)", bounds).groups()  # type: ignore[union-attr]
    assert tuple(f"0.{minor}" for minor in range(int(first), int(end))) == CORES


def table() -> str:
    """A row for each family that some backend has; a cell says which forms of parallelism it has there."""
    assert set(CLAIMED) == set(BACKENDS)
    cells = [(name, column) for name in BACKENDS for column in columns(name)]
    heads = ["family", *(f"`{column}`" for _, column in cells)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for family in sorted({family for family, _ in CELLS}):
        rows = [axes(family, *cell) if (family, cell[0]) in CELLS else "-" for cell in cells]
        lines.append(f"| {family} | {' | '.join(rows)} |")
    return "\n".join(lines) + "\n"


def test_table_is_the_codes() -> None:
    printed = re.search(r"<!-- families: begin -->\n(.*?)<!-- families: end -->", PAGE.read_text(), re.DOTALL)
    assert printed
    assert printed[1] == table(), "replace the table in docs/what-runs-where.md by the one above"


@contextlib.contextmanager
def what_it_needs(backend: str) -> Iterator[None]:
    """Megatron-Core wants a process group, and on a CPU its stand-in."""
    if backend != "megatron":
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cpu_stand_in():
            yield
    finally:
        dist.destroy_process_group()


# Families that tests/test_parity_models.py scores in a plain run on `backend="parallel"`; llama is scored here, too.
SCORED = {
    PARITY_CASES["parallel", name, grid][0] for name, grid in test_parity_models.PLAIN if not name.endswith("-value")
} - {"llama"}


def scored_here(family: str, number: int) -> str | None:
    """Return the backend of a family that a plain run scores here: each in turn, another than has its weights."""
    found = [backend for backend in BACKENDS_OF[family] if backend != "parallel" or family not in SCORED]
    others = [backend for backend in found if backend != WEIGHTS_ON[family]] or found
    return others[number % len(others)] if others else None


SCORED_HERE = {(family, scored_here(family, number)) for number, family in enumerate(BACKENDS_OF)}


@pytest.mark.families("family")
@pytest.mark.parametrize(
    ("family", "backend"),
    [pytest.param(*cell, marks=() if cell in SCORED_HERE else pytest.mark.slow) for cell in CELLS],
)
def test_an_actor_of_every_cell_scores_like_transformers(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, backend: str
) -> None:
    model, path = saved(family)
    sequences = random_sequences((7, 1, 12), model.config.get_text_config().vocab_size)
    batch = Batch.from_sequences(sequences)
    with torch.no_grad():
        expected = one_by_one(model, sequences)
    with what_it_needs(backend):
        scored = Actor.from_pretrained(path, backend=backend, device="cpu").log_probs(batch)
    # transformers scores the next token; an actor's batch holds each token's own.
    starts = batch.first
    torch.testing.assert_close(scored.log_probs[~starts], expected.log_probs[(~starts).roll(-1)], rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.entropy[~starts], expected.entropy[(~starts).roll(-1)], rtol=0, atol=3e-5)


def test_what_recurrent_layers_lack_is_refused(saved: Callable[[str], tuple[PreTrainedModel, Path]]) -> None:
    _, path = saved("qwen3_5_text")
    options = {"backend": "transformers", "device": "cpu"}
    with pytest.raises(ValueError, match=r"share_prefixes=True does not go with the recurrent layers of Qwen3_5For"):
        Actor.from_pretrained(path, share_prefixes=True, **options)
    with pytest.raises(ValueError, match="a cache of keys and values lacks the state of this model's recurrent layers"):
        Actor.from_pretrained(path, **options).generate(random_sequences((3,), 61), max_new_tokens=2)


def score_part(
    group: ProcessGroup, path: Path, sequences: list[Tensor], dims: ParallelDims
) -> tuple[list[int], TokenLogProbs]:
    """The sequences of this data-parallel rank and their scores."""
    mesh = dims.build_mesh("cpu", list(range(dims.world_size)))
    options = {"backend": "transformers", "dims": dims, "mesh": mesh, "device": "cpu"}
    actor, batch = Actor.from_pretrained(path, **options), Batch.from_sequences(sequences)
    indices = list(range(actor.grid.rank("dp"), len(batch), dims.dp))
    return indices, actor.log_probs(batch.select(indices))


@pytest.mark.parity("transformers")
@pytest.mark.parametrize(("name", "grid"), HUB_CASES)
def test_a_patched_actor_on_a_grid_scores_like_transformers(
    ranks: RankPool, saved: Callable[..., tuple[PreTrainedModel, Path]], name: str, grid: str
) -> None:
    dims = HUB_GRIDS[grid]
    model, path = saved(name, **EVEN.get(name, {"vocab_size": 64})) if dims.tp > 1 else saved(name)
    sequences = random_sequences((7, 2, 12, 5), model.config.get_text_config().vocab_size)
    batch = Batch.from_sequences(sequences)
    with torch.no_grad():
        expected = one_by_one(model, sequences)
    for indices, scored in ranks.run(score_part, path, sequences, dims, world=dims.world_size, timeout=120):
        where = batch.positions(indices)
        where, own = where[~batch.first[where]], ~batch.first[where]
        torch.testing.assert_close(scored.log_probs[own], expected.log_probs[where - 1], rtol=0, atol=1e-5)
        torch.testing.assert_close(scored.entropy[own], expected.entropy[where - 1], rtol=0, atol=3e-5)


def refuse_to_shard(group: ProcessGroup, path: Path) -> None:
    dims = ParallelDims(tp=2)
    mesh = dims.build_mesh("cpu", [0, 1])
    with pytest.raises(ValueError, match=r"tp=2 with transformers .* refuses|no proof of tensor parallelism of models"):
        Actor.from_pretrained(path, backend="transformers", dims=dims, mesh=mesh, device="cpu")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("apertus", "qwen2_vl") else pytest.mark.slow)
        for family in HUB_FAMILIES
        if not is_sharded_by_plans(family)
    ],
)
def test_a_cell_without_tp_refuses_it(
    ranks: RankPool, saved: Callable[..., tuple[PreTrainedModel, Path]], family: str
) -> None:
    ranks.run(refuse_to_shard, saved(family, vocab_size=64)[1], world=2, timeout=120)


# A cache depends on the kind of attention, and Megatron-Core's caches are the same for all families with heads.
SLOW = [(family, "megatron") for family in MEGATRON_FAMILIES if family not in ("llama", "deepseek_v3")]
# hf-patches' own tests decode in every family. Here: latents; sinks; soft-caps; heads by layer; images' places.
SLOW += [
    (family, "transformers")
    for family in supported_model_types()
    if family not in ("llama", "deepseek_v3", "gpt_oss", "gemma2", "gemma4_text", "qwen2_vl", "kimi_k25")
]
# On the native layers: latents; heads by layer; sinks and windows; soft-caps and scales; layers without rotation;
# linear attention.
SLOW += [
    (family, "parallel")
    for family in FAMILIES
    if family not in ("llama", "deepseek_v3", "gpt_oss", "gemma2", "gemma4_text", "smollm3", "qwen2", "qwen3_next")
]


@pytest.mark.families("family")
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if cell in SLOW else ())
        for cell in CELLS
        if cell[1] == "parallel" or not is_recurrent(cell[0])
    ],
)
def test_an_actor_of_every_cell_generates_like_transformers(
    saved: Callable[[str], tuple[PreTrainedModel, Path]], family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token at a time with a KV cache: as transformers would draw, which sees all at once."""
    model, path = saved(family)
    if family == "kimi_k25" and backend != "transformers":
        # transformers alone embeds token 0 in place of a placeholder that was drawn.
        for name in ("image_token_id", "video_token_id"):
            monkeypatch.setattr(model.config, name, -1)
    prompts = random_sequences((7, 1, 12), model.config.get_text_config().vocab_size)
    with what_it_needs(backend):
        actor = Actor.from_pretrained(path, backend=backend, device="cpu")
        greedy = actor.generate(prompts, max_new_tokens=6, temperature=0.0)
        drawn = actor.generate(prompts, max_new_tokens=6, n=2, temperature=0.8, seed=1)
        scored = actor.log_probs(drawn, temperature=0.8).log_probs
    torch.testing.assert_close(drawn["log_probs"], torch.where(drawn.mask, scored, 0), rtol=0, atol=1e-5)
    for batch, temperature in ((greedy, 1.0), (drawn, 0.8)):
        n = len(batch) // len(prompts)
        for number, (tokens, log_probs) in enumerate(zip(batch.split(), batch.split("log_probs"), strict=True)):
            start = len(prompts[number // n])
            assert torch.equal(tokens[:start], prompts[number // n])
            assert len(tokens) == start + 6
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, start - 1 : -1].float()
            own = tokens[start:, None]
            expected = (logits / temperature).log_softmax(-1).gather(1, own)[:, 0]
            torch.testing.assert_close(log_probs[start:], expected, rtol=0, atol=1e-5)
            if batch is greedy:
                # The likeliest; of two that are as likely, either.
                assert (logits.gather(1, own)[:, 0] >= logits.max(-1).values - 1e-5).all()
