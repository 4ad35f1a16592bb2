"""`VllmWorker`: what each worker process of vLLM does for an engine, beside vLLM's own methods."""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from rl_train.engines.direct_writes import DirectWrites
from rl_train.processes.errors import portable
from rl_train.weight_sync.receiver import WeightReceiver
from rl_train.weight_sync.transport import device_id

# The classes of vLLM that derive something from weights of other layers.
_ATTENTION = {"Attention", "MLAAttention"}


class VllmWorker:
    """A worker extension class of vLLM (`worker_extension_cls`); `collective_rpc` calls the methods in each worker."""

    rank: int
    device: torch.device
    model_runner: Any
    reload_weights: Any

    def weight_receiver(self) -> list[str]:
        """Return the id of this worker's device, and the key of its receiver of weights."""
        self._weight_receiver = WeightReceiver()
        self._weights = DirectWrites(self.model_runner.get_model(), self._reload, self._finish)
        return [device_id(self.device), self._weight_receiver.key]

    def receive_weights(self, messages: bytes) -> bytes:
        """Take a weight sync, written into the parameters in place; return the error, pickled, or no bytes.

        Each worker takes whole tensors, and vLLM's model keeps the parts of its ranks of tp, pp and ep. The messages
        are a pickled `WeightMessage` for each worker.
        """
        try:
            message = pickle.loads(messages)[self.rank]
            if self.device.type == "cpu":
                forget_packed_experts(self.model_runner.get_model())
            with closing(self._weight_receiver.receive(message)) as named_tensors:
                self._weights.load(named_tensors)
                for name, _ in named_tensors:
                    raise RuntimeError(f"the engine did not take {name}")
        except BaseException as error:
            return pickle.dumps(portable(error))
        return b""

    def receive_weights_as_text(self, messages: str) -> list[str]:
        """Do as `receive_weights`, for a server, which passes on text alone.

        Args:
            messages: See `receive_weights`, in base64.

        Returns:
            The name of the class of the error and its message, or nothing.
        """
        if not (answer := self.receive_weights(b64decode(messages))):
            return []
        error = pickle.loads(answer).exception()
        return [type(error).__name__, str(error)]

    def _reload(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=named_tensors)

    def _finish(self) -> None:
        """Do what `reload_weights` does behind the last tensor of plain weights."""
        for module in self.model_runner.get_model().modules():
            if not _ATTENTION.isdisjoint(base.__name__ for base in type(module).__mro__):
                module.process_weights_after_loading(self.model_runner.model_config.dtype)
        for name in ("reset_encoder_cache", "reset_mm_cache"):
            if (reset := getattr(self.model_runner, name, None)) is not None:
                reset()

    def set_log_probs(self, temperature: float | None, width: int | None) -> None:
        """Choose the distribution that log-probs come from, in every form of vLLM's model runner.

        vLLM computes them after temperature and truncation (`processed_logprobs`), or before both (`raw_logprobs`).

        Args:
            temperature: Divide the logits by this temperature, and report log-probs before the truncation; vLLM itself
                then draws at temperature 1. None: report log-probs after the truncation.
            width: Drop the tokens beyond the `width` likeliest. vLLM keeps all that are as likely as the last of top-k.
        """
        if (sampler := getattr(self.model_runner, "sampler", None)) is None:
            return  # another pipeline stage draws
        model = self.model_runner.get_model()
        compute_logits = self.__dict__.setdefault("_compute_logits", model.compute_logits)

        def adjusted(*args: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*args, **options)
            if logits is None:  # of a worker that draws nothing
                return None
            if width is not None:
                kept = logits.topk(min(width, logits.shape[-1]), dim=-1)
                logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
            return logits if temperature is None else logits.float() / temperature

        model.compute_logits = adjusted
        mode = "processed_logprobs" if temperature is None else "raw_logprobs"
        for part in (sampler, getattr(sampler, "topk_topp_sampler", None)):
            if part is not None:
                part.logprobs_mode = mode


def forget_packed_experts(model: nn.Module) -> None:
    """Have vLLM's CPU build pack the experts of a weight sync.

    It packs weights of experts when it builds their kernel, and (0.32) builds none for later weights: these would be
    read as if they were packed.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
