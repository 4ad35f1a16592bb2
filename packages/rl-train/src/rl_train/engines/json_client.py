"""`JsonClient`: JSON over HTTP, from several threads."""

from __future__ import annotations

import json
import math
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
        self._closed, self._lock, self._sockets = threading.Event(), threading.Lock(), set[socket.socket]()

    def call(self, path: str, body: dict[str, Any] | None = None, *, end: float = math.inf) -> Any:
        """Send a POST with a body, or a GET without one, and return the answer; None if it is empty.

        Args:
            path, body: The request.
            end: The time of `time.monotonic` at which the call ends, also while bytes of the answer arrive.

        Raises:
            RefusedError: The server answered with an error.
            RuntimeError: It cannot be reached, does not answer in time, or answers with something else than JSON; or
                the client was closed.
        """
        patient_until = time.monotonic() + self._patience
        while True:
            try:
                status, text = self._exchange(path, body, end)
                break
            except (OSError, HTTPException) as error:
                if isinstance(error, TimeoutError) or time.monotonic() >= end:
                    raise RuntimeError(f"{self.url}{path} has not answered within {self._timeout:g} s") from error
                if self._closed.is_set():
                    raise RuntimeError(f"the call of {self.url}{path} was given up") from error
                if time.monotonic() >= patient_until:
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
            for connected in self._sockets:
                _shut_down(connected)

    def _exchange(self, path: str, body: dict[str, Any] | None, end: float) -> tuple[int, str]:
        connect = max(0.001, min(_CONNECT, self._timeout, end - time.monotonic()))
        connection, content = self._kind(*self._address, timeout=connect), None if body is None else json.dumps(body)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {connect:g} s") from error
        connected, left = connection.sock, max(0.001, end - time.monotonic())
        connected.settimeout(min(self._timeout, left))
        timer = threading.Timer(min(left, threading.TIMEOUT_MAX), _shut_down, [connected])
        with self._lock:
            self._sockets.add(connected)
        try:
            if self._closed.is_set():
                raise ConnectionAbortedError("the client is closed")
            if left < math.inf:
                timer.start()
            connection.request("GET" if body is None else "POST", path, content, self._headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            # Without a length, http.client takes a connection that was shut down for the end of the answer.
            if time.monotonic() >= end:
                raise TimeoutError
            if self._closed.is_set():
                raise ConnectionAbortedError("the client is closed")
            return answer.status, text
        finally:
            timer.cancel()
            with self._lock:
                self._sockets.discard(connected)
            connection.close()


def _shut_down(connected: socket.socket) -> None:
    """End a call that another thread waits for, also where http.client has let go of its socket."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _message(text: str) -> str:
    """Return the message of an error of FastAPI or vLLM, else the beginning of the text."""
    with suppress(ValueError, TypeError, AttributeError):
        answer = json.loads(text)
        error = answer.get("error") or answer.get("detail") or answer.get("message")
        text = str(error["message"] if isinstance(error, dict) else error or text)
    return text.strip()[:500] or "(empty)"
