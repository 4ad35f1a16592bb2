"""A rollout engine: transformers' own `generate`, on a copy of the policy's weights."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from parallel_models import SamplingOptions
from rl_models import Batch
from rl_train.options import TrainOptions

Prompts = Sequence[Tensor | Sequence[int]]


class TransformersEngine:
    """A `RolloutEngine` for a run on one rank."""

    def __init__(self, folder: Path, version: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.version = version

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: SamplingOptions) -> Batch:
        """Draw `sampling.n` responses to each prompt, with the log-prob of each of their tokens."""
        torch.manual_seed(sampling.seed)
        sequences: list[Tensor] = []
        log_probs: list[Tensor] = []
        lengths: list[int] = []
        for prompt in prompts:
            ids = torch.as_tensor(prompt).expand(sampling.n, -1)
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or 1.0,
                top_k=sampling.top_k or 0,
                top_p=sampling.top_p,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=list(sampling.stop_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            # The logits before top-k and top-p, at the temperature of sampling.
            drawn = (torch.stack(found.logits, 1) / (sampling.temperature or 1.0)).log_softmax(-1)
            for row, of_row in zip(found.sequences, drawn, strict=True):
                response = row[ids.shape[1] :]
                ends = [place for place, token in enumerate(response.tolist()) if token in sampling.stop_ids]
                length = ends[0] + 1 if ends else len(response)
                response = response[:length]
                sequences.append(row[: ids.shape[1] + length])
                of_response = of_row[:length].gather(-1, response[:, None])[:, 0]
                log_probs.append(torch.cat([torch.zeros(ids.shape[1]), of_response]))
                lengths.append(length)
        return Batch.from_sequences(sequences, response_lengths=lengths, log_probs=log_probs)

    def generate_async(self, prompts: Prompts, sampling: SamplingOptions) -> Future[Batch]:
        """Draw at once; an engine on devices of its own would start here, and return."""
        future: Future[Batch] = Future()
        future.set_result(self.generate(prompts, sampling))
        return future

    def update_weights(self, actor: Any, version: int) -> None:
        """Copy the weights, which arrive whole and by their Hugging Face names."""
        self.model.load_state_dict(dict(actor.stream_weights()), strict=False)
        self.version = version

    def close(self) -> None:
        """Free the model."""
        del self.model


def make(actor: Any, options: TrainOptions) -> TransformersEngine:
    """Make the engine of a run; every rank calls this after the models are loaded."""
    if options.grid.world_size > 1:
        raise ValueError(f"this engine takes one rank, got dims={options.dims!r}")
    return TransformersEngine(options.model)
