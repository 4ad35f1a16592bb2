"""A checkpoint that ckpt writes as block FP8, read by transformers and by vLLM: differences of log-probs.

    python benchmarks/block_fp8.py llama        # on a GPU, with vLLM; or qwen3_moe

A random model of two layers goes to block FP8 and back by `ckpt convert`. The reference is transformers with the
weights that came back; so the line of vLLM in FP8 shows what quantising the activations changes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import machine
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS = {"llama": (LlamaConfig, SHAPE), "qwen3_moe": (Qwen3MoeConfig, SHAPE | EXPERTS)}
PROMPTS = torch.randint(3, 4000, (8, 32), generator=torch.Generator().manual_seed(0))
CONVERT = [sys.executable, "-c", "from ckpt.cli import app; app()", "convert"]


def make(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.06)
    model.save_pretrained(folder)


@torch.no_grad()
def by_transformers(folder: Path, **options: Any) -> torch.Tensor:
    """Log-probs of the prompts' tokens, `[8, 31]`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, trust_remote_code=False, **options
    ).cuda()
    logits = model(PROMPTS.cuda()).logits.float().log_softmax(-1)
    return logits[:, :-1].gather(-1, PROMPTS[:, 1:, None].cuda())[..., 0].cpu()


def by_vllm(folder: Path) -> torch.Tensor:
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"gpu_memory_utilization": 0.2, "max_model_len": 256, "max_num_seqs": 16}
    engine = LLM(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, **settings)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    answers = engine.generate([{"prompt_token_ids": row.tolist()} for row in PROMPTS], sampling)
    return torch.tensor(
        [
            [found[token].logprob for found, token in zip(answer.prompt_logprobs[1:], row[1:], strict=True)]
            for answer, row in zip(answers, PROMPTS.tolist(), strict=True)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    kind, values = MODELS[parser.parse_args().model]
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        source, fp8, back = (Path(name, part) for part in ("source", "fp8", "back"))
        make(kind(**values), source)
        for arguments in ([source, fp8, "--format", "fp8"], [fp8, back, "--dtype", "bfloat16"]):
            subprocess.run([*CONVERT, *map(str, arguments)], check=True)
        reference = by_transformers(back)
        readers = {
            "transformers, before quantisation": lambda: by_transformers(source),
            "transformers, FP8 read with dequantize=True": lambda: by_transformers(
                fp8, quantization_config=FineGrainedFP8Config(dequantize=True)
            ),
            "vLLM, FP8": lambda: by_vllm(fp8),
            "vLLM, the weights that came back": lambda: by_vllm(back),
        }
        for title, read in readers.items():
            difference = (read() - reference).abs()
            print(f"{title}: mean {difference.mean():.4f}, largest {difference.max():.4f}", flush=True)


if __name__ == "__main__":
    main()
