"""`Browser`: headless Chromium, by the DevTools protocol over two pipes.

It needs the program `chromium` and no package; tests skip without it. Debian: `apt-get install
--no-install-recommends chromium`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

SECONDS = 20.0
# Pages are local files; nothing leaves the machine.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--allow-file-access-from-files", "--no-first-run", "--disable-background-networking"),
)


class Browser:
    """A page of Chromium; a context manager that ends the program.

    Args:
        profile: Folder for what the browser stores.

    Attributes:
        problems: The errors and warnings of the page's console so far.
    """

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            pytest.skip("there is no chromium: apt-get install --no-install-recommends chromium")
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # The protocol's pipes are file descriptors 3 and 4 of the program, so they come from elsewhere.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_commands, write_answers)]
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}', program, *FLAGS]
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([*shell, f"--user-data-dir={profile}", "about:blank"], pass_fds=ends, **silent)
        for end in (read_commands, write_answers, *ends):
            os.close(end)
        self._buffer, self._number, self._session, self._events = b"", 0, "", []
        self.problems = list[str]()
        (target,) = (one["targetId"] for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer of the browser to a command of the protocol."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while (answer := self._next(end)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def open(self, address: str | Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open an address or a file, and wait until it is loaded."""
        self.show(width, height, dark=dark)
        self._events.clear()
        self.call("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        end = time.monotonic() + SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next(end))

    def show(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Change the size of the window in pixels, and its mode."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} was not true within {SECONDS:g} s")
            time.sleep(0.1)
        return value

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write the page, or all of it below the window too, as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _next(self, end: float) -> dict[str, Any]:
        """Return the next message of the browser."""
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"chromium did not answer within {SECONDS:g} s")
            if not (data := os.read(self._answers, 1 << 16)):
                raise RuntimeError(f"chromium ended with status {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = dict(json.loads(line))
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
            self.problems.append(json.dumps(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(values["entry"]["text"])
        return message
