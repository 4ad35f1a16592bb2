"""The fields that a teacher adds to a batch, beside transformers: a model, the base policy, or an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_models import Actor, Batch, LoraOptions, OptimizerOptions
from rl_models.api import WholeBatches
from rl_train.engines.interface import ReadingEngine
from rl_train.engines.reading_server import ReadingServer
from rl_train.engines.teacher_engine import NativeReader, TeacherEngine
from rl_train.loop.models import Models
from rl_train.options.derived import check
from rl_train.options.options import TrainOptions

from ..engines.server import Server

ROWS, COUNTS = [[1, 4, 5, 6], [7, 8, 2, 3, 9], [8, 9, 1]], [2, 3, 1]
HINTS = [[11, 12, 13], [14], [15, 16, 17, 18]]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(model) as server:
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def adapted(model: Path) -> WholeBatches:
    """The model with adapters that have learned something."""
    optimizer = OptimizerOptions(learning_rate=0.1)
    actor = WholeBatches(Actor.from_pretrained(model, device="cpu", optimizer=optimizer, lora=LoraOptions(rank=2)))
    actor.update(Batch.from_sequences(ROWS), lambda inputs: -inputs.log_probs)
    return actor


@pytest.fixture(scope="module", params=["reference", "adapters off", "server", "native"])
def models(request: pytest.FixtureRequest, model: Path, adapted: WholeBatches, server: Server) -> Iterator[Models]:
    """Four ways to the same teacher, the model."""
    if request.param == "reference":
        yield Models(adapted, reference=WholeBatches(Actor.from_pretrained(model, device="cpu")))
    elif request.param == "adapters off":
        yield Models(adapted)
    else:
        readers: dict[str, Callable[[], ReadingEngine]] = {
            "server": lambda: ReadingServer(server.url, 30),
            "native": lambda: NativeReader(model, device="cpu", max_tokens=8),
        }
        with closing(TeacherEngine(readers[request.param], None)) as teacher:
            yield Models(adapted, teacher=teacher)


def options(model: Path, models: Models, **further: Any) -> TrainOptions:
    further |= {"teacher.engine": "http://127.0.0.1:1"} if models.teacher is not None else {"reference": model}
    resolved = TrainOptions(model=model, prompts=Path("p"), reward="r:f", algorithm="on-policy-distillation", **further)
    check(resolved)
    return resolved


@torch.no_grad()
def truth(model: Path, prompts: list[list[int]] | None) -> tuple[Tensor, Tensor]:
    """The states and log-probs that predict each token of a response, from the teacher's prompt; 0 elsewhere."""
    teacher = AutoModelForCausalLM.from_pretrained(model)
    states, log_probs = [], []
    for n, (row, count) in enumerate(zip(ROWS, COUNTS, strict=True)):
        tokens = torch.tensor([*(row[:-count] if prompts is None else prompts[n]), *row[-count:]])
        output = teacher(tokens[None], output_hidden_states=True)
        before = torch.zeros(len(row) - count, teacher.config.hidden_size)
        states.append(torch.cat((before, output.hidden_states[-1][0, -count - 1 : -1])))
        rows = output.logits[0, -count - 1 : -1].log_softmax(-1)
        log_probs.append(torch.cat((torch.zeros(len(row) - count, rows.shape[1]), rows)))
    return torch.cat(states), torch.cat(log_probs)


@pytest.mark.parametrize("prompts", [None, HINTS], ids=["same prompt", "hints"])
@pytest.mark.parametrize("divergence", [None, "reverse_kl"])
def test_a_teacher_reads_the_responses(
    model: Path, models: Models, divergence: str | None, prompts: list[list[int]] | None
) -> None:
    batch = Batch.from_sequences(ROWS, response_lengths=COUNTS)
    states, log_probs = truth(model, prompts)
    mask, drawn = batch.mask, log_probs.gather(1, batch.tokens[:, None])
    # The least likely token of the responses is the first one that is not listed, or the last one that is.
    top_k = int((log_probs > drawn)[mask].sum(1).max()) + (prompts is None)
    further = {"teacher.top_k": top_k} if models.teacher is not None and divergence else {}
    resolved = options(model, models, **further, **({"objective.divergence": divergence} if divergence else {}))
    taught = models.with_reference(batch, resolved, prompts)
    if divergence is None:
        torch.testing.assert_close(taught["reference_log_probs"][mask], drawn[mask, 0], rtol=0, atol=1e-5)
    elif models.teacher is None:
        torch.testing.assert_close(taught["teacher_states"][mask], states[mask], rtol=0, atol=1e-5)
    else:
        ids, values = taught["teacher_ids"], taught["teacher_log_probs"]
        assert ids.shape == (batch.num_tokens, top_k + 1)
        if prompts is not None:
            assert (ids[~mask] == -1).all()
        for place in mask.nonzero().flatten().tolist():
            listed = ids[place][ids[place] >= 0]
            likeliest = log_probs[place].topk(top_k).indices.tolist()
            assert sorted(listed.tolist()) == sorted({*likeliest, int(batch.tokens[place])})
            torch.testing.assert_close(values[place][ids[place] >= 0], log_probs[place][listed], rtol=0, atol=1e-5)
