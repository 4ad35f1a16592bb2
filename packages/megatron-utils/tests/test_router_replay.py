"""Router replay: recorded on one grid, replayed on another, forward and under recompute; nothing global."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_utils.testing import tiny_config
from parallel_layers import PackedSequence, ParallelDims, next_token_labels
from parallel_layers.moe import RouterReplay
from parallel_layers.testing import RankPool

HF = tiny_config("qwen3_moe", num_experts=6, mlp_only_layers=[1])
LAYERS = [0, 2, 3]
LENGTHS = [5, 7, 3, 9]
MICRO_BATCHES = [[0, 1], [2, 3]]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def chosen(seed: int) -> list[Tensor]:
    """Routing that no router would choose: `[L_i, M, k]` for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(length * len(LAYERS))]).view(
            length, len(LAYERS), 2
        )
        for length in LENGTHS
    ]


def run_on(
    group: ProcessGroup,
    dims: ParallelDims,
    routing: list[Tensor] | None,
    virtual_stages: int | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], float]:
    """(log-probs per sequence, recorded routing per sequence, gradient norm) of a model that depends on no grid."""
    from transformers_weights import load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.router_replay import collect_routing, make_replay, moe_layers
    from megatron_utils.testing import device_of
    from parallel_layers.data import restore_order

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, HF["vocab_size"], (n,), generator=generator) for n in LENGTHS]
    with (
        device_of(group) as device,
        megatron_grid(dims, ranks=range(dims.world_size), virtual_stages=virtual_stages) as grid,
    ):
        chunks = build_gpt(HF, grid, **options)
        load_transformers_state(chunks, state())
        wrapped = wrap_data_parallel(chunks, grid)
        sequences = [row.to(device) for row in rows]
        packed = [
            PackedSequence.from_sequences([sequences[i] for i in members], multiple_of=dims.tp * 2 * dims.cp)
            for members in MICRO_BATCHES
        ]
        labels = [next_token_labels(part) for part in packed]
        config = chunks[0].config
        assert moe_layers(config) == LAYERS
        if routing is None:
            replays = [RouterReplay() for _ in packed]
        else:
            replays = [
                make_replay([routing[i] for i in members], part, LAYERS, num_experts=6)
                for members, part in zip(MICRO_BATCHES, packed, strict=True)
            ]

        def loss(output: Any, _: int) -> Tensor:
            return -output.log_probs.sum()

        outputs = run_schedule(wrapped, packed, grid, labels=labels, loss=loss, routing=replays)
        log_probs = restore_order(
            [part.split(o.log_probs) for part, o in zip(packed, outputs, strict=True)], MICRO_BATCHES
        )
        recorded = restore_order(collect_routing(replays, packed, config, grid), MICRO_BATCHES)
        routers = [p for chunk in chunks for n, p in chunk.named_parameters() if "router" in n]
        assert all(router.main_grad.abs().sum() > 0 for router in routers)
        from megatron.core.transformer.moe.router import TopKRouter

        assert all(
            module.router_replay is None
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, TopKRouter)
        )
        norm = Optimizer(wrapped, grid, OptimizerConfig()).step().grad_norm
    return [x.cpu() for x in log_probs], [x.cpu() for x in recorded], norm


def state() -> dict[str, Tensor]:
    """The weights of a transformers model of this config."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**HF))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model.state_dict()


GRIDS = [
    (ParallelDims(tp=2), None, {}),
    (ParallelDims(tp=2), None, FULL),
    (ParallelDims(pp=2), None, FULL),
    (ParallelDims(pp=2), 2, SELECTIVE),
    (ParallelDims(dp=2, ep=2), None, {}),
    (ParallelDims(pp=2), None, {"layers_per_stage": [1, 3]}),
    # the second of four stages has no mixture
    (ParallelDims(pp=4), None, {}),
    (ParallelDims(cp=2), None, FULL),
    (ParallelDims(cp=2, tp=2), None, {"cp_comm_type": "a2a"}),
]


PLAIN = GRIDS[3], GRIDS[4]


@pytest.mark.parametrize(
    ("dims", "virtual_stages", "options"),
    [case if case in PLAIN else pytest.param(*case, marks=pytest.mark.slow) for case in GRIDS],
)
def test_routing_replays_on_any_grid(
    ranks: RankPool, dims: ParallelDims, virtual_stages: int | None, options: dict[str, Any]
) -> None:
    replays_on_a_grid(ranks, dims, virtual_stages, options, tolerance=1e-5)


@pytest.mark.parametrize(
    ("dims", "virtual_stages", "options"),
    [pytest.param(*case, marks=pytest.mark.gpu(case[0].world_size)) for case in GRIDS],
)
def test_routing_replays_on_gpus(
    four_nccl_ranks: RankPool, dims: ParallelDims, virtual_stages: int | None, options: dict[str, Any]
) -> None:
    replays_on_a_grid(four_nccl_ranks, dims, virtual_stages, options, tolerance=1e-4)


@cache
def on_one_rank(ranks: RankPool) -> list[tuple[list[Tensor], list[Tensor], float]]:
    """What a single rank computes, with the experts of `chosen(1)` and with those of its routers."""
    return [ranks.run(run_on, ParallelDims(), routing, world=1)[0] for routing in (chosen(1), None)]


def replays_on_a_grid(
    ranks: RankPool, dims: ParallelDims, virtual_stages: int | None, options: dict[str, Any], *, tolerance: float
) -> None:
    forced = chosen(1)
    (log_probs, recorded, norm), (free, natural, _) = on_one_rank(ranks)
    # The forced choice is really followed, and is not what the router would do.
    assert not torch.allclose(log_probs[0], free[0])
    for one, other in zip(recorded, forced, strict=True):
        assert one.dtype == torch.int16
        assert torch.equal(one.long(), other)
    for log, table, gradient_norm in ranks.run(run_on, dims, forced, virtual_stages, world=dims.world_size, **options):
        for one, other in zip(log, log_probs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(one, other) for one, other in zip(table, recorded, strict=True))
        assert gradient_norm == pytest.approx(norm, rel=tolerance)
    # Recorded on that grid, the natural choice is the one of a single rank, in the caller's order.
    for _, table, _ in ranks.run(run_on, dims, None, virtual_stages, world=dims.world_size, **options):
        assert all(torch.equal(one.sort(-1)[0], other.sort(-1)[0]) for one, other in zip(table, natural, strict=True))


def packed_batch() -> PackedSequence:
    return PackedSequence.from_sequences([torch.arange(3), torch.arange(2)], multiple_of=8)


def test_padding_gets_distinct_balanced_experts() -> None:
    from megatron_utils.router_replay import make_replay

    routing = [torch.tensor([[[0, 1]]]).repeat(n, 1, 1) for n in (3, 2)]
    replay = make_replay(routing, packed_batch(), [4], num_experts=3)
    padding = replay.experts[4][5:]
    assert padding.tolist() == [[0, 1], [2, 0], [1, 2]]


def interleaved_on(group: ProcessGroup) -> list[Tensor]:
    """Which experts this rank's layers gave each token, of two micro-batches of very different lengths."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.pipeline_parallel import run_schedule
    from megatron_utils.router_replay import make_replay
    from megatron_utils.testing import cpu_stand_in

    given = []
    with cpu_stand_in(), megatron_grid(ParallelDims(pp=2), ranks=range(2), virtual_stages=2, seed=0) as grid:
        chunks = build_gpt(HF, grid)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.normal_(0, 0.2)
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(lambda *call: given.append(call[2][1]))
        packed = [PackedSequence.from_sequences([torch.arange(n)]) for n in (15, 3)]
        routing = [torch.tensor([4, 5]).expand(part.num_tokens, len(LAYERS), 2) for part in packed]
        replays = [
            make_replay([table], part, LAYERS, num_experts=6) for table, part in zip(routing, packed, strict=True)
        ]
        labels = [next_token_labels(part) for part in packed]
        run_schedule(chunks, packed, grid, labels=labels, routing=replays)
    return given


def test_padding_for_interleaving_burdens_no_expert(ranks: RankPool) -> None:
    loads = [table.sum(0).tolist() for given in ranks.run(interleaved_on, world=2) for table in given]
    # 15 tokens of the first; 3 of the second, and 12 of padding spread over all.
    assert sorted(map(tuple, loads)) == sorted([(0, 0, 0, 0, 15, 15), (4, 4, 4, 4, 7, 7)] * len(LAYERS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[1].__setitem__((1, 0, 0), -1), "routing of sequence 1 is missing at layer 4, token 1"),
        (
            lambda r: r[0].__setitem__((2, 0, 1), 600),
            r"layer 4, token 2: experts \[0, 600\] name an expert outside 0\.\.511",
        ),
        (lambda r: r[1].__setitem__((0, 0, 1), 0), r"layer 4, token 3: experts \[0, 0\] name an expert twice"),
        (lambda r: r.pop(), "routing of 1 sequences for a batch of 2"),
        (lambda r: r.__setitem__(1, r[1][:1]), r"routing of sequence 1 has shape \[1, 1, 2\], not \[2, 1, 2\]"),
    ],
)
def test_bad_rows_are_named(change: Any, message: str) -> None:
    from megatron_utils.router_replay import make_replay

    routing = [torch.tensor([[[0, 511]]], dtype=torch.int16).repeat(n, 1, 1) for n in (3, 2)]
    change(routing)
    with pytest.raises(ValueError, match=message):
        make_replay(routing, packed_batch(), [4], num_experts=512)


def sessions_on(group: ProcessGroup) -> None:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay as Global
    from transformers_weights import load_transformers_state

    from megatron_utils import megatron_grid
    from megatron_utils.gpt import build_gpt
    from megatron_utils.router_replay import router_replay
    from megatron_utils.testing import cpu_stand_in

    packed = PackedSequence.from_sequences([torch.arange(5)])
    with cpu_stand_in(), megatron_grid(ParallelDims(), ranks=[0]) as grid:
        one, other = build_gpt(HF, grid)[0], build_gpt(HF, grid)[0]
        for model in (one, other):
            load_transformers_state([model], state())
        free = one(packed)
        forced = RouterReplay({layer: torch.tensor([[4, 5]] * 5) for layer in LAYERS}, num_experts=6)
        recording = RouterReplay()
        with router_replay([one]) as first, router_replay([other]) as second:
            with first.micro_batch(forced), second.micro_batch(recording):
                assert not torch.allclose(one(packed), free)
                # the other model routes as it likes
                assert torch.equal(other(packed), free)
            # outside a micro-batch the router is its own
            assert torch.equal(one(packed), free)
            with pytest.raises(RuntimeError, match="already running"), first.micro_batch(forced):
                with first.micro_batch(forced):
                    pass
        assert recording.experts.keys() == set(LAYERS)
        # Megatron-Core's own lists every router of the process.
        assert not Global.global_router_replay_instances
        with pytest.raises(KeyError), router_replay([one]):
            raise KeyError
        for option, value in (("moe_router_fusion", True), ("moe_router_load_balancing_type", "sinkhorn")):
            blind = build_gpt(HF, grid, **{option: value})
            with pytest.raises(ValueError, match=f"{option}={value!r}: this router"), router_replay(blind):
                pass
        assert all(m.router_replay is None for m in one.modules() if isinstance(m, TopKRouter))
        partial = RouterReplay({0: torch.tensor([[4, 5]] * 5)}, num_experts=6)
        with router_replay([one]) as session, session.micro_batch(partial):
            with pytest.raises(ValueError, match="no experts to replay for layer 2"):
                one(packed)
        with pytest.raises(ValueError, match="no mixture-of-experts layer"), router_replay([torch.nn.Linear(2, 2)]):
            pass


def test_two_models_do_not_disturb_each_other(ranks: RankPool) -> None:
    ranks.run(sessions_on, world=1)
