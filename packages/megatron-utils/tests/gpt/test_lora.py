"""Adapters on Megatron-Core's linears compute what their product does in the weights; PEFT: the top-level tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron_utils.testing import cpu_stand_in, tiny_config
from parallel_layers import PackedSequence, ParallelDims
from parallel_layers.model import LoraOptions, without_adapters
from parallel_layers.testing import RankPool

CONFIG = tiny_config("qwen2")
LAYER = "decoder.layers.1."
OPTIONS = LoraOptions(rank=3, alpha=6)


def adapted_on(group: ProcessGroup, sequence_parallel: bool | None, out: Path) -> None:
    from megatron_utils import megatron_grid
    from megatron_utils.dist_checkpointing import save_checkpoint
    from megatron_utils.gpt import build_gpt
    from megatron_utils.gpt.lora import Part, add_lora_
    from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel

    with cpu_stand_in(), megatron_grid(ParallelDims(tp=2), ranks=[0, 1]) as grid:
        (chunk,) = build_gpt(CONFIG, grid, sequence_parallel=sequence_parallel)
        for name, parameter in chunk.named_parameters():
            torch.manual_seed(len(name) + group.rank() * hasattr(parameter, "tensor_model_parallel"))
            parameter.data.normal_(0, 0.3)
        packed = PackedSequence.from_sequences([torch.arange(9), torch.arange(5)], multiple_of=2)
        base = chunk(packed)
        layer = chunk.decoder.layers[1]
        rows, hidden = layer.mlp.linear_fc1.weight.shape
        # Rows by turns of two parts, of which the first has the adapter.
        parts: dict[str, list[Part]] = {
            f"{LAYER}mlp.linear_fc1.weight": [Part("one", [(0, 4), (8, rows)]), Part("", [(4, 8)])],
            f"{LAYER}mlp.linear_fc2.weight": [Part("two", [(0, hidden)])],
        }
        with pytest.raises(
            ValueError, match=r"^embedding.word_embeddings.weight is of a VocabParallelEmbedding; .*other"
        ):
            add_lora_(chunk, OPTIONS, {"embedding.word_embeddings.weight": []})
        add_lora_(chunk, OPTIONS, parts)
        named = dict(chunk.named_parameters())
        assert {name for name, p in named.items() if p.requires_grad} == {
            f"{LAYER}mlp.linear_fc{n}.lora.{factor}" for n in (1, 2) for factor in "AB"
        }
        torch.testing.assert_close(chunk(packed), base, rtol=1e-5, atol=1e-5)
        torch.manual_seed(0)
        whole = torch.randn(hidden, 3)
        layer.mlp.linear_fc2.lora.B.data.copy_(whole)
        layer.mlp.linear_fc1.lora.B.data.normal_()
        learned = chunk(packed)
        with without_adapters(chunk):
            torch.testing.assert_close(chunk(packed), base, rtol=1e-5, atol=1e-5)
            for linear in (layer.mlp.linear_fc1, layer.mlp.linear_fc2):
                delta = OPTIONS.scaling * linear.lora.B @ linear.lora.A
                if linear is layer.mlp.linear_fc1:
                    delta = torch.cat([delta[:4], delta.new_zeros(4, hidden), delta[4:]])
                linear.weight.data += delta
            torch.testing.assert_close(chunk(packed), learned, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(learned, base, atol=1e-2)
        optimizer = Optimizer(wrap_data_parallel([chunk], grid), grid, OptimizerConfig())
        with pytest.raises(ValueError, match=r"the model has low-rank adapters, which rl-models saves"):
            save_checkpoint(out, 1, optimizer, grid)
    assert not out.exists()


@pytest.mark.parametrize("sequence_parallel", [None, False])
def test_adapters_compute_what_their_product_does(
    ranks: RankPool, sequence_parallel: bool | None, tmp_path: Path
) -> None:
    ranks.run(adapted_on, sequence_parallel, tmp_path / "checkpoints", world=2)
