"""One local Ray cluster of two nodes for all tests of this folder; its processes end with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

# Read when Ray is imported. Under `uv run` Ray would start each worker by `uv run` again, in a copy of the project.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Otherwise Ray writes a token to the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Ranks get processes of their own, so those that Ray starts ahead, one for each CPU, would never be used.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (Ray's own spelling)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
# Ray counts the GPUs and hides them from each other; only tests marked gpu compute on them, within one node.
NODE: dict[str, Any] = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """The cluster; this process is connected to it."""
    ray = pytest.importorskip("ray", reason="needs the extra rl-train[ray]")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            start_node(cluster)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_node(cluster: Any) -> None:
    """Ray gives a node 30 s to start, which a machine with much else to do may miss."""
    for attempt in range(3):
        try:
            cluster.add_node(**NODE)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == 2:
                raise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts in the layers 0 and 2."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "mixture"
    sizes = SIZES | {"num_hidden_layers": 3, "head_dim": 8, "initializer_range": 0.3}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(path)
    return path
