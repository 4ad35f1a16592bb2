"""`GatedDeltaNetConfig`, `KimiDeltaConfig` and `Mamba2Config`: the descriptions of layers of linear attention.

`StateShape` holds the sizes of the cache of such a layer.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class StateShape(NamedTuple):
    """The sizes of one sequence's entry in the cache of a layer of linear attention, on one rank.

    Attributes:
        conv_inputs: The last W - 1 inputs of the convolution.
        channels: C, the channels of the convolution.
        num_heads, key_dim, value_dim: V, D and E of the state `[V, D, E]`.
    """

    conv_inputs: int
    channels: int
    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """The sizes and variants of a gated delta network, https://arxiv.org/abs/2412.06464. The defaults are Qwen3-Next's.

    With H the hidden size, K key heads of size D, V value heads of size E and the window W, the layer `GatedDeltaNet`
    holds one layout for all families. Rows and channels are in the order that the table names; value head h reads key
    head h // (V / K).

        parameter             full shape              rows                              dtype   divided over tp
        in_proj_qkvz.weight   [2 K D + 2 V E, H]      q (K D), k (K D), v (V E), z (V E)  any     each part by heads
        in_proj_ba.weight     [2 V, H]                b (V), a (V)                        any     no
        conv1d.weight         [2 K D + V E, 1, W]     q, k, v                             fp32    each part by heads
        decay.A_log           [V]                                                         fp32    by heads
        decay.dt_bias         [V]                                                         fp32    by heads
        norm.weight           [E]                                                         any     no
        out_proj.weight       [H, V E]                                                    any     columns by heads

    Every published layout maps to it by rectangles of rows: Qwen3-Next's `in_proj_qkvz` has for each key head its rows
    of q (D), k (D), v (V / K · E) and z (V / K · E), and its `in_proj_ba` for each key head V / K rows of b and V / K
    rows of a. Qwen3.5's `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, and OLMo Hybrid's `q_proj`, `k_proj`,
    `v_proj`, `g_proj` (z), `b_proj` and `a_proj` are whole parts.

    Attributes:
        num_key_heads: K, the heads of queries and keys over all ranks (`linear_num_key_heads`).
        num_value_heads: V, a multiple of K (`linear_num_value_heads`).
        key_head_dim: D, the size of a query or key head (`linear_key_head_dim`).
        value_head_dim: E, the size of a value head (`linear_value_head_dim`).
        conv_kernel_size: W, the tokens that the convolution reads for one output (`linear_conv_kernel_dim`).
        activation: The activation behind the convolution: "silu".
        norm_eps: Epsilon of the norm of the outputs.
        negative_eigenvalues: beta is 2 · sigmoid(b) instead of sigmoid(b) (OLMo Hybrid's `linear_allow_neg_eigval`).
        backend: See `gated_delta_rule`.

    Raises:
        ValueError: V is no multiple of K, a size is below 1, or the activation is unknown.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int = 4
    activation: str = "silu"
    norm_eps: float = 1e-6
    negative_eigenvalues: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        _require_sizes(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_size")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} is not a multiple of num_key_heads={self.num_key_heads}"
            )
        if self.activation not in ("silu", "swish"):
            raise ValueError(f"activation={self.activation!r} is unknown; use 'silu'")

    @property
    def key_dim(self) -> int:
        """The size K · D of all queries or all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """The size V · E of all values."""
        return self.num_value_heads * self.value_head_dim

    def state_shape(self, tp: int = 1) -> StateShape:
        """Return the sizes of a sequence's entry in the cache, on a rank of `tp`."""
        channels = (2 * self.key_dim + self.value_dim) // tp
        heads = self.num_value_heads // tp
        return StateShape(self.conv_kernel_size - 1, channels, heads, self.key_head_dim, self.value_head_dim)


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig:
    """The sizes of Kimi's delta attention, https://arxiv.org/abs/2510.26692. The defaults are Kimi Linear's.

    With H the hidden size, V heads of size D and the window W, the layer `KimiDeltaAttention` holds

        parameter             full shape        rows                         dtype   divided over tp
        in_proj_qkv.weight    [3 V D, H]        q, k, v (V D each)           any     each part by heads
        in_proj_fgb.weight    [2 D + V, H]      f_a (D), g_a (D), b (V)      any     no
        f_b_proj.weight       [V D, D]                                       any     by heads
        g_b_proj.weight       [V D, D]                                       any     by heads
        conv1d.weight         [3 V D, 1, W]     q, k, v                      fp32    each part by heads
        decay.A_log           [V, 1]                                         fp32    by heads
        decay.dt_bias         [V D]                                          fp32    by heads
        norm.weight           [D]                                            any     no
        out_proj.weight       [H, V D]                                       any     columns by heads

    Hugging Face's names of the parts are `q_proj`, `k_proj`, `v_proj`, `f_a_proj`, `g_a_proj`, `b_proj` and `o_proj`.

    Attributes:
        num_heads: V, the heads over all ranks (`linear_num_heads`).
        head_dim: D, the size of a head (`linear_head_dim`).
        conv_kernel_size: W, the tokens that the convolution reads for one output (`linear_conv_kernel_dim`).
        norm_eps: Epsilon of the norm of the outputs.
        backend: See `gated_delta_rule`.

    Raises:
        ValueError: A size is below 1.
    """

    num_heads: int
    head_dim: int
    conv_kernel_size: int = 4
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        _require_sizes(self, "num_heads", "head_dim", "conv_kernel_size")

    @property
    def value_dim(self) -> int:
        """The size V · D of all queries, keys or values."""
        return self.num_heads * self.head_dim

    def state_shape(self, tp: int = 1) -> StateShape:
        """Return the sizes of a sequence's entry in the cache, on a rank of `tp`."""
        heads = self.num_heads // tp
        return StateShape(self.conv_kernel_size - 1, 3 * self.value_dim // tp, heads, self.head_dim, self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """The sizes and variants of a Mamba-2 layer, https://arxiv.org/abs/2405.21060. The defaults are Nemotron-H's.

    With H the hidden size, V heads of size E, G groups, the state size D and the window W, the layer `Mamba2` holds

        parameter             full shape               rows                                          dtype
        in_proj.weight        [2 V E + 2 G D + V, H]   z (V E), x (V E), B (G D), C (G D), dt (V)    any
        conv1d.weight         [V E + 2 G D, 1, W]      x, B, C                                       fp32
        conv1d.bias           [V E + 2 G D]            x, B, C                                       fp32
        state_space.A_log     [V]                                                                    fp32
        state_space.D         [V]                                                                    fp32
        state_space.dt_bias   [V]                                                                    fp32
        norm.weight           [V E]                                                                  any
        out_proj.weight       [H, V E]                                                               any

    Tensor parallelism divides each part of the rows, and the columns of `out_proj`, by heads, and B and C by groups.
    With more ranks than groups several ranks hold a group's B and C, and sum the gradients of these rows. The rows are
    those of the published tensors of Nemotron-H and of Granite's hybrids.

    Attributes:
        num_heads: V, the heads over all ranks (`mamba_num_heads`, `mamba_n_heads`).
        head_dim: E, the size of a head (`mamba_head_dim`, `mamba_d_head`).
        num_groups: G, which divides V: the heads of a group share B and C, and the norm (`n_groups`, `mamba_n_groups`).
        state_size: D (`ssm_state_size`, `mamba_d_state`).
        conv_kernel_size: W, the tokens that the convolution reads for one output (`conv_kernel`, `mamba_d_conv`).
        conv_bias: The convolution has a bias (`use_conv_bias`, `mamba_conv_bias`).
        projection_bias: The projections have a bias (`use_bias`, `mamba_proj_bias`).
        step_limit: The smallest and the largest step dt: `(time_step_min, inf)` of Nemotron-H, `time_step_limit` of
            Granite's hybrids.
        norm_eps: Epsilon of the norm of the outputs (`layer_norm_epsilon`, `rms_norm_eps`).

    Raises:
        ValueError: V is no multiple of G, or a size is below 1.
    """

    num_heads: int
    head_dim: int
    num_groups: int = 8
    state_size: int = 128
    conv_kernel_size: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    step_limit: tuple[float, float] = (0.001, math.inf)
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _require_sizes(self, "num_heads", "head_dim", "num_groups", "state_size", "conv_kernel_size")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}")

    @property
    def value_dim(self) -> int:
        """The size V · E of the inputs x of all heads."""
        return self.num_heads * self.head_dim

    def state_shape(self, tp: int = 1) -> StateShape:
        """Return the sizes of a sequence's entry in the cache, on a rank of `tp`."""
        groups, heads = max(1, self.num_groups // tp), self.num_heads // tp
        channels = self.value_dim // tp + 2 * groups * self.state_size
        return StateShape(self.conv_kernel_size - 1, channels, heads, self.state_size, self.head_dim)


def _require_sizes(config: object, *names: str) -> None:
    for name in names:
        if (size := getattr(config, name)) < 1:
            raise ValueError(f"{name}={size} must be at least 1")
