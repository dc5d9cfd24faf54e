"""What may not be said next: length, repeated phrases, banned words, bad endings.

A rule sets log-probabilities to -inf and changes nothing else, so what is said keeps the
probability that the model gave it.

Notation: B photos, K beams, V vocabulary, T words so far.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.errors import OptionError
from captioner.vocabulary import BAD_ENDINGS, Vocabulary


class WordNumbers(NamedTuple):
    """The words of the search options, as a vocabulary numbers them."""

    forced: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bad_endings: tuple[int, ...] = ()


def number_words(options: SearchOptions, vocabulary: Vocabulary) -> WordNumbers:
    """Look up the words of the search options.

    A banned word that the vocabulary does not hold is never said anyway.

    Raises:
        ConfigError: A forced word is not in the vocabulary.
    """
    unknown = [word for word in options.forced_words if word not in vocabulary]
    if unknown:
        raise OptionError(
            "{forced_words} contains {words}, which the model does not know; give words from its "
            "vocabulary",
            words=", ".join(unknown),
        )
    endings = BAD_ENDINGS if options.guard_endings else ()
    return WordNumbers(
        tuple(vocabulary.encode(options.forced_words)),
        tuple(vocabulary.encode(word for word in options.banned_words if word in vocabulary)),
        tuple(sorted(vocabulary.encode(word for word in endings if word in vocabulary))),
    )


class Rules:
    """All rules that options ask for."""

    def __init__(
        self, options: SearchOptions, words: WordNumbers, end_token: int, device: torch.device
    ) -> None:
        self.options = options
        self.end_token = end_token
        self.banned = torch.tensor(words.banned, dtype=torch.long, device=device)
        self.bad_endings = torch.tensor(words.bad_endings, dtype=torch.long, device=device)

    def forbid(self, log_probs: Tensor, tokens: Tensor) -> None:
        """Set to -inf, in place, what must not follow.

        Args:
            log_probs: Of the next word, (B, K, V).
            tokens: The words so far, (B, K, T). Sentences that have ended may be given too; what
                becomes of them here does not matter.
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
            if length == options.max_length - 1:  # a sentence that is cut here ends here too
                log_probs.index_fill_(2, self.bad_endings, -torch.inf)
        if 0 < options.block_ngrams <= length:
            _block_ngrams(log_probs, tokens, options.block_ngrams)


def _block_ngrams(log_probs: Tensor, tokens: Tensor, size: int) -> None:
    """Forbid every word that would complete a phrase a second time.

    Source: Paulus et al. 2018 (arXiv:1705.04304), section 2.5, there for three words.
    """
    phrases = tokens.unfold(2, size, 1)  # (B, K, P, size), all phrases said
    open_phrase = tokens[..., tokens.shape[2] - size + 1 :].unsqueeze(2)  # (B, K, 1, size - 1)
    again = (phrases[..., :-1] == open_phrase).all(dim=-1)  # (B, K, P)
    cost = torch.zeros_like(again, dtype=log_probs.dtype).masked_fill_(again, -torch.inf)
    log_probs.scatter_add_(2, phrases[..., -1], cost)
