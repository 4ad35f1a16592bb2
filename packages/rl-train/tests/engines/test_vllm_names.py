"""The names of vLLM that the engines use, in the sources of the installed vLLM and of unpacked wheels.

`VLLM_SOURCES=/tmp/0.26:/tmp/0.33 pytest --slow packages/rl-train/tests/engines/test_vllm_names.py` reads wheels that
are unpacked there (`pip download vllm==0.33.0 --no-deps --platform manylinux_2_28_x86_64 --only-binary :all:`), for
versions that this machine cannot run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# A class or function -> its arguments, fields or methods; a method's arguments follow its name.
NAMES = {
    "AsyncEngineArgs": "model dtype tensor_parallel_size pipeline_parallel_size enable_expert_parallel "
    "worker_extension_cls skip_tokenizer_init logprobs_mode max_logprobs disable_log_stats enable_prefix_caching "
    "enable_return_routed_experts mm_processor_cache_gb enable_sleep_mode gpu_memory_utilization enable_lora "
    "max_lora_rank max_loras enable_mixed_moe_lora_format load_format hf_overrides max_model_len max_num_seqs",
    "AsyncLLM": "from_engine_args(engine_args,usage_context) generate(prompt,sampling_params,request_id,lora_request) "
    "pause_generation(mode,clear_cache) resume_generation reset_prefix_cache collective_rpc(method,args) sleep(level) "
    "wake_up(tags) add_lora(lora_request) remove_lora(lora_id) shutdown errored model_config",
    "ModelConfig": "max_model_len get_vocab_size",
    "SamplingParams": "n temperature top_k top_p min_p max_tokens stop_token_ids ignore_eos seed logprobs "
    "flat_logprobs detokenize output_kind",
    "RequestOutputKind": "DELTA FINAL_ONLY",
    "CompletionOutput": "index token_ids logprobs routed_experts",
    "FlatLogprobs": "start_indices end_indices token_ids logprobs",
    "LoRARequest": "lora_name lora_int_id lora_path is_3d_lora_weight",
    "UsageContext": "LLM_CLASS",
    "Worker": "reload_weights model_runner rank",
    "GPUModelRunner": "get_model sampler model_config reload_weights(weights_iterator,weights_path)",
    "Sampler": "logprobs_mode",
    "Attention": "process_weights_after_loading(act_dtype)",
    "MLAAttention": "process_weights_after_loading(act_dtype)",
    "UnquantizedLinearMethod": "",
    "UnquantizedEmbeddingMethod": "",
    "UnquantizedFusedMoEMethod": "",
}
# The files with the classes; other files of vLLM have classes of the same names.
FILES = [
    "engine/arg_utils.py",
    "config/model.py",
    "v1/engine/async_llm.py",
    "sampling_params.py",
    "outputs.py",
    "logprobs.py",
    "lora/request.py",
    "usage/usage_lib.py",
    "v1/worker/gpu_worker.py",
    "v1/worker/worker_base.py",
    "v1/worker/gpu_model_runner.py",
    "v1/sample/sampler.py",
    "v1/worker/gpu/sample/sampler.py",
    "model_executor/layers/attention/attention.py",
    "model_executor/layers/attention/mla_attention.py",
    "model_executor/layers/linear.py",
    "model_executor/layers/vocab_parallel_embedding.py",
    "model_executor/layers/fused_moe/unquantized_fused_moe_method.py",
]
# What `VllmServer` asks of a server.
PATHS = ["/server_info", "/v1/models", "/v1/completions", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache"]
COMPLETION = "return_token_ids return_tokens_as_token_ids stop_token_ids min_p ignore_eos logprobs add_special_tokens"


def sources() -> Iterator[Path]:
    """Yield the folders `vllm` that are there."""
    if (spec := find_spec("vllm")) is not None and spec.submodule_search_locations:
        yield Path(spec.submodule_search_locations[0])
    yield from (Path(folder, "vllm") for folder in filter(None, os.environ.get("VLLM_SOURCES", "").split(":")))


def members(trees: list[ast.Module], name: str) -> dict[str, set[str]]:
    """Return the fields and methods of the classes of a name and of their bases, with the methods' arguments."""
    found: dict[str, set[str]] = {}
    for definition in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        if definition.name != name:
            continue
        found |= {name: set()}
        for base in definition.bases:
            found |= members(trees, getattr(base, "id", "")) if getattr(base, "id", "") != name else {}
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
                found.setdefault(node.name, set()).update(arguments | ({"*"} if node.args.kwarg else set()))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.attr, set())
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                found.update(
                    {each.id: set() for each in targets if isinstance(each, ast.Name) and each.id not in found}
                )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [*sources()] or [pytest.param(Path(), marks=pytest.mark.skip(reason="neither vLLM nor VLLM_SOURCES"))],
    ids=lambda path: path.parent.name,
)
def test_vllm_has_the_names_that_the_engines_use(source: Path) -> None:
    trees = [ast.parse((source / file).read_text()) for file in FILES if (source / file).is_file()]
    missing = []
    for name, used in NAMES.items():
        found = members(trees, name)
        assert found, f"no class {name} in {source}"
        for member, _, arguments in (part.partition("(") for part in used.split()):
            known = found.get(member)
            wanted = {each for each in arguments.rstrip(")").split(",") if each}
            if known is None or not ("*" in known or wanted <= known):
                missing.append(f"{name}.{member}: {sorted(wanted - (known or set()))}")
    text = "".join(path.read_text() for path in (source / "entrypoints").rglob("*.py"))
    missing += [path for path in PATHS if f'"{path}"' not in text]
    missing += [field for field in COMPLETION.split() if not re.search(rf"^    {field}: ", text, re.M)]
    assert not missing, missing
