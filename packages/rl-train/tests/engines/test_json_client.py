"""`JsonClient`: its URLs, its key, its timeouts and its end."""

from __future__ import annotations

import socket
import threading
import time

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
