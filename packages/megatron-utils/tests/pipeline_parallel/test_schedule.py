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
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in
    from parallel_layers.data import pack_micro_batches

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


def built(hf: dict[str, Any], grid: Any, **options: Any) -> list[Any]:
    """A model of the same weights on every rank that holds the same part of it."""
    from megatron_utils.gpt import build_gpt

    chunks = build_gpt(hf, grid, **options)
    generator = torch.Generator().manual_seed(0)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)
    return chunks


def dummies_on(
    group: ProcessGroup, hf: dict[str, Any], dims: ParallelDims, virtual_stages: int | None, role: str
) -> None:
    """Gradients with and without micro-batches that hold no sequence; on the second replica there are no others."""
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in
    from parallel_layers import next_token_labels
    from parallel_layers.data import pack_micro_batches

    rows = [torch.arange(n) % 7 for n in (5, 3, 6, 2)]
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid:
        chunks = built(hf, grid, role=role)

        def gradients(split: list[list[int]]) -> list[Tensor]:
            wrapped = wrap_data_parallel(chunks, grid)
            batches = pack_micro_batches(rows, split, multiple_of=chunks[0].tokens_multiple_of)
            calls = []

            def loss(output: Any, number: int) -> Tensor:
                calls.append(number)
                return output.square().sum() if role == "value" else -output.log_probs.sum()

            labels = None if role == "value" else [next_token_labels(batch) for batch in batches]
            outputs = run_schedule(wrapped, batches, grid, labels=labels, loss=loss)
            rows_of = [output if role == "value" else output.log_probs for output in outputs]
            assert [len(part) for part in rows_of] == [batch.num_tokens for batch in batches]
            assert calls == [n for n, members in enumerate(split) if members and grid.is_last_stage]
            return [parameter.main_grad.clone() for chunk in chunks for parameter in chunk.parameters()]

        full = [[0, 1], [2, 3]]
        expected = gradients(full)
        only_dummies = grid.groups.dp.rank() == 1
        actual = gradients([[]] * 4 if only_dummies else [*full, [], []])
        assert sum(gradient.abs().sum() for gradient in expected) > 1
        for one, other in zip(actual, expected, strict=True):
            # Replicas are averaged.
            torch.testing.assert_close(one, other / dims.dp, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dims", "virtual_stages", "role"),
    [
        ("qwen3", ParallelDims(tp=2), None, "value"),
        pytest.param("qwen3", ParallelDims(pp=2), None, "causal_lm", marks=pytest.mark.slow),
        ("qwen3", ParallelDims(pp=2), 2, "value"),
        ("qwen3_moe", ParallelDims(dp=2, ep=2), None, "causal_lm"),
    ],
    ids=str,
)
def test_a_dummy_weighs_nothing(
    ranks: RankPool, name: str, dims: ParallelDims, virtual_stages: int | None, role: str
) -> None:
    ranks.run(dummies_on, tiny_config(name), dims, virtual_stages, role, world=dims.world_size)


def accumulated_on(group: ProcessGroup, dims: ParallelDims, virtual_stages: int | None, distributed: bool) -> None:
    """Two calls give twice the gradient of one, of every parameter and in the norm; one that fails adds nothing."""
    from megatron_utils import megatron_grid
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in
    from parallel_layers import next_token_labels

    hf = tiny_config("qwen3", tie_word_embeddings=True)
    with cpu_stand_in(), megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid:
        wrapped = wrap_data_parallel(built(hf, grid), grid, distributed=distributed)
        optimizer = Optimizer(wrapped, grid, OptimizerConfig(distributed=distributed))
        rows = [(torch.arange(n) * (3 + grid.groups.dp.rank())) % 37 for n in (8, 4)]
        batches = [PackedSequence.from_sequences([row], multiple_of=dims.tp) for row in rows]

        def gradients(calls: int) -> tuple[float, list[Tensor]]:
            optimizer.zero_grad()
            for _ in range(calls):
                labels = [next_token_labels(batch) for batch in batches]
                run_schedule(wrapped, batches, grid, labels=labels, loss=lambda output, _: -output.log_probs.sum())
            optimizer.inner.prepare_grads()
            parameters = [parameter for chunk in wrapped for parameter in chunk.parameters()]
            return float(optimizer.inner.get_grad_norm()), [parameter.main_grad.clone() for parameter in parameters]

        norm, once = gradients(1)
        norm_of_two, twice = gradients(2)
        assert norm > 1
        assert norm_of_two / norm == pytest.approx(2, rel=1e-6)
        for one, two in zip(once, twice, strict=True):
            torch.testing.assert_close(two, 2 * one, rtol=1e-6, atol=0)
        if dims.pp > 1:
            return  # the first stage would wait

        def wrong(output: Any, number: int) -> Tensor:
            if number == 1:
                raise KeyError("mine")
            return -output.log_probs.sum()

        with pytest.raises(KeyError):
            run_schedule(wrapped, batches, grid, labels=[next_token_labels(batch) for batch in batches], loss=wrong)
        after = [parameter.main_grad for chunk in wrapped for parameter in chunk.parameters()]
        assert all(map(torch.equal, after, twice))


@pytest.mark.parametrize(
    ("dims", "virtual_stages", "distributed"),
    [
        pytest.param(ParallelDims(tp=2), None, False, marks=pytest.mark.slow),
        pytest.param(ParallelDims(pp=2), None, False, marks=pytest.mark.slow),
        (ParallelDims(pp=2), 2, False),
        pytest.param(ParallelDims(dp=2), None, False, marks=pytest.mark.slow),
        (ParallelDims(dp=2), None, True),
    ],
    ids=str,
)
def test_gradients_add_up_over_calls(
    ranks: RankPool, dims: ParallelDims, virtual_stages: int | None, distributed: bool
) -> None:
    ranks.run(accumulated_on, dims, virtual_stages, distributed, world=2)


def outputs_on(group: ProcessGroup, virtual_stages: int | None) -> None:
    """What each stage of two gets of values and of log-probs with and without entropies."""
    from megatron_utils import megatron_grid
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.testing import cpu_stand_in
    from parallel_layers import next_token_labels

    batches = [PackedSequence.from_sequences([torch.arange(n) for n in lengths]) for lengths in ((5, 2), (4,))]
    labels = [next_token_labels(batch) for batch in batches]
    hf = tiny_config("qwen3")
    with cpu_stand_in(), megatron_grid(ParallelDims(pp=2), ranks=range(2), virtual_stages=virtual_stages) as grid:
        source = torch.distributed.get_process_group_ranks(grid.groups.pp)[-1]
        for role, options in (
            ("value", {}),
            ("causal_lm", {"labels": labels}),
            ("causal_lm", {"labels": labels, "entropy": False}),
        ):
            chunks = built(hf, grid, role=role)
            last = run_schedule(chunks, batches, grid, broadcast=False, **options)
            assert (last is not None) == grid.is_last_stage
            everywhere = run_schedule(chunks, batches, grid, **options)
            assert everywhere is not None
            for number, (batch, output) in enumerate(zip(batches, everywhere, strict=True)):
                parts = (output,) if isinstance(output, Tensor) else output
                assert [part is not None for part in parts] == [True, options.get("entropy", True)][: len(parts)]
                assert len(parts) == (1 if role == "value" else 2)
                for place, part in enumerate(part for part in parts if part is not None):
                    assert part.dtype == torch.float32
                    # What the last stage has when nothing is sent.
                    own = torch.empty(batch.num_tokens)
                    if last is not None:
                        own = last[number] if role == "value" else last[number][place]
                    torch.distributed.broadcast(own, source, group=grid.groups.pp)
                    assert torch.equal(part, own)


@pytest.mark.parametrize("virtual_stages", [None, 2])
def test_outputs_go_to_every_stage_that_wants_them(ranks: RankPool, virtual_stages: int | None) -> None:
    ranks.run(outputs_on, virtual_stages, world=2)


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
    assert caches.startswith("1 caches for 2 chunks, and 2 micro-batches that continue them")
