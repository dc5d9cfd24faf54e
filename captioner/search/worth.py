"""Rewards for words that are probably true of the photo.

The decoder alone prefers words that people often write. Some models also read the photo: before any
caption is written, they estimate for each content word how probably it is true of the photo (see
``model.reading``). With this reading, the search adds the worth of each content word to the word's
log-probability:

    worth(w) = weight * ln(truth(w) / certainty)

truth(w) is the calibrated probability that the word w is true of the photo. ``certainty`` is a
search option. The worth is positive if truth(w) is above ``certainty``. Otherwise, it is negative,
and the word is chosen only if it is much more probable than its alternatives. Words with the same
stem, such as "dog" and "dogs", share a row of the reading and are rewarded once per caption.

With ``certainty``, captions may also end earlier than the decoder would end them. After a word that
ends human captions, the score of an ending is at least as high as its share in human captions
suggests (see ``ENDING_GAIN``). Without this rule, the decoder would complete its sentence with
doubtful words.

Source: Fang et al. 2015 (arXiv:1411.4952), word detectors in the search. Deviation: Their detectors
propose words to a language model. Here, truth weights the words of a decoder that sees the photo.

Notation: N photos, B unfinished photos, K beams per photo, V tokens in the vocabulary, T words so
far, R rows of the reading (one per stem).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.options import SearchOptions
from captioner.search.arrays import Array, log_sum_exp, on_device
from captioner.search.grammar import Grammar
from captioner.text.vocabulary import Vocabulary

WEIGHT, WHOLE_WEIGHT, WHOLE_CERTAINTY = 12.0, 2.0, 0.5
"""Numbers in the equation for the worth.

If the option ``certainty`` is above 0, the weight is ``WEIGHT`` (nats). If it is 0 (whole
sentences), ``WHOLE_WEIGHT`` (nats) and ``WHOLE_CERTAINTY`` replace weight and certainty.
"""

PLAUSIBLE, PENALTY = 3.0, 20.0
"""Limit and penalty for implausible words (nats).

A word is implausible if its log-probability is more than ``PLAUSIBLE`` below the log-probability of
the most probable word. Implausible words are not rewarded. If ``certainty`` is above 0, ``PENALTY``
is also subtracted from their scores. Without it, the search would write nonsense to avoid doubtful
words ("the side of the side"). The words are not excluded completely, because they may be forced
words.
"""

LEAST_WORTH = -12.0
"""Minimum worth of a word (nats). It is limited because a doubtful noun is better than a phrase
without a noun, such as "a white and a girl"."""

ENOUGH, TOO_SHORT = 3, 1.5
"""Number of different content words that a caption should have, and the cost of each missing word
(nats). The cost is subtracted from the score of an ending. Without it, most captions would be as
short as "a plate"."""

ENDING_GAIN = 0.5
"""Amount (nats) that is added to the logarithm of ``Grammar.endings``. The sum is the minimum score
of an ending after a word that ends human captions."""

SURE_ENDING = math.log(0.05)
"""After a word that does not end human captions, a caption may end only if the decoder's own
log-probability of the ending is above this."""

WIDE_SHARE = 0.5
"""Factor for the worth of a general word. For example, "person" is less specific than "man"."""

FUNCTION_WORD, UNKNOWN_WORD = -1, -2
"""Values of ``Worth.rows`` for function words, and for content words outside of the reading."""


class Worth(NamedTuple):
    """The probability that each word is true of each photo, and the grammar of captions."""

    truths: NDArray[np.float32]
    """Probability that the words in each row of the reading are true of the photo, (N, R + 1). The
    last column is for content words that are not in the reading."""
    rows: NDArray[np.int64]
    """Row of each token in the reading, (V,), or ``FUNCTION_WORD``, or ``UNKNOWN_WORD``."""
    grammar: Grammar | None = None
    """Grammar of human captions. If None, captions end only where the decoder ends them, and any
    word may follow any other word."""
    wide: Sequence[Sequence[int]] = ()
    """Groups of tokens. Each group is a general ("wide") word such as "person", followed by the
    specific words that it covers."""


class NoRewards:
    """Replacement for `Rewards` that does not change any score, for photos that were not read."""

    most = 0.0
    """Largest reward of a word (nats), for a word that is certainly true."""

    def widen(self, log_probs: Array, tokens: Array) -> None:
        """Leave the probabilities of all words unchanged."""

    def add(self, log_probs: Array, tokens: Array, photos: Array) -> Array:
        """Return the log-probabilities of the next word unchanged, (B, K, V)."""
        del tokens, photos
        return log_probs


class Forbidden:
    """Tokens that must not follow the last one or two tokens of a caption."""

    def __init__(self, keys: NDArray[np.int64], size: int, xp: Any, device: Any) -> None:
        """Copy the sorted pairs or triples of a ``Grammar`` to the device of the search.

        The tokens before the last token of a pair or triple are called its context: the last word
        of a caption, or its last two words. Because the keys are sorted, the tokens that are
        forbidden after a context are next to each other.

        Args:
            keys: Forbidden pairs or triples, stored as numbers as in ``Grammar``.
            size: Number of tokens, V.
            xp: Namespace of the search's arrays.
            device: Device of the search's arrays.
        """
        starts = np.flatnonzero(np.diff(keys // size, prepend=-1, append=-1))
        self.most = int(np.diff(starts).max(initial=0))
        """Largest number of forbidden tokens after any context."""
        self.xp = xp
        self.keys = on_device(keys, xp.int64, xp, device)

    def remove(self, scores: Array, contexts: Array) -> Array:
        """Return the scores with -inf for all forbidden tokens.

        Args:
            scores: Scores of the next word, (B, K, V).
            contexts: Last word of each caption, or its last two words as the number of a pair,
                (B, K).
        """
        if not self.most:
            return scores
        xp = self.xp
        batch, beams, size = scores.shape
        first = contexts * size
        start, stop = xp.searchsorted(self.keys, first), xp.searchsorted(self.keys, first + size)
        place = start[..., None] + xp.arange(self.most, device=scores.device)
        key = self.keys[xp.clip(place, max=len(self.keys) - 1)]
        # Contexts with fewer forbidden tokens than ``most`` are padded with the token V.
        token = xp.where(place < stop[..., None], key - first[..., None], size)
        each = xp.arange(batch, device=scores.device)[:, None, None]
        beam = xp.arange(beams, device=scores.device)[None, :, None]
        found = xp.zeros((batch, beams, size + 1), dtype=xp.bool, device=scores.device)
        found[each, beam, token] = True
        return xp.where(found[..., :size], -xp.inf, scores)


class Rewards(NoRewards):
    """Rewards for words that are probably true of the photo, according to its reading."""

    def __init__(
        self, worth: Worth, options: SearchOptions, end_token: int, xp: Any, device: Any
    ) -> None:
        """Compute the worth of every word for every photo, and copy it to the search's device.

        For the arguments, see `build_rewards`.
        """
        self.xp = xp
        self.certainty, self.end_token = options.certainty, end_token
        weight = WEIGHT if self.certainty else WHOLE_WEIGHT
        certainty = self.certainty or WHOLE_CERTAINTY
        self.most = weight * math.log(1 / certainty)
        with np.errstate(divide="ignore"):
            values = np.maximum(weight * np.log(worth.truths / certainty), LEAST_WORTH)
        values = np.pad(values, ((0, 0), (0, 1)))  # a last column with worth 0 for function words
        self.unread, self.nothing = values.shape[1] - 2, values.shape[1] - 1
        rows = np.where(worth.rows == UNKNOWN_WORD, self.unread, worth.rows)
        rows = np.where(worth.rows == FUNCTION_WORD, self.nothing, rows)
        share = np.ones(len(rows), np.float32)
        share[[group[0] for group in worth.wide]] = WIDE_SHARE
        self.values = on_device(values, xp.float32, xp, device)  # (N, R + 2)
        self.rows = on_device(rows, xp.int64, xp, device)  # (V,)
        self.share = on_device(share, xp.float32, xp, device)  # (V,)
        self.wide = [on_device(group, xp.int64, xp, device) for group in worth.wide]
        self.endings: Array = None
        self.forbidden: list[Forbidden] = []
        if (grammar := worth.grammar) is None:
            return
        self.forbidden = [
            Forbidden(keys, len(rows), xp, device)
            for keys in (grammar.not_following, grammar.not_third)
        ]
        if self.certainty:
            with np.errstate(divide="ignore"):
                least = np.log(grammar.endings) + ENDING_GAIN
            self.endings = on_device(least, xp.float32, xp, device)  # (V,)
            self.not_ending = on_device(grammar.not_ending, xp.int64, xp, device)

    def widen(self, log_probs: Array, tokens: Array) -> None:
        """Add the probabilities of specific words to the general word that covers them, in place.

        For example, the probabilities of *man* and *woman* are added to *person*, and *man* and
        *woman* keep theirs. A caption may then say *person* if the photo does not show more. This
        happens only with ``certainty``. If the caption already contains a word of the group, the
        general word keeps its own probability. Otherwise, the search might write "a man and a
        person".

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
            tokens: The words so far, (B, K, T).
        """
        xp = self.xp
        for group in self.wide if self.certainty else ():
            # For so few values, == is faster than isin.
            said = xp.any(xp.any(tokens[..., None] == group, axis=3), axis=2)
            own = log_probs[..., group[0]]
            log_probs[..., group[0]] = xp.where(said, own, log_sum_exp(log_probs[..., group]))

    def add(self, log_probs: Array, tokens: Array, photos: Array) -> Array:
        """Add the rewards for true words and early endings to log-probabilities.

        Words that the grammar forbids get a score of -inf.

        Args:
            log_probs: Log-probabilities of the next word, (B, K, V).
            tokens: The words so far, (B, K, T).
            photos: Index of each photo in the original batch, (B,).

        Returns:
            The scores for the search, (B, K, V).
        """
        xp = self.xp
        batch, beams, length = tokens.shape
        values = self.values[photos][:, None, :]  # (B, 1, R + 2)
        values = xp.asarray(xp.broadcast_to(values, (batch, beams, values.shape[2])), copy=True)
        said = self.rows[tokens]  # (B, K, T)
        each = xp.arange(batch, device=said.device)[:, None, None]
        beam = xp.arange(beams, device=said.device)[None, :, None]
        kept = values[each, beam, said]
        # A stem is rewarded once per caption, but a doubtful word always has its cost.
        values[each, beam, said] = xp.where(kept > 0, 0.0, kept)
        reward = values[..., self.rows] * self.share  # (B, K, V)
        least = xp.max(log_probs, axis=2, keepdims=True) - PLAUSIBLE
        implausible = log_probs < least
        scores = log_probs + xp.where(implausible & (reward > 0), 0.0, reward)
        if self.certainty:
            scores = xp.where(implausible, scores - PENALTY, scores)
            # A caption must not be empty.
            scores[..., self.end_token] = log_probs[..., self.end_token] if length else -xp.inf
        if self.endings is not None and length:
            scores[..., self.end_token] = self._end(log_probs[..., self.end_token], tokens, said)
        contexts = [xp.asarray(tokens[..., -1], copy=True)] if length else []
        if length > 1:
            contexts.append(tokens[..., -2] * len(self.rows) + tokens[..., -1])
        for forbidden, context in zip(self.forbidden, contexts, strict=False):
            scores = forbidden.remove(scores, context)
        return scores

    def _end(self, own: Array, tokens: Array, said: Array) -> Array:
        """Compute the score of an ending after the words so far.

        After a word that ends human captions, it is at least ``self.endings``. After other words,
        it is the decoder's own log-probability, or -inf below ``SURE_ENDING``. The cost of missing
        content words is subtracted.

        Args:
            own: The decoder's own log-probability of the ending, (B, K).
            tokens: The words so far, (B, K, T).
            said: Rows of these words in the reading, (B, K, T).

        Returns:
            The scores, (B, K).
        """
        xp = self.xp
        least = self.endings[tokens[..., -1]]
        if tokens.shape[2] > 1:
            pairs = tokens[..., -2] * len(self.rows) + tokens[..., -1]
            not_ending = xp.any(pairs[..., None] == self.not_ending, axis=2)
            least = xp.where(not_ending, -xp.inf, least)
        can_end = xp.isfinite(least)
        end = xp.where(can_end, xp.where(own > least, own, least), own)
        end = xp.where(can_end | (own > SURE_ENDING), end, -xp.inf)
        # Count the different content words: sort the rows, so that equal rows are neighbours.
        ordered = xp.sort(said, axis=2)
        new = xp.concat([xp.ones_like(ordered[..., :1]) > 0, xp.diff(ordered, axis=2) > 0], axis=2)
        count = xp.sum(xp.astype(new & (ordered != self.nothing), xp.int64), axis=2)
        lacking = xp.where(count < ENOUGH, ENOUGH - count, 0)
        return end - TOO_SHORT * xp.astype(lacking, end.dtype)


def build_rewards(
    worth: Worth | None, options: SearchOptions, end_token: int, xp: Any, device: Any
) -> NoRewards:
    """Build the rewards for a search.

    Sampling uses the model's probabilities without rewards.

    Args:
        worth: The probability that each word is true of each photo, or None for no rewards.
        options: Search options.
        end_token: The end token.
        xp: Namespace of the search's arrays (see ``arrays.namespace``).
        device: Device of the search's arrays.
    """
    if worth is None or options.temperature:
        return NoRewards()
    return Rewards(worth, options, end_token, xp, device)


def wide_words(vocabulary: Vocabulary, groups: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Build the groups of tokens for ``Worth.wide``.

    Args:
        vocabulary: The model's vocabulary. Groups with a general word outside of it are left out.
        groups: The general word for each specific word, such as ``words.WIDE_WORDS``.
    """
    found = []
    for wide in dict.fromkeys(groups.values()):
        members = [word for word, other in groups.items() if other == wide]
        if wide in vocabulary:
            found.append((*vocabulary.encode([wide]), *vocabulary.whole_words(members)))
    return found
