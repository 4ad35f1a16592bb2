"""`GatedDeltaNetConfig`: the description of a gated delta network's layer."""

from dataclasses import dataclass


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
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_size"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name}={size} must be at least 1")
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
