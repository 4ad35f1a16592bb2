"""Router replay in transformers' own mixtures: recorded, replayed, under checkpointing and over ranks."""

import copy

import pytest
import torch
from comparing import MIXTURES, OLD, assert_gradients_equal, gradients, recurrent, scalar_loss
from torch.distributed import ProcessGroup

from hf_patches import patch
from hf_patches.testing.tiny_models import (
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence
from parallel_layers.moe import RouterReplay

LENGTHS = (11, 1, 17, 6)
OUTSIDE = {"deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "granitemoe"} if OLD else set()
CHOOSING = [name for name in MIXTURES if name not in OUTSIDE]
GROUPED = "qwen3_moe" if OLD else "deepseek_v3"


def routers(model):
    return {
        number: module
        for number, layer in enumerate(model.base_model.get_decoder().layers)
        for module in layer.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    }


def run(model, replay):
    model.zero_grad()
    sequences = random_sequences(LENGTHS, model.config.get_text_config().vocab_size)
    output = model(packed=PackedSequence.from_sequences(sequences), router_replay=replay)
    scalar_loss(output).backward()
    return output.log_probs.detach(), gradients(model)


def chosen(output):
    return next(x for x in output if not x.is_floating_point())


def watch(model):
    """What each router returns in the next forwards: layer -> experts."""
    seen = {}
    for number, module in routers(model).items():
        module.register_forward_hook(lambda _, __, output, number=number: seen.update({number: chosen(output)}))
    return seen


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", CHOOSING)
def test_recorded_routing_replays(model_type):
    model = tiny_model(model_type)
    plain = copy.deepcopy(model)
    patch(plain)
    log_probs, expected = run(plain, None)
    patched = patch(model, router_replay=True)
    seen = watch(model)
    recorded = RouterReplay()
    assert torch.equal(run(model, recorded)[0], log_probs)
    assert recorded.experts.keys() == routers(model).keys()
    for number, experts in recorded.experts.items():
        assert torch.equal(experts, seen[number])
    replayed, replayed_gradients = run(model, recorded.replaying())
    assert torch.equal(replayed, log_probs)
    assert_gradients_equal(replayed_gradients, expected)
    patched.remove()
    assert all("forward" not in module.__dict__ for module in routers(model).values())


@pytest.mark.families("model_type")
@pytest.mark.parametrize("model_type", CHOOSING)
def test_other_experts_are_weighed_by_the_routers_own_scores(model_type):
    """Experts that the router did not choose, also of groups that it ruled out; a row of -1 leaves it the choice."""
    model = tiny_model(model_type)
    patch(model, router_replay=True)
    recorded = RouterReplay()
    seen = watch(model)
    first, own = run(model, recorded)
    other = {number: (experts + 1) % 4 for number, experts in recorded.experts.items()}
    for experts in other.values():
        experts[5] = -1
    log_probs, moved = run(model, RouterReplay(other, num_experts=4))
    assert not torch.equal(log_probs, first)
    for number, module in routers(model).items():
        expected = other[number].clone()
        expected[5] = seen[number][5]
        assert torch.equal(seen[number], expected)
        name = next(name for name, found in model.named_modules() if found is module)
        gradient = moved[f"{name}.weight"]
        assert gradient.abs().max() > 0
        assert not torch.equal(gradient, own[f"{name}.weight"])
    # Every weight is positive: a score that a mask had set to 0 would not be.
    for module in routers(model).values():
        module.register_forward_hook(
            lambda _, __, output: seen.update(weights=[x for x in output if x.is_floating_point()][-1])
        )
    run(model, RouterReplay(other, num_experts=4))
    assert (seen["weights"] > 0).all()


@pytest.mark.parametrize(
    ("options", "model_type"),
    [
        *(
            (options, "qwen3_moe")
            for options in ({"use_reentrant": False}, {"use_reentrant": True}, "full", "selective")
        ),
        *(pytest.param("full", *name.values, marks=name.marks) for name in recurrent("nemotron_h")),
    ],
    ids=str,
)
def test_the_recompute_of_checkpointing_replays_its_own_batch(options, model_type):
    """Routers of Nemotron-H are in layers without a token mixer."""
    model = tiny_model(model_type)
    patched = patch(model, router_replay=True)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    replays = []
    for shift in (1, 2):
        recorded = RouterReplay()
        run(model, recorded)
        replays.append(
            RouterReplay({n: (experts + shift) % 4 for n, experts in recorded.experts.items()}, num_experts=4)
        )

    def both():
        model.zero_grad()
        packed = PackedSequence.from_sequences(sequences)
        losses = [scalar_loss(model(packed=packed, router_replay=replay)) for replay in replays]
        sum(losses).backward()  # both forwards before the first backward
        return gradients(model)

    expected = both()
    if isinstance(options, str):
        patched.remove()
        patch(model, router_replay=True, recompute=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    assert_gradients_equal(both(), expected)


def sharded(group: ProcessGroup, experts):
    model = tiny_model(GROUPED)
    patch(model, sequence_parallel_group=group, router_replay=True)
    recorded = RouterReplay()
    plain = run(model, recorded)[0]
    log_probs, found = run(model, RouterReplay(experts, num_experts=4))
    return plain, recorded.as_tensor(), log_probs, found


def test_over_ranks_that_share_the_tokens(ranks):
    """35 tokens on 2 ranks: one is padding, whose routing nobody has recorded."""
    model = tiny_model(GROUPED)
    patch(model, router_replay=True)
    recorded = RouterReplay()
    plain = run(model, recorded)[0]
    experts = {number: (chosen + 1) % 4 for number, chosen in recorded.experts.items()}
    expected, expected_gradients = run(model, RouterReplay(experts, num_experts=4))
    results = ranks.run(sharded, experts, world=2, timeout=120)
    for found_plain, table, log_probs, _ in results:
        torch.testing.assert_close(found_plain, plain, atol=1e-5, rtol=0)
        assert torch.equal(table.sort(-1).values, recorded.as_tensor().sort(-1).values)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    summed = {name: sum(found[name] for *_, found in results) for name in expected_gradients}
    assert_gradients_equal(summed, expected_gradients)


@torch.no_grad()
def test_routing_of_decoding_replays_in_scoring():
    """The trainer replays the routing that generation records token by token."""
    model = tiny_model("qwen3_moe")
    patched = patch(model, router_replay=True)
    sequences = random_sequences((5, 3), 61)
    cache, steps = patched.new_cache(2, 8), []
    for part in ([ids[:2] for ids in sequences], [ids[2:] for ids in sequences]):
        steps.append((part, RouterReplay()))
        model(packed=PackedSequence.from_sequences(part), cache=cache, router_replay=steps[-1][1])
    tables = [replay.as_tensor().split([len(ids) for ids in part]) for part, replay in steps]
    joined = torch.cat([torch.cat(pieces) for pieces in zip(*tables, strict=True)])
    recorded = RouterReplay()
    model(packed=PackedSequence.from_sequences(sequences), router_replay=recorded)
    assert torch.equal(recorded.as_tensor(), joined)


@pytest.mark.skipif(not OUTSIDE, reason="every router chooses")
@pytest.mark.parametrize(
    "model_type", sorted(OUTSIDE) or [pytest.param("", marks=pytest.mark.skip(reason="there is no such family"))]
)
def test_experts_that_are_chosen_outside_the_router_are_refused(model_type):
    with pytest.raises(ValueError, match="no routers of experts"):
        patch(tiny_model(model_type), router_replay=True)
    assert not patch(tiny_model(model_type), router_replay=None).routers


def test_what_cannot_be_replayed_is_refused(monkeypatch):
    packed = PackedSequence.from_sequences(random_sequences(LENGTHS, 61))
    with pytest.raises(ValueError, match="no routers of experts"):
        patch(tiny_model("llama"), router_replay=True)
    with pytest.raises(ValueError, match="router_replay=True needs packed=True"):
        patch(tiny_model("mixtral"), router_replay=True, packed=False)
    model = tiny_model("mixtral")
    patched = patch(model)
    with pytest.raises(ValueError, match="patched with router_replay=True"):
        model(packed=packed, router_replay=RouterReplay())
    patched.remove()
    patch(model, router_replay=True)
    with pytest.raises(ValueError, match="no experts to replay for layer 1"):
        model(
            packed=packed,
            router_replay=RouterReplay({0: torch.zeros(35, 2).long() + torch.tensor([0, 1])}, num_experts=4),
        )
    longer, record = PackedSequence.from_sequences(random_sequences([*LENGTHS, 3], 61)), RouterReplay()
    model(packed=longer, router_replay=record)
    with pytest.raises(ValueError, match=r"have shape \[38, 2\], but tokens 0\.\.34 of 35"):
        model(packed=packed, router_replay=record.replaying())
    # Routers of another kind, in a later transformers, say, are found by their code or by the probe.
    other = tiny_model("mixtral")
    router = other.model.layers[0].mlp.gate
    monkeypatch.setattr(type(router), "forward", lambda self, hidden: argsort_router(self, hidden))
    with pytest.raises(ValueError, match="no routers of experts"):
        patch(other, router_replay=True)
    names_topk = lambda self, hidden: argsort_router(self, hidden + 0 * hidden.topk(1).values)  # noqa: E731
    monkeypatch.setattr(type(router), "forward", names_topk)
    with pytest.raises(RuntimeError, match="MixtralTopKRouter chose 0 times by topk"):
        patch(other, router_replay=True)


def argsort_router(router, hidden):
    logits = torch.nn.functional.linear(hidden, router.weight)
    experts = logits.argsort(-1, descending=True)[:, : router.top_k]
    return logits, logits.softmax(-1).gather(-1, experts), experts
