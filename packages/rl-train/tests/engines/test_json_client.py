"""`JsonClient`: its URLs, its key, its timeouts and its end."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from rl_train.engines.json_client import JsonClient


@pytest.mark.parametrize("url", ["http://host", "http://:80", "ftp://host:1", "http://host:x", "http://host:1/v1"])
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not the URL of a server; give http://HOST:PORT"):
        JsonClient(url)


def test_silence_has_an_end_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"/health has not answered within 0.1 s"):
            JsonClient(url, timeout=0.1).call("/health")
        connection, _ = listener.accept()
        with connection:
            assert b"Authorization: Bearer secret" in connection.recv(4096)

        client, errors = JsonClient(url), list[str]()

        def call() -> None:
            try:
                client.call("/health")
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.05)
        client.close()
        thread.join(5)
        assert errors == [f"the call of {url}/health was given up"]
        with pytest.raises(RuntimeError, match="given up"):
            client.call("/health")


@pytest.mark.parametrize("header", ["", "Content-Length: 999\r\n"])
@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_of_many_small_parts_has_an_end(header: str, closes: bool) -> None:
    """Each part comes in time, with and without a length; the status line alone, and a client that closes, end, too."""
    stopped = threading.Event()

    def answer(listener: socket.socket, begin: str) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(begin.encode())
            while not stopped.wait(0.02):
                with suppress(OSError):
                    connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2)
        for begin in (f"HTTP/1.1 200 OK\r\n{header}\r\n", "HTTP/1.1 200 O"):
            threading.Thread(target=answer, args=(listener, begin), daemon=True).start()
            start = time.monotonic()
            if closes:
                client = JsonClient(client.url)
                threading.Timer(0.2, client.close).start()
            with pytest.raises(RuntimeError, match="given up" if closes else "/answer has not answered within 0.2 s"):
                client.call("/answer", **({} if closes else {"end": start + 0.2}))
            assert 0.2 <= time.monotonic() - start < 2
    stopped.set()
