"""Hard attention: the context is one sampled region per word, and two losses train the choice.

    s ~ Multinoulli(alpha)          index of the region, sampled with the attention weights
    z = a_s                         context: the features of this region

The choice of a region has no gradient, so cross-entropy alone cannot train the attention weights.
``score_function`` estimates their gradient from sampled choices. ``map_entropy`` is a bonus for
maps that spread over several regions. It prevents early training from settling on one region.

Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1.
Deviation: For half of the photos, the paper replaces the sample with the expected context (the
weighted mean). Here every context is a sample. See also ``score_function``.

Notation: B photos, R captions (or beams) per photo, T steps, L regions.
D feature size, N hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioner.model.attention import AttentionOutput, Memory, Scorer, SoftAttention, softmax
from captioner.options import TrainingConfig


class HardAttention(SoftAttention):
    """Attention to one region: sampled in training mode, and the most probable in eval mode."""

    BASELINE_DECAY = 0.9
    """Decay of the baseline b per batch, as in the paper: b becomes 0.9 b + 0.1 log p."""

    baseline: Tensor
    """Moving average of the log-probability of a word (nats), a scalar that is saved with the
    weights. `score_function` subtracts it to reduce the variance of the estimated gradient. With
    several processes, only the words of the first process update it, and the gradient remains
    unbiased."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the context, the attention weights and the chosen regions.

        The arguments are the same as in ``Attention.forward``.
        """
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        chosen = sample_index(alphas.detach()) if self.training else alphas.argmax(dim=-1)
        picked = torch.zeros_like(alphas).scatter(-1, chosen.unsqueeze(-1), 1.0)
        return AttentionOutput(picked.to(memory.values.dtype) @ memory.values, alphas, chosen)

    @torch.no_grad()
    def observe(self, log_probs: Tensor, mask: Tensor) -> None:
        """Update the baseline with the mean log-probability of a batch's words.

        Args:
            log_probs: Log-probabilities of the true words (nats), (B, R, T).
            mask: True at real words, (B, R, T).
        """
        words = mask.sum()
        mean = (log_probs * mask).sum() / words.clamp(min=1)
        mean = torch.where(words > 0, mean, self.baseline.to(mean.dtype))  # a batch without words
        self.baseline.lerp_(mean.to(self.baseline.dtype), 1 - self.BASELINE_DECAY)


class HardLosses(NamedTuple):
    """The two losses of hard attention, summed over the words of a batch."""

    score_function: Tensor
    """Surrogate loss from `score_function`. Only its gradient is meaningful, not its value."""
    entropy: Tensor
    """Entropy of the attention maps (nats)."""

    def total(self, config: TrainingConfig) -> Tensor:
        """Return the contribution of both losses to the loss that training minimizes.

        The entropy is subtracted, because a high entropy is wanted.
        """
        return config.hard_reward * self.score_function - config.hard_entropy * self.entropy


def hard_losses(
    attention: HardAttention, alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor
) -> HardLosses:
    """Return the losses of sampled regions, and update the baseline in training mode.

    ``attention`` is the attention that sampled the regions. For the other arguments, see
    ``score_function``.
    """
    surrogate = score_function(alphas, chosen, log_probs, mask, attention.baseline)
    if attention.training:
        attention.observe(log_probs, mask)
    return HardLosses(surrogate, (map_entropy(alphas) * mask).sum())


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Return a surrogate loss with the score-function (REINFORCE) estimate as its gradient.

        loss = - sum_t (R_t - b_t) log alpha_t[s_t]
        R_t  = sum over u >= t of log p(y_u)          reward: how probable the later words were
        b_t  = b * (words from t on)                  reward to expect, from the baseline b

    If the true words after a choice are more probable than expected, the gradient raises the
    attention weight of the chosen region s_t. R_t and b_t are constants in the gradient. If this
    loss is added to the cross-entropy, the expected gradient equals the gradient of the expected
    cross-entropy over all choices of regions. Label smoothing and the attention penalty are not
    part of the reward.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, without the factor lambda_r.
    Deviation: The reward of a choice contains only the words from its own position on, because a
    choice cannot change earlier words. The baseline counts the same words. Both changes keep the
    expected gradient and reduce its variance. One sample is drawn per caption.

    Args:
        alphas: Attention weights, (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Log-probabilities of the true words (nats), (B, R, T).
        mask: True at real words, (B, R, T).
        baseline: Mean log-probability of a word in earlier batches (nats), a scalar.

    Returns:
        The sum over words, a scalar.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Mask padding before the logarithm: 0 times the logarithm of an alpha of 0 would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Return the entropy of each attention map (nats), from (..., L) to (...).

    It is 0 if the map selects one region, and ln L if the map is uniform.
    """
    # Clamp, because the gradient of alpha log alpha would be NaN where alpha is 0.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)


def sample_index(probabilities: Tensor) -> Tensor:
    """Sample one index from each row of probabilities, (..., n) to (...).

    ``torch.multinomial`` has the same distribution, but it first waits for the device, in order to
    check the probabilities.

    Source: The exponential race. If each E_i is drawn from Exp(1), the index with the largest
    p_i / E_i is i with probability p_i.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
