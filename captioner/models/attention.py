"""Soft attention over the regions of a photo.

Notation: B photos, R captions (or beams) a photo, L regions, D feature size, N hidden size,
A attention size. Everything that depends on the photo alone is computed once a photo; captions
and beams share it through broadcasting and are never copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdditiveScorer(nn.Module):
    """Additive (Bahdanau) attention scores.

        e_i = v^T tanh(W_a a_i + W_h h + b)

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), as used by Xu et al. 2015 (arXiv:1502.03044).
    Deviation: none. (v carries no bias: the softmax would cancel it.)
    """

    def __init__(self, feature_dim: int, query_dim: int, attention_dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(feature_dim, attention_dim)
        self.query = nn.Linear(query_dim, attention_dim, bias=False)
        self.energy = nn.Linear(attention_dim, 1, bias=False)

    def keys(self, features: Tensor) -> Tensor:
        """Project the features; call once a photo.

        Args:
            features: (B, L, D).

        Returns:
            (B, L, A), float32: what follows is a tanh, which on a CPU is faster there than in bf16.
        """
        return widen(self.key(features))

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score every region against the query.

        Args:
            query: Previous hidden state, (B, R, N).
            keys: Projected features, (B, L, A).

        Returns:
            Unnormalised scores, (B, R, L), float32.
        """
        mixed = keys.unsqueeze(1) + widen(self.query(query)).unsqueeze(2)  # (B, R, L, A)
        mixed = mixed.tanh_()  # in place: nothing needs the sum, and this is the largest tensor
        energy = widen(self.energy.weight).flatten()
        # Autocast would copy that tensor to bf16 first; mv reads it once, as it is.
        with torch.autocast(mixed.device.type, enabled=False):
            return torch.mv(mixed.flatten(0, 2), energy).view(mixed.shape[:3])


def widen(tensor: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def attend(scores: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into weights and take the weighted mean of the features.

        alpha = softmax(e),   z = sum_i alpha_i a_i

    Args:
        scores: (B, R, L).
        features: (B, L, D).

    Returns:
        The context (B, R, D) and the alphas (B, R, L), rows sum to 1.
    """
    alphas = scores.softmax(dim=-1)
    return alphas.to(features.dtype) @ features, alphas
