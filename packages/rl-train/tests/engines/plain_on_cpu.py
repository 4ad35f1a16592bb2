"""vLLM on a CPU with weights in the form that they have on a GPU; on a CPU vLLM's kernels keep them in another form.

The worker processes of vLLM import this file, because their extension class stands here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from rl_train.engines.vllm_worker import VllmWorker


def keep(method: object, layer: torch.nn.Module) -> None:
    layer.cpu_linear = torch.nn.functional.linear


linear.UnquantizedLinearMethod.process_weights_after_loading = keep
vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading = keep


class PlainWorker(VllmWorker):
    """A worker that refuses a third weight sync by vLLM's `reload_weights`."""

    reloads = 0

    def _reload(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.reloads += 1
        assert self.reloads < 3, "the weight sync did not copy into the parameters"
        super()._reload(named_tensors)
