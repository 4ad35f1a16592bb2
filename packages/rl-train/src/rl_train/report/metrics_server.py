"""`MetricsServer`: the metrics of a run for Prometheus."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

_ADDRESS = "127.0.0.1"
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def check_port(port: int) -> None:
    """Raise ValueError if another program listens on a port of this machine; 0: no port is wanted."""
    try:
        if port:
            socket.create_server((_ADDRESS, port)).close()
    except OSError as error:
        raise ValueError(
            f"metrics_port={port} of {_ADDRESS} cannot be taken ({error.strerror}); choose a free port"
        ) from None


def exposition(step: int, tokens: float, values: Mapping[str, float]) -> str:
    """Return the metrics of the last step in Prometheus's text format, version 0.0.4.

    A name with characters that the format does not take, such as `eval/pass@4`, has "_" in their places, and the whole
    name as the label `metric`. See https://prometheus.io/docs/instrumenting/exposition_formats.
    """
    lines = []
    for name, number in (("rl_train_steps_total", step), ("rl_train_tokens_total", tokens)):
        lines += [f"# TYPE {name} counter", f"{name} {_number(number)}"]
    families: dict[str, list[str]] = {}
    for metric, value in values.items():
        name = f"rl_train_{re.sub('[^a-zA-Z0-9_]', '_', metric)}"
        text = metric.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = "" if name == f"rl_train_{metric}" else f'{{metric="{text}"}}'
        families.setdefault(name, []).append(f"{name}{label} {_number(value)}")
    for name, samples in families.items():
        lines += [f"# TYPE {name} gauge", *samples]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else {"inf": "+Inf", "-inf": "-Inf"}.get(str(value), "NaN")


class MetricsServer:
    """Serves the metrics of the last step at `http://127.0.0.1:PORT/metrics`, in a thread.

    `rl_train_steps_total` counts the steps of the whole run, `rl_train_tokens_total` the tokens since it was started or
    resumed.
    """

    def __init__(self, port: int) -> None:
        check_port(port)
        self._tokens, self._content = 0.0, exposition(0, 0, {}).encode()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                content = server._content if is_known else b"the metrics are at /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", _CONTENT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Log no request."""

        self._server = ThreadingHTTPServer((_ADDRESS, port), Handler)
        Thread(target=self._server.serve_forever, name="metrics server", daemon=True).start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Serve the metrics of a step from now on."""
        self._tokens += values.get("tokens", 0)
        self._content = exposition(step, self._tokens, values).encode()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
