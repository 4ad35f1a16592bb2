"""Which causal language models of the installed transformers does `patch(model, family="auto")` accept?

    uv run python benchmarks/any_family.py [MODEL_TYPE ...]

Makes a tiny random model of every `model_type` and patches it. Prints one line for each type (named in the table of
families, accepted with the errors of its proof, or refused with the reason), and the counts.
"""

import logging
import sys
import warnings
from collections import Counter

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_patches import patch, supported_model_types
from hf_patches.testing import one_by_one, random_sequences, randomize
from parallel_layers import PackedSequence

# What a config has under these names becomes small.
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "ffn_dim": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# No special token may lie outside the small vocabulary.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, object]] = {
    **{name: {"num_key_value_heads": 4} for name in ("axk1", "minicpm3", "youtu")},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}
LARGEST = 20_000_000
LENGTHS = (40, 1, 13, 26)


def _may_be_set(config: PreTrainedConfig, name: str) -> bool:
    try:
        value = getattr(config, name)
    except Exception:  # each config class refuses in its own way
        return False
    return isinstance(value, int | None) and not isinstance(getattr(type(config), name, None), property)


def tiny(model_type: str) -> PreTrainedModel:
    """A tiny model of a type, or a ValueError if the names above do not make it small."""
    known = AutoConfig.for_model(model_type)
    small = {name: value for name, value in SMALL.items() if _may_be_set(known, name)} | TOKENS
    config = AutoConfig.for_model(model_type, **small | OTHERS.get(model_type, {}))
    with torch.device("meta"):
        parameters = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"the smallest model here has {parameters:,} parameters")
    torch.manual_seed(0)
    return randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed=0)


def outcome(model_type: str) -> tuple[str, str]:
    """Return the outcome for a model type in one word, and the reason."""
    if model_type in supported_model_types():
        return "named", "in the table of families"
    try:
        model = tiny(model_type).eval()
        sequences = random_sequences(LENGTHS, model.config.vocab_size)
        expected = one_by_one(model, sequences).log_probs
    except Exception as error:  # each config class refuses in its own way
        return "not made", f"{type(error).__name__}: {error}"
    try:
        proof = patch(model, family="auto").report().proof
    except ValueError as error:
        return "refused", str(error)
    assert proof is not None
    error = (model(packed=PackedSequence.from_sequences(sequences)).log_probs - expected).abs().max().item()
    if not error < 1e-4:
        return "ACCEPTED BUT WRONG", f"log-probs differ by {error:.3g}"
    return (
        "accepted",
        f"log-probs to {error:.1g}, outputs to {proof.output_error:.1g}, gradients to {proof.gradient_error:.1g}",
    )


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for model_type in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        what, why = outcome(model_type)
        counts[what] += 1
        print(f"{model_type}: {what}: {' '.join(why.split())}", flush=True)
    print(f"transformers {transformers.__version__}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
