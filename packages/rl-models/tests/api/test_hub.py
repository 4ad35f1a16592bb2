"""Checkpoints by their names on a hub: a small server stands for the hub, and the cache is a folder of the test."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from meshes import mesh_of

from parallel_layers import ParallelDims
from parallel_layers.testing import RankPool
from parallel_models.engine import located
from rl_models import Actor

constants = pytest.importorskip("huggingface_hub").constants

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves one repository, `org/tiny`, and counts the files that are fetched."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.fetched = files, Counter[str]()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()  # a shutdown waits as long


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        for kind in ("models", "datasets"):
            if path in (f"/api/{kind}/org/tiny/revision/{name}" for name in ("main", "v2", COMMIT)):
                return self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
            if path == f"/api/{kind}/org/tiny/tree/{COMMIT}":
                found = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.server.files.items()
                ]
                return self.answer(json.dumps(found).encode())
        name = path.removeprefix("/datasets").removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if name in self.server.files:
            self.server.fetched[name] += self.command == "GET"
            return self.answer(self.server.files[name])
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        return self.end_headers()

    do_HEAD = do_GET

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *given: Any) -> None:
        pass


def reach(endpoint: str, cache: Path, *, offline: bool = False) -> None:
    """Have `huggingface_hub` of this process take this hub and this cache."""
    constants.ENDPOINT, constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = endpoint, str(cache), offline
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ENDPOINT", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name))
    return tmp_path / "cache"


@pytest.fixture
def server(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in tiny("llama").iterdir()}
    others = ("pytorch_model.bin", "onnx/model.onnx", "original/x.safetensors", "consolidated.safetensors")
    hub = Hub(files | dict.fromkeys(others, b"not needed"))
    hub.needed = {*files}  # type: ignore[attr-defined]
    yield hub
    hub.shutdown()


def outputs(path: Any, dims: ParallelDims, *place: Any) -> torch.Tensor:
    from rl_models.batch.batch import Batch

    if place:
        reach(*place)
    actor = Actor.from_pretrained(path, dims=dims, device="cpu")
    return actor.log_probs(Batch.from_sequences([[1, 2, 3, 4]])).log_probs


def outputs_on_rank(group: Any, *given: Any) -> torch.Tensor:
    return outputs(*given)


def test_a_name_is_downloaded_once_and_then_read_from_the_cache(tiny: Any, server: Any, cache: Path) -> None:
    expected = outputs(tiny("llama"), ParallelDims())
    for name in ("org/tiny", "org/tiny@v2"):
        assert torch.equal(outputs(name, ParallelDims(), server.endpoint, cache), expected)
    assert server.fetched == dict.fromkeys(server.needed, 1), "only what a checkpoint needs, once"
    server.shutdown()
    server.server_close()
    for offline in (False, True):
        reach(server.endpoint, cache, offline=offline)
        assert torch.equal(outputs("org/tiny", ParallelDims()), expected)


def apart(group: Any, folder: Path) -> None:
    path, dims = "org/tiny" if group.rank() else folder, ParallelDims(dp=2)
    with pytest.raises(ValueError, match=r"ranks were given the models '/.*', 'org/tiny'; give every rank the same"):
        Actor.from_pretrained(path, dims=dims, mesh=mesh_of(dims), device="cpu")


def test_a_name_on_one_rank_and_a_folder_on_another_are_refused(tiny: Any, ranks: RankPool) -> None:
    ranks.run(apart, tiny("llama"), world=2, timeout=20)


def test_a_config_alone_is_enough_for_a_plan(server: Any, cache: Path) -> None:
    reach(server.endpoint, cache)
    folder = Path(located("org/tiny", weights=False))
    assert (folder / "config.json").is_file()
    assert not (folder / "model.safetensors").exists()


def test_ranks_of_a_host_download_once(tiny: Any, server: Any, cache: Path, ranks: RankPool) -> None:
    expected = outputs(tiny("llama"), ParallelDims())
    given = "org/tiny", ParallelDims(tp=2, pp=2), server.endpoint, cache
    for found in ranks.run(outputs_on_rank, *given, world=4, timeout=30):
        assert torch.allclose(found, expected, atol=1e-5)
    assert set(server.fetched.values()) == {1}


@pytest.mark.parametrize(
    ("name", "offline", "message"),
    [
        (
            "org/other",
            False,
            "'org/other' is no local folder, the cache .* does not hold it, and http://.* not give",
        ),
        ("org/tiny", True, "'org/tiny' is no local folder, .* and HF_HUB_OFFLINE forbids the download"),
        ("org/tiny", None, "'org/tiny' is no local folder, .* does not give it: .*; check the name"),
    ],
)
def test_a_name_that_is_not_found_is_refused_within_seconds(
    server: Any, cache: Path, name: str, offline: bool | None, message: str
) -> None:
    reach("http://127.0.0.1:9" if offline is None else server.endpoint, cache, offline=bool(offline))
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        Actor.from_pretrained(name, device="cpu")
    assert time.monotonic() - began < 10
