"""Copies between the shards of two grids: each element once, from a rank that holds it, as in the files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ckpt import Grid, Layout, Place, layout_for, load_hf
from ckpt.layout.pieces import Block, Box, Copy, Piece
from ckpt.transfer import holdings as stock
from ckpt.transfer.holdings import HeldPiece, Holdings, _stacks
from ckpt.transfer.shard_copies import ShardCopy, TargetShards, _joined, plan_copies, weights_to_send

Checkpoints = Callable[..., Path]


def senders(source: Path, layout: Layout, grid: Grid, dp: int, dtype: torch.dtype | None = None) -> list[Holdings]:
    """Return what each rank holds; dp ranks hold equal parts of the rows."""
    parts: list[stock.LocalParts] = []
    for place in grid.places():
        tensors = load_hf(source, layout, place, dtype=dtype)
        for rank in range(dp):
            held: stock.Parts = {}
            for name, tensor in tensors.items():
                rows = -(-len(tensor) // dp)
                part = tensor[rank * rows : (rank + 1) * rows]
                first = min(rank * rows, len(tensor))
                held[name] = part, ((first, first + len(part)), *((0, side) for side in tensor.shape[1:]))
            parts.append([(place, held)])
    described = [stock._describe(part) for part in parts]
    return [stock._merged(described, layout, "", rank).with_tensors(part) for rank, part in enumerate(parts)]


Model = list[tuple[Place, dict[str, Tensor]]]


def receivers(source: Path, layout: Layout, grid: Grid, dtype: torch.dtype | None = None) -> tuple[list[Model], ...]:
    """Return the models of a grid whose values are wrong, and as files have them."""
    right = [[(place, load_hf(source, layout, place, dtype=dtype))] for place in grid.places()]
    wrong = [[(place, {name: torch.full_like(x, 7) for name, x in held.items()}) for place, held in m] for m in right]
    return wrong, right


def carry_out(copies: Sequence[ShardCopy], holdings: Sequence[Holdings], models: Sequence[Model]) -> None:
    for copy in copies:
        buffer = torch.empty(copy.nbytes, dtype=torch.uint8).view(copy.dtype)
        copy.read(holdings[copy.held.rank], buffer)
        copy.write([tensors for _, tensors in models[copy.receiver]], buffer)


def written(copies: Sequence[ShardCopy], models: Sequence[Model]) -> list[list[Mapping[str, Tensor]]]:
    """Return how often each element of the models is written."""
    counts = [[{n: torch.zeros(x.shape, dtype=torch.int) for n, x in held.items()} for _, held in m] for m in models]
    for copy in copies:
        box = tuple(slice(*side) for side in copy.copy.destination_range)
        counts[copy.receiver][copy.chunk][copy.local][box] += 1
    return counts


GRIDS = [
    ("llama", Grid(tp=2), 2, Grid(pp=2)),
    ("qwen2-tied", Grid(pp=2), 1, Grid(tp=2)),
    ("qwen3-moe", Grid(ep=2), 2, Grid(tp=2, ep=2)),
    ("gpt-oss", Grid(tp=2), 1, Grid(ep=2)),
    ("deepseek", Grid(pp=2, ep=2), 1, Grid(tp=2)),
    ("qwen3-moe", Grid(tp=2, pp=2), 1, Grid(pp=2, ep=2)),
]


@pytest.mark.parametrize(
    ("name", "grid", "dp", "engine"),
    [pytest.param(*case, marks=[pytest.mark.slow] if number > 3 else []) for number, case in enumerate(GRIDS)],
    ids=str,
)
def test_each_element_comes_once_and_right(
    name: str, grid: Grid, dp: int, engine: Grid, checkpoint: Checkpoints
) -> None:
    """Two engines; a rank that holds a part sends it to each that needs it, and the ranks share the work."""
    source = checkpoint(name)
    holdings = senders(source, layout_for(source, target="parallel"), grid, dp)
    layout = layout_for(source, target="parallel", vocab_multiple=32)
    models, expected = ([*side, *more] for side, more in zip(*[receivers(source, layout, engine)] * 2, strict=True))
    targets = [TargetShards.of_model(layout, model) for model in models]
    copies = plan_copies(holdings[0], targets)
    assert copies == plan_copies(holdings[-1], targets)
    carry_out([part for copy in copies for part in copy.cut(1000)], holdings, models)
    sent = Counter[int]()
    for copy in copies:
        sent[copy.held.rank] += copy.nbytes
    needed = 0
    for model, right, counts in zip(models, expected, written(copies, models), strict=True):
        for (place, tensors), (_, truth), count in zip(model, right, counts, strict=True):
            for local, tensor in tensors.items():
                once = torch.zeros(tensor.shape, dtype=torch.int)
                for piece in layout.at(place)[local].pieces:
                    if not piece.is_padding:
                        once[tuple(slice(*side) for side in piece.local_range)] = 1
                assert torch.equal(count[local], once), local
                assert torch.equal(tensor.masked_fill(once == 0, 0), truth[local]), local
                needed += int(once.sum()) * tensor.element_size()
    assert sent.total() == needed
    assert len(sent) == len(holdings)
    if grid.pp == 1:
        assert max(sent.values()) <= 1.1 * min(sent.values())


def test_boxes_are_joined_where_both_sides_go_on() -> None:
    """Rows 0 to 8 without 4 and 5 into the rows from 10 on, and two rows elsewhere; both halves of the columns."""
    rows = [((0, 2), 10), ((2, 4), 10), ((6, 8), 10), ((8, 10), 20)]
    boxes = [
        Copy(((a, b), columns), ((a + offset, b + offset), columns))
        for columns in ((0, 3), (3, 5))
        for (a, b), offset in rows
    ]
    held = HeldPiece(0, 0, "w", Piece.whole("w", (10, 5)))
    joined = _joined([ShardCopy(held, 0, 0, "w", box, torch.float32) for box in boxes])
    found = sorted(copy.copy.source_range for copy in joined)
    assert found == [((0, 4), (0, 5)), ((6, 8), (0, 5)), ((8, 10), (0, 5))]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_equal_grids_copy_whole_tensors_and_change_stacks_of_experts(checkpoint: Checkpoints, name: str) -> None:
    """A rank's experts are one copy; a change gets each weight's values and their box in the model."""
    source, grid = checkpoint(name), Grid(ep=2)
    layout = layout_for(source, target="parallel")
    (first, second), (models, expected) = senders(source, layout, grid, 1), receivers(source, layout, grid)
    targets = [TargetShards.of_model(layout, model) for model in models]
    copies = plan_copies(first, targets)
    weights = ("gate_up_proj", "up_proj", "down_proj")
    of_experts = [(c.held.local, c.held.rank, c.receiver) for c in copies if c.local.endswith(weights)]
    assert sorted(of_experts) == sorted(
        (local, rank, rank) for rank, model in enumerate(models) for local in model[0][1] if local.endswith(weights)
    )
    assert len(of_experts) == {"qwen3-moe": 8, "gpt-oss": 12}[name]

    whole, stacks = load_file(source / "model.safetensors"), list[list[str]]()

    def change(names: Sequence[str], box: Box, values: Tensor) -> Tensor:
        stacks.append([*names])
        for name, part in zip(names, values, strict=True):
            assert torch.equal(part, whole[name][tuple(slice(*side) for side in box)]), name
        return values * 2

    changed = [dataclasses.replace(held, change=change) for held in (first, second)]
    plan = plan_copies(changed[0], targets)
    assert plan == copies
    carry_out(plan, changed, models)
    if name == "qwen3-moe":
        assert sum(len(names) == 2 for names in stacks) == 12  # gate, up and down of two layers on two ranks
    parts = [part for copy in plan for part in copy.cut(500)]
    assert len(parts) > 2 * len(plan)
    carry_out(parts, changed, models)
    for model, right in zip(models, expected, strict=True):
        for (_, tensors), (_, truth) in zip(model, right, strict=True):
            assert all(torch.equal(tensor, truth[local] * 2) for local, tensor in tensors.items())


def test_experts_that_are_no_neighbours_are_no_stack() -> None:
    """Experts 0 and 1 are whole, expert 2 is in two halves, expert 3 is whole again; the last rows are padding."""
    whole = ((0, 2), (0, 4))
    rows = [(0, whole), (1, whole), (2, ((0, 1), (0, 4))), (2, ((1, 2), (0, 4))), (3, whole)]
    pieces = [Piece(f"expert {number}", box, ((number, number + 1), *box)) for number, box in rows]
    padding = Piece("expert 0", None, ((4, 5), *whole))
    stacks = list(_stacks(Block((5, 2, 4), (*pieces, padding))))
    assert [names for names, _, _ in stacks] == [["expert 0", "expert 1"], ["expert 2"], ["expert 2"], ["expert 3"]]
    assert stacks[0][1:] == (whole, ((0, 2), *whole))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_values_travel_in_the_narrower_dtype(dtypes: tuple[torch.dtype, torch.dtype], checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout = layout_for(source, target="parallel")
    holdings = senders(source, layout, Grid(), 1, dtypes[0])
    models, _ = receivers(source, layout, Grid(), dtypes[1])
    copies = plan_copies(holdings[0], [TargetShards.of_model(layout, models[0])])
    assert {copy.dtype for copy in copies} == {torch.bfloat16}
    carry_out(copies, holdings, models)
    expected = load_hf(source, layout, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, expected[name].to(dtypes[1])) for name, tensor in models[0][0][1].items())


def test_another_model_is_refused(checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout = layout_for(source, target="parallel")
    tensors = load_hf(source, layout)
    held = weights_to_send([tensors], layout, None, [Place()])
    target = TargetShards.of_model(layout, [(Place(), tensors)])
    norm = "model.norm.weight"
    for shapes, message in (
        ({**target.shapes, norm: (1,)}, r"norm\.weight has the shape \[32\]"),
        ({n: s for n, s in target.shapes.items() if n != norm}, r"norm\.weight is not a tensor of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_copies(held, [dataclasses.replace(target, shapes=shapes)])
    with pytest.raises(ValueError, match=r"does not hold other\.weight \(1 tensors"):
        plan_copies(held, [dataclasses.replace(target, required=target.required | {"other.weight"})])


def test_a_value_head_stays_with_the_senders(checkpoint: Checkpoints) -> None:
    source = checkpoint("llama")
    layout = layout_for(source, target="parallel")
    tensors = load_hf(source, layout)
    target = TargetShards.of_model(layout, [(Place(), tensors)])
    with_head = layout_for(source, target="parallel", role="causal_lm_with_value")
    shapes = {name: block.shape for name, block in with_head.at(Place()).items()}
    assert any(name.startswith("score") for name in shapes)
    held = weights_to_send([{n: torch.zeros(shape) for n, shape in shapes.items()}], with_head, None, [Place()])
    assert {copy.held.local for copy in plan_copies(held, [target])} == tensors.keys()
