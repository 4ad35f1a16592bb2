"""A server that speaks vLLM's JSON, with a native engine behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from parallel_models import SamplingOptions
from rl_train.engines import Native
from rl_train.engines.interface import Request
from rl_train.engines.vllm_worker import VllmWorker

Answer = Callable[[dict[str, Any]], Any]


class Server(ThreadingHTTPServer):
    """Answers as `vllm serve` does; `answers` replace an answer by another function, an HTTP status or silence (0)."""

    daemon_threads = True

    def __init__(self, model: Path, log_probs: str = "processed_logprobs", vocab_size: int = 30) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.engine, self.lock = Native(model, device="cpu"), threading.Lock()
        self.process, self.paused, self.calls = "one", False, list[tuple[str, dict[str, Any]]]()
        self.weights, self.answers = dict[str, Tensor](), dict[str, Answer | int]()
        self.settings: dict[str, Any] = {"logprobs_mode": log_probs, "max_model_len": 24, "max_logprobs": 20}
        self.vocab_size, self.model = vocab_size, model
        self.reader: Any = None
        self.parallel: dict[str, Any] = {"worker_extension_cls": "", "data_parallel_size": 1}
        self.workers = [Worker(self, rank) for rank in range(2)]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of a path without its query."""
        if path == "/server_info":
            return {
                "vllm_config": {
                    "model_config": self.settings,
                    "parallel_config": self.parallel,
                    "instance_id": self.process,
                }
            }
        if path == "/v1/models":
            return {"data": [{"id": "letters", "max_model_len": self.settings["max_model_len"]}]}
        if path == "/v1/completions":
            assert not self.paused
            return {"choices": self.choices(body)}
        if path == "/collective_rpc":
            assert self.paused
            if body["method"] != "reload_weights":
                call = methodcaller(body["method"], *body.get("args", []))
                with ThreadPoolExecutor(2) as threads:  # the workers are processes of vLLM
                    return {"results": list(threads.map(call, self.workers))}
            folder = Path(body["kwargs"]["weights_path"])
            self.weights = {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}
            self.load()
            return {"results": [None]}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return {"status": "ok"}
        assert path == "/reset_prefix_cache"
        return {"success": True}

    def load(self) -> None:
        with self.lock:
            self.engine.load(iter(self.weights.items()))

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Draw the choices of a completion, or read its prompt."""
        if "prompt_logprobs" in body:
            return [{"prompt_token_ids": body["prompt"], "prompt_logprobs": self.read(**body)}]
        options = {name: body[name] for name in ("n", "temperature", "top_p")} | {"top_k": body["top_k"] or None}
        masks = {"keep_sampling_mask": True} if body["logprobs"] else {}
        sampling = SamplingOptions(body["max_tokens"], stop_ids=body["stop_token_ids"], **options, **masks)
        with self.lock:
            (responses,) = self.engine.begin([Request(body["prompt"], body["seed"])], sampling)()
        return [
            {
                "index": index,
                "token_ids": response.tokens,
                "prompt_token_ids": body["prompt"],
                "finish_reason": "length",
                "logprobs": {
                    "token_logprobs": response.log_probs,
                    "top_logprobs": response.kept and [self.likeliest(ids, body["logprobs"]) for ids in response.kept],
                },
            }
            for index, response in enumerate(responses)
        ][::-1]

    @torch.no_grad()
    def read(self, prompt: list[int], prompt_logprobs: int, **_: Any) -> list[dict[int, Any] | None]:
        """Return the log-probs of a prompt's tokens and of the likeliest, by transformers."""
        with self.lock:  # transformers changes its classes while it loads, and changes them back
            if self.reader is None:
                self.reader = AutoModelForCausalLM.from_pretrained(self.model)
        rows = self.reader(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return [
            None,
            *(
                {id: {"logprob": float(row[id])} for id in [token, *row.topk(prompt_logprobs).indices.tolist()]}
                for token, row in zip(prompt[1:], rows, strict=False)
            ),
        ]

    def likeliest(self, kept: list[int], count: int) -> dict[str, float]:
        """Return the log-probs of a position; those of dropped tokens are minus infinity."""
        ids = kept + [token for token in range(self.vocab_size) if token not in kept]
        return {f"token_id:{token}": -1.0 if token in kept else -9999.0 for token in ids[:count]}


class Worker(VllmWorker):
    """A worker of the server with the extension; rank 1 gives the weights to the engine."""

    def __init__(self, server: Server, rank: int) -> None:
        self.server, self.rank, self.device = server, rank, torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: nn.Linear(1, 1))

    def weight_receiver(self) -> list[str]:
        answer = super().weight_receiver()
        self._weights: Any = self
        return answer

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        weights = {name: tensor.clone() for name, tensor in named_tensors}
        if self.rank == 1:
            self.server.weights = weights
            self.server.load()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, length = self.path.partition("?")[0], int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or "{}")
        self.server.calls.append((self.path, body))
        answer, status = self.server.answers.get(path), 200
        if "logit_bias" in body:
            status, content = 400, {"error": {"message": f"Vocabulary size: {self.server.vocab_size}"}}
        elif answer == 0:  # the connection breaks
            return
        elif isinstance(answer, int):
            status, content = answer, {"error": {"message": "out of memory"}}
        else:
            content = answer(body) if answer else self.server.answer(path, body)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
