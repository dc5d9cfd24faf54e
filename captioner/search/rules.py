"""Rules for the next word: length limits, repetition, banned words, bad endings and rare words.

A rule sets the log-probabilities of forbidden words to -inf and leaves all other words unchanged.
There are two exceptions. The option ``neutral`` moves the probability of *man* to *person*, and the
option ``rare_words`` changes all probabilities that the search uses. Captions still report the
model's own probabilities without the effect of ``rare_words``.

Notation: B photos, K beams, V tokens in the vocabulary, T words so far.
"""

from __future__ import annotations

from typing import Any

from captioner.options import SearchOptions
from captioner.search.arrays import Array, log_sum_exp, normalized, on_device
from captioner.search.words import SearchTokens


class Rules:
    """The rules that the search options enable."""

    def __init__(
        self, options: SearchOptions, words: SearchTokens, end_token: int, xp: Any, device: Any
    ) -> None:
        """Copy the words of the rules to the device of the search.

        Args:
            options: Search options.
            words: Token ids of the words in the options.
            end_token: The end token.
            xp: Namespace of the search's arrays (see ``arrays.namespace``).
            device: Device of the search's arrays.
        """
        self.options = options
        self.end_token = end_token
        self.xp = xp
        people = words.people
        self.banned, self.repeatable, self.bad_endings, self.ages, self.not_after_ages = (
            on_device(tokens, xp.int64, xp, device)
            for tokens in (
                words.banned + people.never,
                words.repeatable,
                words.bad_endings,
                people.ages,
                people.not_after_ages,
            )
        )
        self.groups = [on_device(group, xp.int64, xp, device) for group in people.groups]
        self.rarity = on_device(words.rarity, xp.float32, xp, device)

    def merge_people(self, log_probs: Array) -> None:
        """Add the probabilities of words such as *man* to their neutral word, such as *person*.

        The replaced words get probability 0. Without the option ``neutral``, nothing changes.

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V), changed in place.
        """
        for group in self.groups:
            neutral, members = group[0], group[1:]
            merged = log_sum_exp(log_probs[..., group])
            log_probs[..., members] = -self.xp.inf
            log_probs[..., neutral] = merged

    def favour_rare_words(self, log_probs: Array) -> Array:
        """Return log-probabilities that are raised for rare words, (B, K, V).

        Without the option ``rare_words``, the array is returned unchanged.

        Source: Menon et al. 2021 (arXiv:2007.07314), section 4.2, logit adjustment after training.
        Deviation: The frequencies are estimated from the ranks of the words (see
        ``words.rarities``).

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
        """
        if not self.options.rare_words:
            return log_probs
        return normalized(log_probs + self.options.rare_words * self.rarity)

    def forbid(self, log_probs: Array, tokens: Array) -> None:
        """Set the log-probabilities of forbidden words to -inf, in place.

        Values for finished captions are undefined afterwards, because the search does not use them.

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
            tokens: The words so far, (B, K, T).
        """
        xp = self.xp
        options, length = self.options, tokens.shape[2]
        ends = log_probs[..., self.end_token]  # (B, K), a view
        if len(self.banned):
            log_probs[..., self.banned] = -xp.inf
        if length < options.min_length:
            ends[...] = -xp.inf
        if length > 0 and len(self.ages) and len(self.not_after_ages):
            aged = xp.any(tokens[..., -1:] == self.ages, axis=-1)[..., None]  # (B, K, 1)
            kept = log_probs[..., self.not_after_ages]
            log_probs[..., self.not_after_ages] = xp.where(aged, -xp.inf, kept)
        if len(self.bad_endings):
            if length > 0:
                bad = xp.any(tokens[..., -1:] == self.bad_endings, axis=-1)  # (B, K)
                ends[...] = xp.where(bad, -xp.inf, ends)
            if length == options.max_length - 1:  # the last word, which must not be a bad ending
                log_probs[..., self.bad_endings] = -xp.inf
        if options.block_repeats and length > 0:
            self._forbid_words(log_probs, tokens, ~xp.isin(tokens, self.repeatable))
        if 0 < options.block_ngrams <= length:
            self._block_ngrams(log_probs, tokens)

    def _block_ngrams(self, log_probs: Array, tokens: Array) -> None:
        """Forbid every word that would repeat an earlier sequence of ``block_ngrams`` words.

        For the arguments, see ``forbid``.

        Source: Paulus et al. 2018 (arXiv:1705.04304), section 2.5. Deviation: The length of the
        sequences can be chosen. In the paper, it is 3.
        """
        xp, size = self.xp, self.options.block_ngrams
        count = tokens.shape[2] - size + 1  # P, the number of sequences so far
        # All sequences so far, (B, K, P, size)
        ngrams = xp.stack([tokens[..., i : i + count] for i in range(size)], axis=3)
        prefix = tokens[..., None, count:]  # (B, K, 1, size - 1)
        repeated = xp.all(ngrams[..., :-1] == prefix, axis=-1)  # (B, K, P)
        last = ngrams[..., -1]
        equal = last[..., None] == last[..., None, :]  # (B, K, P, P)
        self._forbid_words(log_probs, last, xp.any(equal & repeated[..., None, :], axis=-1))

    def _forbid_words(self, log_probs: Array, words: Array, where: Array) -> None:
        """Set the log-probabilities of selected words to -inf, in place.

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
            words: Token ids, (B, K, n).
            where: True for the words to forbid, (B, K, n). If a word occurs twice in a beam, both
                values must be equal, because either value may be used.
        """
        xp, device = self.xp, log_probs.device
        photos = xp.arange(words.shape[0], device=device)[:, None, None]
        beams = xp.arange(words.shape[1], device=device)[None, :, None]
        kept = log_probs[photos, beams, words]
        log_probs[photos, beams, words] = xp.where(where, -xp.inf, kept)
