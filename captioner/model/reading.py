"""The reading of a photo: which content words it shows, and which regions say so.

A small network looks at every region of the encoder's grid, and at their mean:

    h_l   = relu(W a_l + b)
    r_lk  = w_k . h_l                                        what region l says about word k
    z_k   = log(1/L sum_l exp(r_lk)) + u_k . mean_l a_l + c_k    log-odds that the photo shows it
    m_lk  = r_lk + u_k . mean_l a_l + c_k                        the map of the word

So z_k is the log of the mean of exp(m_lk). A word is a stem of ``text.content``, such as "dog" for
dog and dogs.

Source: the word detectors of Fang et al. 2015 (arXiv:1411.4952), section 3, trained on all regions
of a photo at once (multiple-instance learning).
Deviation: the mean of exp(r) in place of the noisy-or of probabilities, whose gradient vanishes
once one region is sure; the term of the mean feature.

Notation: B photos, L regions, D feature size, H hidden size, S stems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.model.attention import widen

HIDDEN = 384
"""Default hidden size."""
DROPOUT = 0.2
"""Share of the features and of the hidden units that training drops."""


class ReadWords(NamedTuple):
    """The reading of some photos, float32."""

    words: Tensor
    """Log-odds that a photo shows each word, (B, S)."""
    regions: Tensor
    """Maps of the words, (B, L, S)."""


class PhotoReading(nn.Module):
    """The network of the equations above."""

    def __init__(self, feature_dim: int, stems: int, hidden: int = HIDDEN) -> None:
        """Create the layers for D features and S stems."""
        super().__init__()
        self.reduce = nn.Linear(feature_dim, hidden)  # W, b
        self.words = nn.Linear(hidden, stems, bias=False)  # w
        self.mean = nn.Linear(feature_dim, stems)  # u, c
        self.dropout = nn.Dropout(DROPOUT)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.zeros_(self.mean.weight)

    @property
    def stems(self) -> int:
        """Number of stems, S."""
        return self.mean.out_features

    @property
    def hidden(self) -> int:
        """Hidden size, H."""
        return self.reduce.out_features

    def start_at(self, shares: Tensor) -> None:
        """Set the biases so that an untrained reading says each word in its share of photos, (S,).

        Without it, the first epochs would only learn how frequent words are.
        """
        with torch.no_grad():
            self.mean.bias.copy_(shares.logit())

    def forward(self, features: Tensor) -> ReadWords:
        """Read photos from the encoder's features, (B, L, D), before the decoder projects them."""
        features = self.dropout(features)
        said = widen(self.words(self.dropout(torch.relu(self.reduce(features)))))  # (B, L, S)
        whole = widen(self.mean(features.mean(dim=1, keepdim=True)))  # (B, 1, S)
        words = said.logsumexp(dim=1) - math.log(said.shape[1]) + whole.squeeze(1)
        return ReadWords(words, said + whole)


def reading_loss(log_odds: Tensor, counts: Tensor, captions: Tensor) -> Tensor:
    """Binomial cross-entropy of how many captions of each photo have each word.

        - sum over photos and words of n log C,    log C = k log p + (n - k) log(1 - p)

    Args:
        log_odds: ``ReadWords.words``, (B, S).
        counts: Captions of each photo with each word, k, (B, S).
        captions: Captions of each photo, n, (B,); a photo with 0 does not count.

    Returns:
        The sum over photos and words, nats, a scalar.
    """
    return (captions.unsqueeze(1) * nn.functional.softplus(log_odds) - counts * log_odds).sum()
