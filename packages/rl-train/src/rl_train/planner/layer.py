"""Plan the memory that one decoder layer saves for its backward, from the config alone.

All numbers are bytes for each token of a rank. They hold for torch's own kernels, or for the fused kernels of a GPU
(norms, rotation and SwiGLU), which save their inputs alone. H is the hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel_layers import DecoderConfig, ModelConfig
from parallel_layers.memory import Recompute
from parallel_layers.model import NORM_PLACEMENTS
from parallel_layers.moe import MoEConfig
from parallel_models.model import Boundary


@dataclass(frozen=True)
class Division:
    """The sharding of a layer over tp: 1/tp of the tokens between blocks, each expert over `expert_tp` (tp or 1) ranks.

    Attributes:
        size: The bytes of an element.
        fused: Whether fused kernels compute norms, rotation and SwiGLU.
        product: The bytes of an element of a linear's input, kept for the gradient of the weight: 1 in FP8.
        lora_rank: The rank of adapters on every projection; 0: none.
        adapted_experts: The projections of routed experts with adapters, "gate_up_proj" and "down_proj".
        base_float8: Whether the frozen projections under adapters are in FP8.
    """

    tp: int
    expert_tp: int
    size: int
    fused: bool = False
    product: int = 0
    lora_rank: int = 0
    adapted_experts: frozenset[str] = frozenset()
    base_float8: bool = False

    def hidden(self, config: DecoderConfig) -> int:
        """Return the elements of H for each token between blocks."""
        return -(-config.hidden_size // self.tp)

    @property
    def kept(self) -> int:
        """Return the bytes of an element of a linear's input."""
        return self.product or self.size

    def norm(self, width: int, *, fused: bool = False) -> int:
        """Return the bytes of a norm's input and of its output.

        Without a fused kernel the input is fp32, and the gradient of the weight needs the normalised input as well.
        """
        unfused = 4 if self.lora_rank else 2 * 4
        return (self.size if fused else unfused) * width + self.kept * width

    def hidden_norm(self, config: DecoderConfig) -> int:
        """Return the bytes of a norm of hidden states; LayerNorm computes the normalised input again."""
        recomputed = 4 * self.hidden(config) if config.normalization == "layer" else 0
        return self.norm(self.hidden(config), fused=self.fused and not recomputed) - recomputed


class Savings(NamedTuple):
    """Options that save activations: the layers or MLPs that are computed again, and the tiles of a dense MLP."""

    recompute: Recompute = None
    tiles: int = 1


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer holds for each token.

    Attributes:
        entry: The layer's input; "full" recomputation saves nothing else.
        attention: Saved by the norms and by the attention.
        mlp: Saved inside the MLP or the experts; the norm's output, which is their input, counts as attention.
        backward: Needed in addition while the MLP runs backward.
        dense: Whether the MLP is dense, and so may be computed in tiles.
    """

    entry: int
    attention: int
    mlp: int
    backward: int
    dense: bool

    def saved(self, number: int, savings: Savings) -> int:
        """Return the bytes held from the forward of layer `number` until its backward."""
        recompute = savings.recompute
        if recompute == "full" or _listed(number, recompute):
            return self.entry
        return self.attention + (0 if recompute == "selective" or self._tiles(savings) > 1 else self.mlp)

    def working(self, number: int, savings: Savings) -> int:
        """Return the further bytes while the layer runs backward: recomputed activations and gradients."""
        tiles = self._tiles(savings)
        recomputes = savings.recompute is not None or tiles > 1
        recomputed = self.attention + self.mlp // tiles - self.saved(number, savings) if recomputes else 0
        # The gradients of the tiles' inputs are joined at the end.
        joined = self.entry if tiles > 1 else 0
        return self.backward // tiles + max(0, recomputed) + joined

    def _tiles(self, savings: Savings) -> int:
        return savings.tiles if self.dense else 1


def layer_bytes(config: DecoderConfig, division: Division) -> LayerBytes:
    """Return the bytes that one layer saves."""
    hidden, size = division.hidden(config), division.size
    norms = sum(name is not None for name in NORM_PLACEMENTS[config.norm_placement])
    attention = norms * division.hidden_norm(config)
    if config.norm_placement == "sandwich":  # sums with the norms of outputs are the inputs of other norms
        attention -= 2 * division.kept * hidden
    attention += _latent_attention(config, division) if config.latent is not None else _attention(config, division)
    if config.moe is None:
        width = -(-config.intermediate_size // division.tp)
        # Gated: gate, up, activation and product; else up and activation. A fused kernel saves no activation.
        mlp = size * (_inside(config, division) - 1) * width + division.kept * width
    else:
        width, elements = _experts(config, config.moe, division)
        mlp = size * elements
    # A fused projection of queries, keys and values has three adapters, one of gate and up two.
    attention += size * 4 * division.lora_rank
    mlp += size * 3 * division.lora_rank if config.moe is None else 0
    entry = size * hidden
    if (further := -(-config.per_layer_size // division.tp)) > 0:
        # The layer's further input, the gate, the activation, the product; then the last norm, and the gate's input.
        entry += size * further
        attention += 4 * size * further + division.hidden_norm(config) - division.kept * hidden + size * hidden
    if config.shared_kv == "store":
        entry += 2 * size * _keys(config, division)
    return LayerBytes(entry, attention, mlp, size * 2 * width, config.moe is None)


class ChunkBytes(NamedTuple):
    """Bytes that a pipeline's chunk holds for each token beside its layers.

    Attributes:
        before, behind: The tensors that it receives and passes on (`parallel_models.model.Boundary`); 0 at the
            model's ends.
        extra: In the first chunk, what the norm of all layers' further inputs saves; in a later one, received keys and
            values.
    """

    before: int
    behind: int
    extra: int


def chunk_bytes(model: ModelConfig, chunk: Sequence[int], division: Division) -> ChunkBytes:
    """Return the bytes of a chunk with these layers."""
    before, behind = (
        Boundary.before(edge, model, division.tp, sequence_parallel=division.tp > 1)
        for edge in (chunk[0], chunk[-1] + 1)
    )
    extra = division.size * before.kept_columns
    if not chunk[0]:
        extra = division.norm(before.inputs, fused=division.fused) - division.kept * before.inputs
    received = before.columns if chunk[0] else 0
    passed_on = behind.columns if chunk[-1] + 1 < model.num_layers else 0
    front, back = (division.size * -(-columns // division.tp) for columns in (received, passed_on))
    return ChunkBytes(front, back, -(-extra // division.tp))


def _inside(config: DecoderConfig, division: Division) -> int:
    """Return the tensors of the MLP's width that one MLP saves."""
    if not config.gated_mlp:
        return 2
    return 3 if division.fused and config.activation == "silu" else 4


def _attention(config: DecoderConfig, division: Division) -> int:
    assert config.head_dim is not None
    queries = config.num_heads // division.tp * config.head_dim
    keys = 0 if config.shared_kv == "reuse" else _keys(config, division)
    # The rotated queries and keys, the values, the output; and the log-sum-exp of every head.
    saved = division.size * (queries + 2 * keys) + division.kept * queries + _statistics(config, division)
    if not division.fused or config.qk_norm is not None:
        # The fused projection: the fused rotation splits it into new tensors, and saves nothing.
        saved += division.size * (queries + (0 if config.keys_as_values else keys))
    if config.value_norm and not division.fused:
        saved += (4 if division.size == 4 else 8) * keys
    if config.qk_norm is not None and not division.fused:
        # The normalised queries and keys in fp32, and an fp32 copy of their input where that has another dtype.
        saved += (4 if division.size == 4 else 8) * (queries + keys)
    return saved


def _keys(config: DecoderConfig, division: Division) -> int:
    assert config.head_dim is not None
    return max(1, config.num_kv_heads // division.tp) * config.head_dim


def _latent_attention(config: DecoderConfig, division: Division) -> int:
    sizes = config.latent
    assert sizes is not None
    heads = config.num_heads // division.tp
    # The assembled queries and keys, the projected keys and values, and the output.
    inside = heads * (2 * sizes.qk_head_dim + sizes.qk_nope_head_dim + 2 * sizes.v_head_dim)
    queries = sizes.q_lora_rank or 0
    latents = queries + sizes.kv_lora_rank + sizes.qk_rope_head_dim
    norms = -(-division.norm(queries + sizes.kv_lora_rank) // division.tp)
    return division.size * (inside + latents) + norms + _statistics(config, division)


def _statistics(config: DecoderConfig, division: Division) -> int:
    return 4 * (2 + config.num_heads // division.tp)


def _experts(config: DecoderConfig, moe: MoEConfig, division: Division) -> tuple[int, int]:
    """Return the width of a token's experts and the elements saved, with the rows sent to the experts and back."""
    # Whole experts see 1/tp of the tokens on each rank; sharded experts see all tokens.
    width = -(-moe.top_k * moe.intermediate_size // division.tp)
    sent = moe.top_k * division.expert_tp / division.tp
    rows = int(sent * config.hidden_size)
    shared = -(-moe.shared_intermediate_size // division.tp)
    inside = _inside(config, division)
    if not division.lora_rank:
        # FP8 rows and inputs of "down" are smaller.
        less = (width + rows) * (division.size - division.kept) // division.size
        return width + shared, inside * (width + shared) + 2 * rows - less
    # Gate and up are always saved. An adapter saves its input and its output of A; a frozen FP8 GEMM saves neither.
    adapted = division.adapted_experts
    widths = max(2 if division.base_float8 else inside - 1, 2 + ("down_proj" in adapted))
    inputs = rows if "gate_up_proj" in adapted or not division.base_float8 else 0
    products = int(sent * division.lora_rank * len(adapted))
    return width + shared, widths * width + inside * shared + inputs + products


def _listed(number: int, recompute: Recompute) -> bool:
    return recompute is not None and not isinstance(recompute, str) and number in recompute
