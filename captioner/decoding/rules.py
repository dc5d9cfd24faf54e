"""Rules on the next word: length limits, repeated n-grams and words, banned words, bad endings.

A rule only sets log-probabilities to -inf, so that every other word keeps the model's probability.

Notation: B photos, K beams, V vocabulary, T words so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.words import SearchTokens
from captioner.hardware import upload


class Rules:
    """All rules enabled by the search options."""

    def __init__(
        self, options: SearchOptions, words: SearchTokens, end_token: int, device: torch.device
    ) -> None:
        self.options = options
        self.end_token = end_token
        self.banned, self.repeatable, self.bad_endings = (
            upload(torch.tensor(tokens, dtype=torch.long), device)
            for tokens in (words.banned, words.repeatable, words.bad_endings)
        )

    def forbid(self, log_probs: Tensor, tokens: Tensor) -> None:
        """Set the log-probabilities of forbidden words to -inf, in place.

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
            tokens: The words so far, (B, K, T). The result for finished captions is unspecified.
        """
        options, length = self.options, tokens.shape[2]
        if len(self.banned):
            log_probs.index_fill_(2, self.banned, -torch.inf)
        if length < options.min_length:
            log_probs[..., self.end_token].fill_(-torch.inf)
        if len(self.bad_endings):
            if length > 0:
                bad = (tokens[..., -1:] == self.bad_endings).any(dim=-1)  # (B, K)
                log_probs[..., self.end_token].masked_fill_(bad, -torch.inf)
            if length == options.max_length - 1:  # a truncated caption ends here too
                log_probs.index_fill_(2, self.bad_endings, -torch.inf)
        if options.block_repeats and length > 0:
            repeated = ~torch.isin(tokens, self.repeatable)
            cost = torch.zeros_like(repeated, dtype=log_probs.dtype)
            log_probs.scatter_add_(2, tokens, cost.masked_fill_(repeated, -torch.inf))
        if 0 < options.block_ngrams <= length:
            _block_ngrams(log_probs, tokens, options.block_ngrams)


def _block_ngrams(log_probs: Tensor, tokens: Tensor, size: int) -> None:
    """Forbid every word that would repeat an n-gram of ``size`` words.

    Source: Paulus et al. 2018 (arXiv:1705.04304), section 2.5, for n = 3.
    """
    ngrams = tokens.unfold(2, size, 1)  # (B, K, P, size)
    prefix = tokens[..., tokens.shape[2] - size + 1 :].unsqueeze(2)  # (B, K, 1, size - 1)
    repeated = (ngrams[..., :-1] == prefix).all(dim=-1)  # (B, K, P)
    cost = torch.zeros_like(repeated, dtype=log_probs.dtype).masked_fill_(repeated, -torch.inf)
    log_probs.scatter_add_(2, ngrams[..., -1], cost)
