"""`ReadingServer`: a running server of vLLM as a teacher, which reads sequences over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from rl_train.engines.interface import SequenceLogProbs
from rl_train.engines.json_client import JsonClient, RefusedError
from rl_train.engines.vllm_server import vocabulary_of


class ReadingServer:
    """A `ReadingEngine`: a server of vLLM (`vllm serve TEACHER`), which keeps its weights.

    Args:
        url: The server, `http://HOST:PORT`.
        vocab_size: The size of the policy's vocabulary, which must be the server's.
        timeout: Seconds that the server has for one answer.
        patience: Seconds in which calls are repeated while the server cannot be reached.
        max_sequences: The number of sequences that the server reads side by side.

    Raises:
        ValueError: The server cannot be reached, is no server of vLLM, or has another vocabulary.
    """

    def __init__(
        self, url: str, vocab_size: int, *, timeout: float = 1800.0, patience: float = 300.0, max_sequences: int = 64
    ) -> None:
        self._client = JsonClient(url, timeout=timeout, patience=patience)
        self._vocab_size, self._max_sequences = vocab_size, max_sequences
        try:
            entry = self._client.call("/v1/models")["data"][0]
            self._model, self._longest = str(entry["id"]), int(entry["max_model_len"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{url} answers as no server of vLLM ({error!r}); start `vllm serve TEACHER` of vLLM 0.26 or newer"
            ) from error
        if (size := vocabulary_of(self._client, self._model)) not in (None, vocab_size):
            raise ValueError(
                f"the teacher's server {url} has a vocabulary of {size}, and the policy one of {vocab_size}; take a "
                "teacher with the policy's tokenizer"
            )

    def check(self, longest: int, top_k: int) -> None:
        """Raise ValueError unless the server reads sequences of this length, and reports as many log-probs."""
        if longest >= self._longest:
            raise ValueError(
                f"a prompt and its response have {longest} tokens, and the teacher's server {self._client.url} reads "
                f"up to {self._longest - 1}; start it with --max-model-len {longest + 1}"
            )
        try:
            self.read([[0, 0]], top_k)
        except RefusedError as error:
            raise ValueError(
                f"{error}; start it with --max-logprobs {top_k}, or give a smaller teacher.top_k"
            ) from error
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def read(self, sequences: Sequence[list[int]], top_k: int) -> list[SequenceLogProbs]:
        """See `ReadingEngine`; the first error of a sequence ends the others.

        Raises:
            RuntimeError: The server refuses a sequence, cannot be reached, or its answer is incomplete.
        """
        with ThreadPoolExecutor(max(1, min(len(sequences), self._max_sequences)), "sequences") as threads:
            reads = [threads.submit(self._read, sequence, top_k) for sequence in sequences]
            wait(reads, return_when=FIRST_EXCEPTION)
            threads.shutdown(wait=False, cancel_futures=True)
            for read in reads:
                if read.done() and not read.cancelled() and (error := read.exception()) is not None:
                    raise error
            return [read.result() for read in reads]

    def close(self) -> None:
        """End all calls; the server runs on."""
        self._client.close()

    def _read(self, tokens: list[int], top_k: int) -> SequenceLogProbs:
        top_k = min(top_k, self._vocab_size - 2)
        answer = self._client.call(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": tokens,
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": top_k,
                "add_special_tokens": False,
                "return_token_ids": True,
            },
        )
        try:
            (choice,) = answer["choices"]
            rows = [
                {int(id): entry["logprob"] for id, entry in (row or {}).items()} for row in choice["prompt_logprobs"]
            ]
            same = choice["prompt_token_ids"] == tokens
        except (LookupError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self._client.url} answers with no log-probs of a prompt: {error!r}") from error
        if not same:
            raise RuntimeError(f"{self._client.url} has read {choice['prompt_token_ids']} in place of {tokens}")
        return SequenceLogProbs.of(tokens, rows, top_k)
