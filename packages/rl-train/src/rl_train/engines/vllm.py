"""`Vllm`: vLLM as an engine, with worker processes of its own."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import torch.distributed as dist

from ckpt import Checkpoint
from ckpt.layout import quantization_of
from parallel_layers import ParallelDims
from parallel_layers.device import ASKS_NVML, gpu
from parallel_models import SamplingOptions
from parallel_models.engine import stored_dtype
from rl_train.engines.adapters_in_vllm import has_stacked_experts, write_adapter
from rl_train.engines.event_loop import EventLoop, gathered, result_of
from rl_train.engines.interface import EngineEnded, Request, Response, Responses, SequenceLogProbs, Step
from rl_train.engines.vllm_limits import require_grid, require_vllm, warn_of_step_limits
from rl_train.engines.vllm_requests import DrawnTokens, LogProbs, parameters_of, prompt_of, reading_parameters
from rl_train.weight_sync.buckets import NamedTensors, Quantization, WeightFormat
from rl_train.weight_sync.sender import WeightSender, WorkersOf
from rl_train.weight_sync.transport import BucketMissed, WeightMessage

# Read by vLLM when it is imported and when it starts. What the user has set stays. vLLM forks its workers, and a fork
# cannot use CUDA where this process has asked the driver for GPUs; NVML may be asked.
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
_ENVIRONMENT |= {ASKS_NVML: "1"}
# The largest ranks of adapters that vLLM makes room for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Seconds that a step waits for responses; other calls wait meanwhile.
_STEP_SECONDS = 0.02


class Vllm:
    """A `WorkerEngine` and a `StreamingEngine`: vLLM, with a worker process on each of its devices.

    Args:
        model: The checkpoint folder.
        dims: The grid: vLLM divides the model over `tp` and `pp`, and the experts over all ranks where `ep` > 1. It
            takes the first devices that this process sees (default: one device).
        memory: The share of each device's memory for weights and keys and values. On a CPU, vLLM reads the size of the
            cache from `VLLM_CPU_KVCACHE_SPACE` (default here: 1 GiB).
        dtype: The dtype of the weights: float32, bfloat16 or float16 (default: as stored in the checkpoint).
        adapter: The adapter_config.json of the adapters, if a weight sync brings adapters alone (default: all weights).
            Until the first weight sync vLLM computes with the base.
        quantization: "fp8": hold the projections in FP8 by blocks of 128 x 128, and compute in them; the other weights
            have 16 bits. A weight sync sends this format (`WeightFormat.of_weights`), and the engine starts without
            weights. None: plain weights.
        routing: Return the experts of each token (mixture of experts), see `Response`; not with pp.
        stale_cache: What new weights do with the keys and values of responses in flight: keep, or recompute.
        **options: Further options of vLLM's engine, such as `max_model_len` and `enforce_eager`.

    `sleep` moves the weights to host memory and frees the cache, on GPUs. On a CPU vLLM cannot give memory back, and
    `sleep` does nothing.

    Warns:
        UserWarning: Training limits the steps of Mamba-2 (`time_step_min`), and vLLM does not.

    Raises:
        ValueError: vLLM is not installed; `dims` or `options` ask for a grid that vLLM has not; this process is a rank
            of several; or the checkpoint is quantized and `quantization` is not given.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dims: ParallelDims = ParallelDims(),  # noqa: B008
        memory: float = 0.4,
        dtype: str | None = None,
        adapter: dict[str, Any] | None = None,
        quantization: Quantization | None = None,
        routing: bool = False,
        stale_cache: Literal["keep", "recompute"] = "keep",
        **options: Any,
    ) -> None:
        require_vllm()
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
        self._model = str(model)
        require_grid(dims, routing=routing)
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"vLLM cannot run inside one of {dist.get_world_size()} ranks; use EnginePool, which starts it in a "
                "separate process"
            )
        checkpoint = Checkpoint(model)
        warn_of_step_limits(checkpoint)
        stored = quantization_of(checkpoint.config)
        if stored is not None and quantization is None:
            raise ValueError(
                f"{model} is stored in {stored['quant_method']}, and a weight sync brings plain weights; give "
                f"quantization='fp8', or convert it: ckpt convert {model} PLAIN --dtype bfloat16"
            )
        if quantization is not None and adapter is not None:
            raise ValueError(
                f"quantization={quantization!r} needs all weights, not adapters alone; leave one of them out"
            )
        import vllm  # takes 10 to 20 s, and only this engine needs it
        from vllm.usage.usage_lib import UsageContext

        self._sleeps = gpu.is_available()
        self._asleep: list[str] = []
        # A processor of images takes the tokenizer apart; nothing else of vLLM needs the tokenizer.
        sees = any((Path(model) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
        settings = {
            "tensor_parallel_size": dims.tp,
            "pipeline_parallel_size": dims.pp,
            "enable_expert_parallel": dims.ep > 1,
            "worker_extension_cls": "rl_train.engines.vllm_worker.VllmWorker",
            "skip_tokenizer_init": not sees,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "disable_log_stats": True,
            # Cached blocks of a prefix come from older weights and must not be used. vLLM needs them to report routing.
            "enable_prefix_caching": routing,
            **({"enable_return_routed_experts": True} if routing else {}),
            # Older weights also computed cached features of images, which vLLM finds by the image's hash.
            **({"mm_processor_cache_gb": 0} if sees else {}),
            "enable_sleep_mode": self._sleeps,
            "gpu_memory_utilization": memory,
        }
        self._adapter, self._lora = adapter, None
        if adapter is not None:
            rank = next((size for size in _RANKS if size >= adapter["r"]), adapter["r"])
            settings |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
            self._stacked = has_stacked_experts(adapter)
            # vLLM then takes the experts of one layer in one tensor for all models.
            settings |= {"enable_mixed_moe_lora_format": True} if self._stacked else {}
        # vLLM's own default runs models that are stored in fp32 in 16 bits.
        dtype = dtype or str(stored_dtype(checkpoint)).removeprefix("torch.")
        self._empty = quantization is not None
        if quantization is not None:
            dtype = dtype.replace("float32", "bfloat16")  # vLLM has no FP8 products for fp32
            config = WeightFormat.of_weights(checkpoint, quantization).quantization_config
            overrides = {**options.pop("hf_overrides", {}), "quantization_config": config}
            settings |= {"load_format": "dummy", "hf_overrides": overrides}
        self._events, self._sender = EventLoop("vLLM"), WeightSender()

        async def start() -> Any:
            arguments = vllm.AsyncEngineArgs(model=str(model), dtype=dtype, **(settings | options))
            # The sizes of batches that vLLM chooses for its class `LLM`.
            return vllm.AsyncLLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)

        self._llm = self._events.run(start())
        config = self._llm.model_config
        self._longest, self._vocab_size = int(config.max_model_len), int(config.get_vocab_size())
        self._numbers, self._log_probs = itertools.count(), LogProbs(partial(self._rpc, "set_log_probs"))
        self._receivers: list[tuple[str, str]] = []
        if adapter is None:
            self._receivers = [(device, key) for device, key in self._run(self._rpc("weight_receiver"))]
        # The versions of the weights and of the next weights; the requests in flight, and what has become of them.
        self._version, self._coming, self._paused = 0, 0, False
        self._routing, self._recompute, self._flying = routing, stale_cache == "recompute", dict[int, Future[Any]]()
        self._begun, self._complete = SimpleQueue[tuple[int, int]](), SimpleQueue[int]()

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`.

        Raises:
            ValueError: A prompt and its longest response have more tokens than the engine's longest sequence, or a
                log-prob is not finite.
            RuntimeError: The engine has no weights yet.
            EngineEnded: A process of vLLM has ended.
        """
        self._check(requests, sampling)
        drawing = self._events.submit(gathered(self._draw(request, sampling) for request in requests))
        return lambda: self._result(drawing)

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        """See `ReadingEngine`; the engine keeps the weights of its checkpoint.

        Raises:
            ValueError: A sequence is as long as the engine's longest sequence, or longer.
            RuntimeError: See `SequenceLogProbs.of`.
            EngineEnded: A process of vLLM has ended.
        """
        if (longest := max(map(len, sequences), default=0)) >= self._longest:
            raise ValueError(
                f"{longest} tokens are too many for vLLM, which reads up to {self._longest - 1} (max_model_len)"
            )
        result: list[SequenceLogProbs] = self._run(gathered(self._read(sequence, top_k) for sequence in sequences))
        return result

    async def _read(self, tokens: list[int], top_k: int) -> SequenceLogProbs:
        top_k = min(top_k, self._vocab_size - 2)
        parameters, number = reading_parameters(top_k), str(next(self._numbers))
        async for answer in self._llm.generate({"prompt_token_ids": tokens}, parameters, number):
            flat = answer.prompt_logprobs
        spans = zip(flat.start_indices, flat.end_indices, strict=True)
        rows = [dict(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True)) for a, b in spans]
        return SequenceLogProbs.of(tokens, rows, top_k)

    def add(self, key: int, request: Request, sampling: SamplingOptions) -> None:
        """See `StreamingEngine`."""
        self._check([request], sampling)
        drawing = self._events.submit(self._draw(request, sampling, lambda version: self._begun.put((key, version))))
        self._flying[key] = drawing
        drawing.add_done_callback(lambda _: self._complete.put(key))

    def step(self) -> Step:
        """See `StreamingEngine`; waits a moment where no responses are complete."""
        complete = []
        try:
            keys = [self._complete.get(timeout=_STEP_SECONDS), *_items(self._complete)]
        except Empty:
            keys = []
        try:
            complete = [(key, self._result(self._flying.pop(key))) for key in keys if key in self._flying]
        except BaseException:
            for drawing in self._flying.values():
                drawing.cancel()
            self._flying.clear()
            raise
        return Step(_items(self._begun), complete)

    def cancel(self, key: int) -> None:
        """See `StreamingEngine`; vLLM ends a request whose coroutine is cancelled."""
        if (drawing := self._flying.pop(key, None)) is not None:
            drawing.cancel()

    def expect(self, version: int) -> None:
        """See `StreamingEngine`."""
        self._coming = version

    def receivers(self) -> list[tuple[str, str]]:
        """See `WorkerEngine`; this process itself takes adapters."""
        return self._receivers

    def receive(self, messages: Sequence[WeightMessage]) -> None:
        """See `WorkerEngine`."""
        self._wake("weights")
        self._empty = True
        self._run(self._renew(pickle.dumps(messages)))
        self._empty = False

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`."""
        if self._adapter is None:
            self._sender.sync([WorkersOf(self)], named_tensors)
            return
        self._wake("weights")
        self._empty = True
        self._take_adapter(self._adapter, ((name, tensor.clone()) for name, tensor in named_tensors))
        self._empty = False

    def sleep(self) -> None:
        """See `LocalEngine`."""
        if self._sleeps and not self._asleep:
            self._run(self._llm.sleep(level=1))
            self._asleep = ["weights", "kv_cache"]
        elif self._asleep == ["kv_cache"]:
            self._wake("kv_cache")
            self.sleep()

    def wake(self) -> None:
        """See `LocalEngine`."""
        for memory in list(self._asleep):
            self._wake(memory)

    def close(self) -> None:
        """See `LocalEngine`."""
        self._sender.close()
        self._llm.shutdown()
        self._events.close()

    def _check(self, requests: Sequence[Request], sampling: SamplingOptions) -> None:
        if self._empty:
            raise RuntimeError("the engine has no weights yet; call load first")
        lengths = (len(request.prompt) + sampling.limit(len(request.prompt)) for request in requests)
        if (longest := max(lengths, default=0)) > self._longest:
            raise ValueError(
                f"a prompt and max_new_tokens={sampling.max_new_tokens} have {longest} tokens, more than the "
                f"longest sequence of vLLM, {self._longest} (max_model_len)"
            )

    async def _draw(
        self, request: Request, sampling: SamplingOptions, begun: Callable[[int], None] | None = None
    ) -> list[Response]:
        """Return the responses to a request; with `begun`, called at the first token, tokens have versions."""
        parameters = parameters_of(request, sampling, self._vocab_size, in_parts=begun is not None)
        number, drawn = str(next(self._numbers)), [DrawnTokens(sampling) for _ in range(sampling.n)]
        async with self._log_probs.like(sampling):
            async for answer in self._llm.generate(prompt_of(request), parameters, number, lora_request=self._lora):
                if list(answer.prompt_token_ids) != request.prompt:
                    raise ValueError(
                        f"vLLM's processor makes {len(answer.prompt_token_ids)} tokens of a prompt with images that "
                        f"has {len(request.prompt)}; give vLLM the settings of the processor that made the prompt"
                    )
                if begun is not None and not any(tokens.ids for tokens in drawn):
                    begun(self._version)
                for output in answer.outputs:
                    drawn[output.index].add(output, None if begun is None else self._version)
        # vLLM refuses several greedy responses, which would all be equal.
        return [tokens.response() for tokens in (drawn if sampling.temperature else drawn[:1] * sampling.n)]

    async def _renew(self, messages: bytes) -> None:
        """Have the workers take weights; responses in flight stand still meanwhile.

        vLLM has handed out all tokens of the older weights when the workers have answered.
        """
        if self._flying and not self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=self._recompute)
            self._paused = True
        answers = await self._rpc("receive_weights", messages)
        if self._routing:
            await self._llm.reset_prefix_cache()
        if errors := [pickle.loads(answer).exception() for answer in answers if answer]:
            raise min(errors, key=lambda error: isinstance(error, BucketMissed))
        self._version = self._coming
        if self._paused:
            await self._llm.resume_generation()
            self._paused = False

    def _take_adapter(self, config: dict[str, Any], named_tensors: NamedTensors) -> None:
        """Replace the last adapter by a new one. vLLM reads it from files, which are then removed."""
        from vllm.lora.request import LoRARequest

        number = 1
        if self._lora is not None:
            number = self._lora.lora_int_id + 1
            self._run(self._llm.remove_lora(number - 1))
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder), config, named_tensors, self._model)
            form = {"is_3d_lora_weight": True} if self._stacked else {}
            self._lora = LoRARequest(f"version-{number}", number, folder, **form)
            self._run(self._llm.add_lora(self._lora))

    def _wake(self, memory: str) -> None:
        if memory in self._asleep:
            self._run(self._llm.wake_up([memory]))
            self._asleep.remove(memory)

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `VllmWorker` in each worker."""
        results: list[Any] = await self._llm.collective_rpc(method, args=arguments)
        return results

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._result(self._events.submit(coroutine))

    def _result(self, future: Future[Any]) -> Any:
        """Wait for a coroutine; raise its first error, or EngineEnded."""
        try:
            return result_of(future)
        except Exception as error:
            if self._llm.errored:
                raise EngineEnded("a process of vLLM has ended") from error
            raise


def _items(queue: SimpleQueue[Any]) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]
