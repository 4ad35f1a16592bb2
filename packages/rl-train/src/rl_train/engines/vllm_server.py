"""`VllmServer`: a running server of vLLM as an engine, which takes requests over HTTP."""

from __future__ import annotations

import math
import pickle
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from safetensors.torch import save_file
from torch import Tensor

from parallel_models import SamplingOptions
from rl_train.cluster.addresses import address_towards
from rl_train.engines.interface import Request, Response, Responses, WeightsLostError
from rl_train.engines.json_client import JsonClient, RefusedError
from rl_train.weight_sync.buckets import NamedTensors
from rl_train.weight_sync.sender import WeightSender, WorkersOf
from rl_train.weight_sync.transport import BucketMissed, WeightMessage

# The bytes of one file of weights, which pass through host memory.
_FILE_BYTES = 1 << 30
# What the server reports in place of a log-prob of minus infinity.
_MINUS_INFINITY = -9999.0
# The log-probs of a token that sampling masks ask for, beyond twice top-k.
_MORE_LOG_PROBS = 16
_INFO = "/server_info?config_format=json"
# The extension of workers that receive weights, as `vllm serve` knows it.
_EXTENSION = "rl_train.engines.vllm_worker.VllmWorker"
_KEY = "set VLLM_API_KEY to the key of the server"
# What to do about each HTTP status.
_FIXES = {404: "start it with VLLM_SERVER_DEV_MODE=1, which lets it take weights", 401: _KEY, 403: _KEY}


class ServerFacts(NamedTuple):
    """The name of a server's model, the id of its process, its kind of log-probs, and its limits.

    `process` differs each time that the server starts. `vocab_size` is None if the server does not name it.
    `most_log_probs` is the most log-probs of a token that it reports, -1: of the whole vocabulary. `receives` says
    whether its workers receive weights from this process.
    """

    model: str
    process: str
    log_probs: str
    longest: int
    vocab_size: int | None
    most_log_probs: int
    receives: bool

    def check(self, url: str, vocab_size: int, longest: int, sampling: SamplingOptions) -> None:
        """Compare a run with the server.

        Raises:
            ValueError: The vocabulary is another one, sequences are longer than the server's, or its log-probs are not
                those of the options.
        """
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"the server {url} has a vocabulary of {self.vocab_size}, and the policy one of {vocab_size}; start "
                "the server with the policy's checkpoint"
            )
        if longest > self.longest:
            raise ValueError(
                f"a prompt and its response have {longest} tokens, more than the longest sequence of the server {url}, "
                f"{self.longest}; start it with --max-model-len {longest}, or give fewer --max-new-tokens"
            )
        if sampling.log_probs and (reason := self.refusal(sampling)):
            raise ValueError(f"the server {url} has --logprobs-mode {self.log_probs}: {reason}")

    def refusal(self, sampling: SamplingOptions) -> str:
        """Say why the server's log-probs and masks are not those of `RolloutEngine.generate`; empty: they are."""
        if not sampling.keep_sampling_mask:
            return _refusal(sampling, self.log_probs)
        if self.log_probs != "processed_logprobs":
            return (
                "sampling masks need log-probs after the truncation; start it with --logprobs-mode processed_logprobs"
            )
        if sampling.top_k is None:
            return "sampling masks need top_k, which bounds the server's answers; give top_k, or use another engine"
        if 0 <= self.most_log_probs <= sampling.top_k:
            return (
                f"it reports {self.most_log_probs} log-probs of a token, and sampling masks of top_k={sampling.top_k} "
                "need more; start it with --max-logprobs -1"
            )
        return ""


def _refusal(sampling: SamplingOptions, log_probs: str) -> str:
    """Say why log-probs of this kind are not those at the temperature, before top-k and top-p; empty: they are."""
    if log_probs == "raw_logprobs":
        if sampling.temperature in (0, 1):
            return ""
        return (
            f"these are log-probs at temperature 1, not at temperature={sampling.temperature}; start it with "
            "--logprobs-mode processed_logprobs, or sample at temperature 1"
        )
    if log_probs != "processed_logprobs":
        return "start it with --logprobs-mode processed_logprobs"
    if sampling.truncates and sampling.temperature:
        return (
            f"these are log-probs after top_k={sampling.top_k} and top_p={sampling.top_p}; leave both out, or start it "
            "with --logprobs-mode raw_logprobs and sample at temperature 1"
        )
    return ""


def server_facts(client: JsonClient) -> ServerFacts:
    """Ask a server of vLLM for its facts.

    Raises:
        ValueError: The server does not answer, is not in development mode, or is no server of vLLM.
    """
    try:
        config = client.call(_INFO)["vllm_config"]
        model, settings = client.call("/v1/models")["data"][0]["id"], config["model_config"]
        longest, most = int(settings["max_model_len"]), int(settings["max_logprobs"])
        kind, vocab_size = settings["logprobs_mode"], vocabulary_of(client, model)
        workers = config["parallel_config"]
        receives = workers["worker_extension_cls"] == _EXTENSION and workers["data_parallel_size"] == 1
        return ServerFacts(model, config["instance_id"], kind, longest, vocab_size, most, receives)
    except RefusedError as error:
        raise ValueError(f"{error}; {_FIXES.get(error.status, 'see the log of the server')}") from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{client.url} answers as no server of vLLM that this engine knows ({type(error).__name__}: {error}); "
            "start `vllm serve` of vLLM 0.26 or newer there"
        ) from error


def vocabulary_of(client: JsonClient, model: str) -> int | None:
    """Return the size of the vocabulary, which vLLM names where it refuses a token that no vocabulary has."""
    try:
        client.call("/v1/completions", {"model": model, "prompt": [0], "max_tokens": 1, "logit_bias": {str(2**30): 0}})
    except RefusedError as error:
        if match := re.search(r"Vocabulary size: (\d+)", str(error)):
            return int(match[1])
    return None


class VllmServer:
    """A `WorkerEngine`: a server of vLLM (`vllm serve`) that runs already, with `VLLM_SERVER_DEV_MODE=1`.

    Each request is one call of `/v1/completions` with token ids. A weight sync pauses the server until its requests are
    answered, and lets it go on with the new weights. A server with the workers' extension `VllmWorker` and without data
    parallelism receives them as an engine of this process would, see `WeightSender`. Others load them from a folder
    (`reload_weights`). A server that has started again is noticed by its id, and WeightsLostError asks for its weights
    and the requests again. A weight sync that fails leaves the server paused: it may have part of the weights.

    Args:
        url: The server, `http://HOST:PORT`.
        folder: A folder for the weights, which the server's machine sees under the same path. It is emptied.
        timeout: Seconds that the server has for one answer.
        patience: Seconds in which calls are repeated while the server cannot be reached.
        max_sequences: The number of responses that the server draws side by side.

    Raises:
        ValueError: See `server_facts`.
    """

    def __init__(
        self, url: str, folder: Path, *, timeout: float = 1800.0, patience: float = 300.0, max_sequences: int = 512
    ) -> None:
        self._connect: Callable[[], JsonClient] = lambda: JsonClient(url, timeout=timeout, patience=patience)
        self._client, self._drawing = self._connect(), set[JsonClient]()
        self._folder, self._max_sequences, self._timeout = folder, max_sequences, timeout
        self._facts = server_facts(self._client)
        self._has_weights = False
        # A weight sync takes part in a rendezvous once, so it is not repeated.
        self._workers = JsonClient(url, timeout=timeout, patience=0.0)
        parts = urlsplit(self._client.url)
        self._sender = WeightSender(address=address_towards(str(parts.hostname), int(parts.port or 0)))
        self._receivers: list[tuple[str, str]] = []

    def begin(self, requests: Sequence[Request], sampling: SamplingOptions) -> Callable[[], Responses]:
        """See `LocalEngine`; the first error of a request ends the others.

        Raises:
            ValueError: A request has images, is longer than the server's sequences, or asks for log-probs that the
                server does not report.
            RuntimeError: The engine has no weights yet. Or, from the function: the server refuses a request, cannot be
                reached, or its answer is incomplete.
        """
        if not self._has_weights:
            raise RuntimeError("the server has no weights yet; call load first")
        if any(request.images for request in requests):
            raise ValueError("prompts with images do not go over HTTP; use rollouts=vllm, or leave the images out")
        longest = max((len(r.prompt) + sampling.limit(len(r.prompt)) for r in requests), default=0)
        self._facts.check(self._client.url, self._facts.vocab_size or 0, longest, sampling)
        client = self._connect()
        self._drawing.add(client)
        threads = ThreadPoolExecutor(max(1, min(len(requests), self._max_sequences // sampling.n)), "requests")
        draws = [threads.submit(self._draw, client, request, sampling) for request in requests]
        threads.shutdown(wait=False)

        def collect() -> Responses:
            wait(draws, return_when=FIRST_EXCEPTION)
            failure = next((draw.exception() for draw in draws if draw.done() and draw.exception()), None)
            client.close()
            self._drawing.discard(client)
            if failure is not None and not isinstance(failure, RefusedError):
                raise failure
            self._check_process()
            if failure is not None:
                raise failure
            return [draw.result() for draw in draws]

        return collect

    def load(self, named_tensors: NamedTensors) -> None:
        """See `LocalEngine`.

        Raises:
            RuntimeError: The server does not take the weights.
            WeightsLostError: The server has started again meanwhile.
        """
        self._has_weights, process = False, self._facts.process
        self._facts = server_facts(self._client)
        if self._facts.process != process:
            self._receivers = []
        if self._facts.receives:
            self._client.call("/pause?mode=wait", {})
            try:
                self._sender.sync([WorkersOf(self, self._timeout)], named_tensors)
            except RuntimeError:
                self._check_process()
                raise
        else:
            self._load_folder(named_tensors)
        # The keys and values of a cached prefix come from the old weights.
        if not self._client.call("/reset_prefix_cache", {})["success"]:
            raise RuntimeError(f"the server {self._client.url} has not emptied its prefix cache; see its log")
        self._client.call("/resume", {})
        self._check_process()
        self._has_weights = True

    def receivers(self) -> list[tuple[str, str]]:
        """See `WorkerEngine`."""
        if not self._receivers:
            answers = self._workers.call("/collective_rpc", {"method": "weight_receiver"})["results"]
            self._receivers = [(device, key) for device, key in answers]
        return self._receivers

    def receive(self, messages: Sequence[WeightMessage]) -> None:
        """See `WorkerEngine`."""
        text = b64encode(pickle.dumps(messages)).decode()
        answers = self._workers.call("/collective_rpc", {"method": "receive_weights_as_text", "args": [text]})
        if errors := [answer for answer in answers["results"] if answer]:
            kind, message = min(errors, key=lambda error: error[0] == BucketMissed.__name__)
            error = BucketMissed if kind == BucketMissed.__name__ else RuntimeError
            raise error(f"a worker of the server {self._client.url} does not take the weights ({kind}: {message})")

    def sleep(self) -> None:
        """Do nothing: the server has devices of its own."""

    def wake(self) -> None:
        """Do nothing, see `sleep`."""

    def close(self) -> None:
        """End all calls; the server runs on."""
        for client in (self._client, self._workers, *self._drawing):
            client.close()
        self._sender.close()

    def _load_folder(self, named_tensors: NamedTensors) -> None:
        """Write the tensors to a folder, and have the server pause and load them."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        weights = self._folder / uuid4().hex
        weights.mkdir(parents=True)
        try:
            _write(weights, named_tensors)
            self._client.call("/pause?mode=wait", {})
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
            try:
                self._client.call("/collective_rpc", reload)
            except RefusedError as error:
                raise RuntimeError(
                    f"the server does not load {weights}, which must be the same folder on its machine, with the "
                    f"weights of the server's model: {error}; the server's log says more"
                ) from error
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_process(self) -> None:
        """Raise WeightsLostError if the server has started again since the last weight sync."""
        if self._client.call(_INFO)["vllm_config"]["instance_id"] != self._facts.process:
            self._has_weights = False
            raise WeightsLostError(f"the server {self._client.url} has started again")

    def _draw(self, client: JsonClient, request: Request, sampling: SamplingOptions) -> list[Response]:
        # vLLM refuses several greedy responses, which would all be equal.
        count = sampling.n if sampling.temperature else 1
        body = _body(self._facts.model, request, sampling, count)
        most = self._facts.most_log_probs if self._facts.most_log_probs >= 0 else self._facts.vocab_size or 2**30
        if sampling.keep_sampling_mask:
            # vLLM keeps all tokens that are as likely as the last of top-k.
            body["logprobs"] = min(2 * (sampling.top_k or 0) + _MORE_LOG_PROBS, most)
        while (responses := _answered(client, body, request, sampling)) is None:
            if body["logprobs"] >= most:
                raise RuntimeError(f"{client.url} kept more than {most} tokens; start it with --max-logprobs -1")
            body["logprobs"] = min(4 * body["logprobs"], most)  # the seed draws the same tokens again
        if len(responses) != count:
            raise RuntimeError(f"{client.url} answers with {len(responses)} responses instead of {count}")
        if self._facts.refusal(sampling):
            responses = [response._replace(log_probs=[math.nan] * len(response.tokens)) for response in responses]
        return responses if sampling.temperature else responses * sampling.n


def _body(model: str, request: Request, sampling: SamplingOptions, count: int) -> dict[str, Any]:
    """Return a request for `/v1/completions`. It states what the model's generation_config.json would change."""
    return {
        "model": model,
        "prompt": request.prompt,
        "n": count,
        "seed": request.seed,
        "max_tokens": sampling.limit(len(request.prompt)),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "add_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


class _MaskCutOff(Exception):
    """The answer may lack kept tokens: it has no token that was dropped."""


def _answered(
    client: JsonClient, body: dict[str, Any], request: Request, sampling: SamplingOptions
) -> list[Response] | None:
    """Return the responses of a completion; None: their masks may lack tokens."""
    answer = client.call("/v1/completions", body)
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [_response(choice, request, sampling) for choice in choices]
    except _MaskCutOff:
        return None
    except (LookupError, TypeError) as error:
        raise RuntimeError(f"{client.url} answers with no token ids or log-probs: {error!r}") from error


def _response(choice: dict[str, Any], request: Request, sampling: SamplingOptions) -> Response:
    """Return the response of a choice; RuntimeError if it is incomplete or does not continue the prompt."""
    tokens, log_probs = list(choice["token_ids"]), [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if choice["prompt_token_ids"] != request.prompt:
        raise RuntimeError(f"the server continued {choice['prompt_token_ids']} in place of {request.prompt}")
    if choice["finish_reason"] not in ("stop", "length"):
        raise RuntimeError(f"the server ended a response with {choice['finish_reason']!r}; does another user pause it?")
    if len(log_probs) != len(tokens):
        raise RuntimeError(f"the server has {len(log_probs)} log-probs for {len(tokens)} tokens")
    for number, log_prob in enumerate(log_probs, start=1):
        if not (math.isfinite(log_prob) and log_prob > _MINUS_INFINITY):
            raise RuntimeError(
                f"the server gives token {number} of a response the log-prob {log_prob}, NaN or infinite: the model "
                "has diverged"
            )
    kept = [_kept(row) for row in choice["logprobs"]["top_logprobs"]] if sampling.keep_sampling_mask else None
    return Response(tokens, log_probs, kept)


def _kept(log_probs: dict[str, float]) -> list[int]:
    """Return the kept tokens of a position, by the log-probs of its likeliest tokens, whose names have their ids."""
    ids = [int(name.removeprefix("token_id:")) for name, value in log_probs.items() if value > _MINUS_INFINITY]
    if len(ids) == len(log_probs):
        raise _MaskCutOff
    return ids


def _write(folder: Path, named_tensors: NamedTensors) -> None:
    """Write tensors to safetensors files of about a GiB."""
    tensors, count, size = dict[str, Tensor](), 0, 0
    for name, tensor in named_tensors:
        if tensors and size + tensor.nbytes > _FILE_BYTES:
            save_file(tensors, folder / f"model-{(count := count + 1):05}.safetensors")
            tensors, size = {}, 0
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    save_file(tensors, folder / f"model-{count + 1:05}.safetensors")
