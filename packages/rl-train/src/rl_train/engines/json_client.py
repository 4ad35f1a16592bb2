"""`JsonClient`: JSON over HTTP, from several threads."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

_KINDS = {"http": HTTPConnection, "https": HTTPSConnection}
# Seconds that an attempt to connect takes at most, and between two attempts.
_CONNECT, _PAUSE = 10.0, 0.5


class RefusedError(RuntimeError):
    """A server answered with an error; `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class JsonClient:
    """Sends JSON to one server and returns its JSON. Each call has a connection of its own.

    A call whose connection is refused or lost is repeated, so calls must have the same effect twice as once.

    Args:
        url: The server, `http://HOST:PORT` or `https://HOST:PORT`.
        key: The environment variable with the server's key.
        timeout: Seconds that a call waits for bytes of its answer.
        patience: Seconds in which a call is repeated after its connection was refused or lost.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(
        self, url: str, *, key: str = "VLLM_API_KEY", timeout: float = 1800.0, patience: float = 300.0
    ) -> None:
        parts = urlsplit(url)
        try:
            valid = parts.scheme in _KINDS and parts.hostname and parts.port and parts.path in ("", "/")
        except ValueError:  # a port that is no number
            valid = False
        if not valid or parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url} is not the URL of a server; give http://HOST:PORT, such as http://127.0.0.1:8000")
        self.url, self._timeout, self._patience = f"{parts.scheme}://{parts.netloc}", timeout, patience
        self._kind, self._address = _KINDS[parts.scheme], (str(parts.hostname), parts.port)
        self._headers = {"Content-Type": "application/json"}
        if secret := os.environ.get(key):
            self._headers["Authorization"] = f"Bearer {secret}"
        self._closed, self._lock, self._connections = threading.Event(), threading.Lock(), set[HTTPConnection]()

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a POST with a body, or a GET without one, and return the answer; None if it is empty.

        Raises:
            RefusedError: The server answered with an error.
            RuntimeError: It cannot be reached, does not answer in time, or answers with something else than JSON; or
                the client was closed.
        """
        end = time.monotonic() + self._patience
        while True:
            try:
                status, text = self._exchange(path, body)
                break
            except TimeoutError as error:
                raise RuntimeError(f"{self.url}{path} has not answered within {self._timeout:g} s") from error
            except (OSError, HTTPException) as error:
                if self._closed.is_set():
                    raise RuntimeError(f"the call of {self.url}{path} was given up") from error
                if time.monotonic() >= end:
                    raise RuntimeError(
                        f"{self.url}{path} cannot be reached ({type(error).__name__}: {error}); start the server, or "
                        "correct its URL"
                    ) from error
                self._closed.wait(_PAUSE)
        if status >= 400:
            raise RefusedError(f"{self.url}{path} answered {status}: {_message(text)}", status)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError as error:
            raise RuntimeError(f"{self.url}{path} answered with something else than JSON: {_message(text)}") from error

    def close(self) -> None:
        """End all calls; they and later calls raise RuntimeError."""
        self._closed.set()
        with self._lock:
            for connection in self._connections:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _exchange(self, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        connection = self._kind(*self._address, timeout=min(_CONNECT, self._timeout))
        with self._lock:
            self._connections.add(connection)
        try:
            try:
                connection.connect()
            except TimeoutError as error:
                raise ConnectionError(f"no connection within {connection.timeout:g} s") from error
            if self._closed.is_set():
                raise ConnectionAbortedError("the client is closed")
            connection.sock.settimeout(self._timeout)
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


def _message(text: str) -> str:
    """Return the message of an error of FastAPI or vLLM, else the beginning of the text."""
    with suppress(ValueError, TypeError, AttributeError):
        answer = json.loads(text)
        error = answer.get("error") or answer.get("detail") or answer.get("message")
        text = str(error["message"] if isinstance(error, dict) else error or text)
    return text.strip()[:500] or "(empty)"
