"""Hard attention: the context is one sampled region per word, and two losses train the choice.

    s ~ Multinoulli(alpha),   z = a_s

A sample has no gradient, so cross-entropy alone cannot train the alphas. ``score_function``
estimates their gradient. ``map_entropy`` is a bonus that keeps the maps from collapsing early.

Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1.
Deviation: The paper uses the expected context for half of the photos. Here every context is a
sample. See also ``score_function``.

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
    """Attention to one region: a sample in training mode, the most probable one in eval mode."""

    BASELINE_DECAY = 0.9
    """Decay of the baseline, from the paper: b <- 0.9 b + 0.1 log p."""

    baseline: Tensor
    """Moving average of a word's log-probability (nats), saved with the weights. With several
    processes, only the words of the first process update it. The estimate remains unbiased."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self.register_buffer("baseline", torch.zeros(()))

    def forward(self, query: Tensor, memory: Memory) -> AttentionOutput:
        """Return the context, the alphas and the chosen region for the query, (B, R, N)."""
        alphas = softmax(self.scorer(query, memory.keys), memory.mask)
        chosen = sample_index(alphas.detach()) if self.training else alphas.argmax(dim=-1)
        picked = torch.zeros_like(alphas).scatter(-1, chosen.unsqueeze(-1), 1.0)
        return AttentionOutput(picked.to(memory.values.dtype) @ memory.values, alphas, chosen)

    @torch.no_grad()
    def observe(self, log_probs: Tensor, mask: Tensor) -> None:
        """Update the baseline with the mean log-probability of a batch's words."""
        words = mask.sum()
        mean = (log_probs * mask).sum() / words.clamp(min=1)
        mean = torch.where(words > 0, mean, self.baseline.to(mean.dtype))  # a batch without words
        self.baseline.lerp_(mean.to(self.baseline.dtype), 1 - self.BASELINE_DECAY)


class HardLosses(NamedTuple):
    """The two losses of hard attention, summed over the words of a batch."""

    score_function: Tensor
    """Surrogate loss: only its gradient is meaningful."""
    entropy: Tensor
    """Entropy of the maps (nats)."""

    def total(self, config: TrainingConfig) -> Tensor:
        """Return the contribution of both losses to the loss that training minimizes."""
        return config.hard_reward * self.score_function - config.hard_entropy * self.entropy


def hard_losses(
    attention: HardAttention, alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor
) -> HardLosses:
    """Return the losses of sampled regions, and update the baseline in training mode.

    For the arguments, see ``score_function``.
    """
    surrogate = score_function(alphas, chosen, log_probs, mask, attention.baseline)
    if attention.training:
        attention.observe(log_probs, mask)
    return HardLosses(surrogate, (map_entropy(alphas) * mask).sum())


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Return a surrogate loss with the score-function (REINFORCE) estimate as its gradient.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    R_t and b_t are constants. If the surrogate is added to the cross-entropy, the expected gradient
    equals the gradient of the expected cross-entropy over all choices of regions. Label smoothing
    and the attention penalty are not part of the reward.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, without the factor lambda_r.
    Deviation: A choice is credited only for the words from its own position on, because it cannot
    change earlier words. The baseline counts the same words: b_t = b * (words left). Both keep the
    expectation and reduce the variance. One sample is drawn per caption.

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
    """Return the entropy of maps (..., L) in nats: 0 for one region, ln L for a uniform map."""
    # Clamp, because the gradient of log alpha would be NaN where alpha is 0.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)


def sample_index(probabilities: Tensor) -> Tensor:
    """Sample an index from each row of probabilities, (..., n) to (...).

    ``torch.multinomial`` draws the same sample, but it first waits for the device to check the
    values.

    Source: The exponential race, argmax of p_i / E_i with E_i ~ Exp(1).
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
