"""The reading network, which predicts the content words that a photo shows and where it shows them.

It is a small network that reads the features a_l of every region l, and the mean of all regions.
For each word k, it has the weights w_k and u_k and the bias c_k:

    h_l   = relu(W a_l + b)                     hidden units of region l
    r_lk  = w_k . h_l                           evidence of region l for word k
    g_k   = u_k . mean_l a_l + c_k              evidence of the whole photo for word k
    z_k   = log(1/L sum_l exp(r_lk)) + g_k      log-odds that the photo shows word k
    m_lk  = r_lk + g_k                          map of word k

So z_k is the logarithm of the mean of exp(m_lk) over the regions. Words are stems from
``text.content``. For example, "dog" stands for dog and dogs.

Source: The word detectors of Fang et al. 2015 (arXiv:1411.4952), section 3, trained on all regions
of a photo at once (multiple-instance learning).
Deviation: The paper combines the probabilities of the regions by a noisy-or: the photo shows a word
if any region shows it. Its gradient vanishes once one region is certain, so the mean of exp(r)
replaces it. The evidence of the whole photo, g, is added.

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
"""Dropout probability of the features and the hidden units."""


class ReadWords(NamedTuple):
    """The results of the reading network for a batch of photos, float32."""

    words: Tensor
    """Log-odds z that a photo shows each word, (B, S)."""
    regions: Tensor
    """Map m of each word, (B, L, S)."""


class PhotoReading(nn.Module):
    """The reading network, which computes log-odds and maps of words from a photo's features.

    The equations are in the docstring of the module.
    """

    def __init__(self, feature_dim: int, stems: int, hidden: int = HIDDEN) -> None:
        """Create the layers for D features, S stems and H hidden units."""
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
        """Set the biases c so that the network first predicts how frequent each word is.

        Otherwise, the first epochs would learn only these frequencies. ``shares`` contains the
        share of captions with each word, between 0 and 1, (S,).
        """
        with torch.no_grad():
            self.mean.bias.copy_(shares.logit())

    def forward(self, features: Tensor) -> ReadWords:
        """Read photos from the encoder's features, (B, L, D).

        These are the features before the decoder's projection, if it has one.
        """
        features = self.dropout(features)
        said = widen(self.words(self.dropout(torch.relu(self.reduce(features)))))  # (B, L, S)
        whole = widen(self.mean(features.mean(dim=1, keepdim=True)))  # (B, 1, S)
        words = said.logsumexp(dim=1) - math.log(said.shape[1]) + whole.squeeze(1)
        return ReadWords(words, said + whole)


def reading_loss(log_odds: Tensor, counts: Tensor, captions: Tensor) -> Tensor:
    """Compute the cross-entropy of predicting whether each caption of a photo contains each word.

        - sum over photos and words of (m log p + (n - m) log(1 - p))

    p is the predicted probability of the word, m of the photo's n captions contain the word.

    Args:
        log_odds: ``ReadWords.words``, the log-odds of p, (B, S).
        counts: Number m of the photo's captions that contain each word, (B, S).
        captions: Number n of the photo's captions, (B,). Photos with 0 captions do not count.

    Returns:
        The sum over photos and words (nats), a scalar.
    """
    return (captions.unsqueeze(1) * nn.functional.softplus(log_odds) - counts * log_odds).sum()
