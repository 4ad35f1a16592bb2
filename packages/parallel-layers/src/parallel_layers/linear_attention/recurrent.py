"""The gated delta rule token by token: the definition, and the step of a decoder.

Shape legend: N sequences, V value heads, D key size, E value size.
"""

import torch
from torch import Tensor


def gated_delta_step(
    state_NVDE: Tensor, q_NVD: Tensor, k_NVD: Tensor, v_NVE: Tensor, decay: Tensor, beta_NV: Tensor
) -> tuple[Tensor, Tensor]:
    """Bring one token to each of N states: return the output `[N, V, E]` and the new states `[N, V, D, E]`.

        S' = diag(exp(g)) S,   S = S' + β k (v - S'ᵀ k)ᵀ,   o = Sᵀ q

    `decay` is g, `[N, V]` for one factor per head (https://arxiv.org/abs/2412.06464, equation 10) or `[N, V, D]` for
    one per channel (https://arxiv.org/abs/2510.26692, equation 1). The dtype is that of the tensors.
    """
    state = state_NVDE * (decay if decay.dim() == 3 else decay[..., None]).exp()[..., None]
    error = v_NVE - torch.einsum("nvde,nvd->nve", state, k_NVD)
    state = state + torch.einsum("nvd,nve->nvde", k_NVD, beta_NV[..., None] * error)
    return torch.einsum("nvde,nvd->nve", state, q_NVD), state
