"""`ModelFlops`: the floating-point operations of a model, from its config alone; and the peak rates of devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ckpt
from ckpt import Checkpoint, Role
from ckpt.layout import multiply_adds
from parallel_layers import DecoderConfig, ModelConfig
from parallel_models import model_config
from parallel_models.engine import describe

# Multiply-adds of a token for each entry of a state of linear attention. A delta rule reads the state by the key, adds
# the outer product of key and difference, and reads by the query; Mamba-2 adds and reads.
_OF_A_STATE = {"GatedDeltaNetConfig": 3, "KimiDeltaConfig": 3, "Mamba2Config": 2}

# Part of a device's name -> the peak of its dense products in TFLOP/s, by dtype; of fp32 without TF32. The first match
# counts. The sources are the makers' tables. Where a table counts zeros (2:4 sparsity), the peak is half of its number.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # NVIDIA's tables of GB200 and GB300 NVL72 (72 GPUs) and of HGX B200 and B300 (8 GPUs), divided by the GPUs.
    r"GB[23]00": {"bfloat16": 2500, "float16": 2500, "float32": 80},
    r"B[23]00": {"bfloat16": 2250, "float16": 2250, "float32": 75},
    # NVIDIA's data sheets of H100, H200 and GH200. H800 computes as H100. NVIDIA has no public data sheet of H20.
    r"H[12]00 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    r"H[18]00 PCIe": {"bfloat16": 756, "float16": 756, "float32": 51},
    r"H[12]00|H800|GH200": {"bfloat16": 989, "float16": 989, "float32": 67},
    r"H20": {"bfloat16": 148, "float16": 148, "float32": 44},
    # NVIDIA's data sheets of A100, A30, L40S, L40, L4 and V100; Ada's white paper of the RTX 4090, with sums in fp32.
    r"A[18]00": {"bfloat16": 312, "float16": 312, "float32": 19.5},
    r"A30": {"bfloat16": 165, "float16": 165, "float32": 10.3},
    r"L40S": {"bfloat16": 362, "float16": 362, "float32": 91.6},
    r"L40": {"bfloat16": 181, "float16": 181, "float32": 90.5},
    r"L4": {"bfloat16": 121, "float16": 121, "float32": 30.3},
    r"RTX 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6},
    r"V100S": {"float16": 130, "float32": 16.4},
    r"V100-PCIE": {"float16": 112, "float32": 14},
    r"V100": {"float16": 125, "float32": 15.7},
    # AMD's data sheets. A device of the MI250X is one of its two dies.
    r"MI355X": {"bfloat16": 2517, "float16": 2517, "float32": 157},
    r"MI350X": {"bfloat16": 2307, "float16": 2307, "float32": 144},
    r"MI300X|MI325X": {"bfloat16": 1307, "float16": 1307, "float32": 163},
    r"MI250X": {"bfloat16": 191, "float16": 191, "float32": 47.9},
}
# A name goes on with a word that says nothing of the speed: A100X, L40G, RTX 4090 D and RTX 4090 Laptop are others.
_END = r"(?!\w| D\b| Laptop)"


def peak_flops(device: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device of this name; None: `PEAK_TFLOPS` lacks it, or it is a part of a device."""
    if "MIG" in device:
        return None
    rates = next((rates for name, rates in PEAK_TFLOPS.items() if re.search(rf"(?<!\w)(?:{name}){_END}", device)), {})
    rate = rates.get(str(dtype).removeprefix("torch."))
    return None if rate is None else rate * 1e12


@dataclass(frozen=True)
class ModelFlops:
    """The multiply-adds of a model without recomputation, so that a run that recomputes does not count as faster.

    This is the model FLOPs utilisation of PaLM (https://arxiv.org/abs/2204.02311, appendix B): two FLOPs for each
    multiply-add of a forward, and twice the forward for a backward. Here attention counts the pairs of tokens that a
    causal mask and a window leave, where PaLM counts the square. Norms, activations, embeddings looked up, routing,
    multi-token-prediction layers and vision towers do not count.

    Attributes:
        weights: Multiply-adds of a token in the weights: all of a dense model, the chosen experts of a mixture.
        states: Multiply-adds of a token in the states of linear attention.
        pairs: (window, multiply-adds for each pair of tokens) of each layer of attention; the window is None without.
        adapters: Multiply-adds of a token in adapters; None: all weights are trained.
    """

    weights: int
    states: int
    pairs: tuple[tuple[int | None, int], ...]
    adapters: int | None = None

    @classmethod
    def of(cls, source: Checkpoint | ModelConfig, role: Role = "causal_lm", lora: Any = None) -> ModelFlops:
        """Count a model by its config; `lora` are the options or the folder of adapters, None without.

        Raises:
            ValueError: The family is unknown.
        """
        model = model_config(source) if isinstance(source, Checkpoint) else source
        layout = ckpt.layout_for(model.hf, target="parallel", role=role)
        layers = [model.layer(number) for number in range(model.num_layers)]
        adapters = None
        if lora is not None:
            shapes = describe(lora, layout, str(source)).layout.canonical
            shares = {name: layout.active_share if ".experts." in name else 1 for name in shapes}
            sizes = {name: torch.Size(tensor.shape).numel() for name, tensor in shapes.items()}
            adapters = int(sum(shares[name] * size for name, size in sizes.items()))
        return cls(
            multiply_adds(layout),
            sum(map(_state, layers)),
            tuple((layer.window, pair) for layer in layers if (pair := _pair(layer))),
            adapters,
        )

    def forward(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward of packed sequences of these lengths."""
        tokens = sum(lengths)
        scores = sum(pair * causal_pairs(lengths, window) for window, pair in self.pairs)
        return 2.0 * ((self.weights + self.states + (self.adapters or 0)) * tokens + scores)

    def update(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward and a backward; frozen weights have no gradient of their own."""
        frozen = 0 if self.adapters is None else self.weights
        return 3 * self.forward(lengths) - 2.0 * frozen * sum(lengths)


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Return the number of pairs (token, token that it attends to) of sequences of these lengths."""
    inside = [min(length, window or length) for length in lengths]
    return sum(few * (few + 1) // 2 + (length - few) * few for length, few in zip(lengths, inside, strict=True))


def _pair(layer: DecoderConfig) -> int:
    """Return the multiply-adds of a layer for each pair of tokens: scores and values of all query heads."""
    if layer.mixer == "mlp" or layer.linear_attention is not None:
        return 0
    sizes = layer.latent
    assert layer.head_dim is not None
    of_head = 2 * layer.head_dim if sizes is None else sizes.qk_head_dim + sizes.v_head_dim
    return layer.num_heads * of_head


def _state(layer: DecoderConfig) -> int:
    """Return the multiply-adds of a token in the state `[V, D, E]` of a layer of linear attention."""
    if layer.linear_attention is None:
        return 0
    shape = layer.linear_attention.state_shape()
    return _OF_A_STATE[type(layer.linear_attention).__name__] * shape.num_heads * shape.key_dim * shape.value_dim
