"""Metrics for Prometheus: the text by its own client's parser, and the server."""

from __future__ import annotations

import math
import socket
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from rl_train.report.loggers import Loggers
from rl_train.report.metrics_server import MetricsServer, check_port, exposition

VALUES = {
    "reward": 0.25,
    "eval/pass@4": 0.5,
    'reward/a"b\\c\nd': 1.0,
    "reward_a_b_c_d": 2.0,
    "kl": math.nan,
    "loss": -math.inf,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_client_reads_each_metric_once() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    families = list(parser.text_string_to_metric_families(exposition(7, 900, VALUES)))
    samples = {(s.name, s.labels.get("metric")): s.value for family in families for s in family.samples}
    assert samples.pop(("rl_train_steps_total", None)) == 7
    assert samples.pop(("rl_train_tokens_total", None)) == 900
    assert math.isnan(samples.pop(("rl_train_kl", None)))
    assert samples == {
        ("rl_train_reward", None): 0.25,
        ("rl_train_eval_pass_4", "eval/pass@4"): 0.5,
        ("rl_train_reward_a_b_c_d", 'reward/a"b\\c\nd'): 1.0,
        ("rl_train_reward_a_b_c_d", None): 2.0,
        ("rl_train_loss", None): -math.inf,
    }
    kinds = {family.name: family.type for family in families}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {"rl_train_steps", "rl_train_tokens"}
    assert len(kinds) == len(families), "each family once"


def test_the_lines_are_those_of_the_format() -> None:
    text = exposition(7, 900, VALUES)
    assert '# TYPE rl_train_eval_pass_4 gauge\nrl_train_eval_pass_4{metric="eval/pass@4"} 0.5\n' in text
    assert '{metric="reward/a\\"b\\\\c\\nd"} 1.0\nrl_train_reward_a_b_c_d 2.0\n' in text
    assert text.endswith("rl_train_kl NaN\n# TYPE rl_train_loss gauge\nrl_train_loss -Inf\n")
    assert text.count("# TYPE rl_train_reward_a_b_c_d ") == 1


def test_loggers_serve_the_last_step_on_loopback_alone(tmp_path: object) -> None:
    port = free_port()
    loggers = Loggers("", tmp_path, {}, 0, pytest.fail, port)  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{port}/metrics"
    with urlopen(url, timeout=5) as response:
        assert b"rl_train_steps_total 0.0" in response.read()
    for step in (1, 2):
        loggers.write(step, {"reward": step / 4, "tokens": 100.0})
    with urlopen(url, timeout=5) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert response.read().decode() == exposition(2, 200, {"reward": 0.5, "tokens": 100.0})
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{port}/", timeout=5)
    with pytest.raises(ValueError, match=f"metrics_port={port} of 127.0.0.1 cannot be taken .*choose a free port"):
        check_port(port)
    loggers.close()
    MetricsServer(port).close()
