"""What trains hard attention, whose sampled regions pass no gradient.

Notation: B photos, R captions per photo, T steps, L regions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Surrogate whose gradient is the score-function (REINFORCE) estimate for sampled regions.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    R_t and b_t are constants. Added to cross-entropy, it makes the expected gradient that of the
    cross-entropy's expectation over all choices of regions. Label smoothing and the attention
    penalty are not part of the reward.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, without the factor lambda_r.
    Deviation: a choice is credited only for words from its own position on, as it cannot change
    earlier ones, and the baseline counts those words, b_t = b * (words left). Both keep the
    expectation and reduce the variance. One sample per caption.

    Args:
        alphas: (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Of the true words, nats, (B, R, T).
        mask: (B, R, T), True at real words.
        baseline: Mean log-probability of a word in earlier batches, nats, a scalar.

    Returns:
        The sum over words, a scalar.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Mask padding before the logarithm: 0 times the log of a vanished alpha would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Entropy of attention maps (..., L) in nats: 0 for one region, ln L for a uniform map."""
    # Clamp: where alpha is 0 the gradient of its logarithm would be NaN.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)
