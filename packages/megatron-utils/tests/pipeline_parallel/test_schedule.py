"""Schedules: decoding goes on from caches as if the whole had been run again; what does not fit is named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_utils.testing import tiny_config
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.testing import RankPool

# The new tokens of three sequences in each step; a sequence may have none.
STEPS = [(5, 1, 7), (1, 1, 1), (0, 1, 1), (2, 0, 0)]


def following(tokens: list[Tensor], lengths: list[int], multiple_of: int) -> PackedSequence:
    """New tokens, with the positions that follow what their sequences have."""
    packed = PackedSequence.from_sequences(tokens, multiple_of=multiple_of)
    positions = [torch.arange(len(new)) + length for new, length in zip(tokens, lengths, strict=True)]
    positions.append(packed.position_ids[packed.num_tokens - packed.padding :])
    return PackedSequence(packed.input_ids, torch.cat(positions), packed.cu_seqlens, packed.max_seqlen, packed.padding)


def decoded_on(group: ProcessGroup, hf: dict[str, Any], dims: ParallelDims, virtual_stages: int | None) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.pipeline_parallel import pack_micro_batches, run_schedule
    from megatron_utils.testing import cpu_stand_in

    generator = torch.Generator().manual_seed(0)
    totals = torch.tensor(STEPS).sum(0).tolist()
    rows = [torch.randint(0, hf["vocab_size"], (total,), generator=generator) for total in totals]
    with (
        cpu_stand_in(),
        torch.no_grad(),
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid,
    ):
        chunks = build_gpt(hf, grid)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.normal_(0, 0.2, generator=generator)
        multiple_of = chunks[0].tokens_multiple_of
        fillers = pack_micro_batches([], [[]] * (dims.pp - 1 if virtual_stages else 0), multiple_of=multiple_of)
        caches = [chunk.new_cache(len(rows), max(map(len, rows))) for chunk in chunks]

        def logits(packed: PackedSequence, **options: Any) -> Tensor | None:
            outputs = run_schedule(chunks, [packed, *fillers], grid, next_token=True, **options)
            return None if outputs is None else outputs[0]

        lengths = [0] * len(rows)
        for counts in STEPS:
            new = [row[n : n + count] for row, n, count in zip(rows, lengths, counts, strict=True)]
            own = logits(following(new, lengths, multiple_of), caches=caches)
            lengths = [n + count for n, count in zip(lengths, counts, strict=True)]
            whole = [row[:n] for row, n in zip(rows, lengths, strict=True)]
            expected = logits(PackedSequence.from_sequences(whole, multiple_of=multiple_of))
            assert (own is None) == (expected is None) == (not grid.is_last_stage)
            if own is not None and expected is not None:
                asked = torch.tensor(counts) > 0
                torch.testing.assert_close(own[asked], expected[asked], rtol=1e-5, atol=1e-5)


CASES = [
    ("qwen3", ParallelDims(tp=2), None),
    ("llama", ParallelDims(pp=2), 2),
    ("mistral", ParallelDims(), None),
    ("deepseek_v3", ParallelDims(cp=2), None),
]


@pytest.mark.parametrize(("name", "dims", "virtual_stages"), CASES, ids=str)
def test_decoding_goes_on_from_a_cache(
    ranks: RankPool, name: str, dims: ParallelDims, virtual_stages: int | None
) -> None:
    ranks.run(decoded_on, tiny_config(name), dims, virtual_stages, world=dims.world_size)


def mistakes_on(group: ProcessGroup) -> list[str]:
    from megatron_utils import megatron_grid
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in
    from parallel_layers.moe import RouterReplay

    packed = PackedSequence.from_sequences([torch.arange(3)])
    chunk = nn.Linear(2, 2)
    chunk.tokens_multiple_of = 3
    calls: list[tuple[list[PackedSequence], dict[str, Any]]] = [
        ([], {}),
        ([packed] * 3, {}),
        ([packed] * 2, {"labels": [torch.arange(3)]}),
        ([packed, PackedSequence.from_sequences([torch.arange(4)])], {}),
        ([packed] * 2, {"labels": [torch.arange(3), torch.arange(2)]}),
        ([packed] * 2, {"routing": [RouterReplay()]}),
        ([packed] * 2, {"loss": lambda output, _: output.sum()}),
        ([packed] * 2, {"next_token": True, "caches": [None]}),
    ]
    messages = []
    with cpu_stand_in(), megatron_grid(ParallelDims(pp=2), ranks=range(2), virtual_stages=2) as grid:
        for micro_batches, options in calls:
            with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller matches
                run_schedule([chunk, chunk], micro_batches, grid, **options)
            messages.append(str(error.value))
    return messages


def test_mistakes_are_named_on_every_rank(ranks: RankPool) -> None:
    one, other = ranks.run(mistakes_on, world=2)
    assert one == other
    none, uneven, labels, tokens, label, replays, unwrapped, caches = one
    assert none.startswith("no micro-batches; give every rank at least one")
    assert uneven.startswith("3 micro-batches do not divide into groups of pp=2")
    assert labels == "1 labels for 2 micro-batches"
    assert tokens.startswith("micro-batch 1 has 4 tokens, not a multiple of 3")
    assert label == "labels of micro-batch 1 have shape [2], not [3]"
    assert replays == "1 replays for 2 micro-batches"
    assert unwrapped.startswith("a backward needs chunks wrapped by optimizer.wrap_data_parallel")
    assert caches.startswith("1 caches for 2 chunks, and 2 micro-batches that go on from them")
