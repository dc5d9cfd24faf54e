"""Search strategies, which decide which continuations to keep and which captions to return.

A continuation is a caption so far with one more word. The search options select the strategy:

    BeamSearch       keeps the most probable continuations (beam_size; 1 is greedy search)
    DiverseBeams     splits the beams into groups that avoid each other's words (beam_groups)
    ForcedWords      keeps separate beams for each number of forced words used (forced_words)
    Sampling         draws one random continuation per caption (temperature, top_k, top_p)

Notation: B photos, K beams per photo (with sampling: samples), V tokens in the vocabulary, T words
so far, C forced words, n returned captions per photo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from captioner.options import SearchOptions
from captioner.search.arrays import Array, argsort, namespace, on_device, top_k
from captioner.search.words import SearchTokens


class Beams(NamedTuple):
    """The captions of all beams so far."""

    scores: Array
    """Sum of the log-probabilities that the search uses, (B, K). An unused beam has -inf."""
    lengths: Array
    """Number of tokens that the score sums over, including the end token, (B, K)."""
    ended: Array
    """True for captions with an end token, (B, K)."""
    tokens: Array
    """Token ids, (B, K, T). Finished captions are padded with end tokens."""
    log_probs: Array
    """The model's own log-probabilities of the tokens, (B, K, T)."""
    parents: Array
    """Beam that each word continued, (B, K, T). The attention and the gate of a word are found in
    this beam of the word's step."""


class Choice(NamedTuple):
    """The continuations that a strategy keeps."""

    scores: Array
    """Score of each caption with its next word, (B, K)."""
    parents: Array
    """Beam that each continuation extends, (B, K)."""
    words: Array
    """Next word of each continuation, (B, K)."""


class Strategy:
    """Base class of the strategies. Subclasses implement ``choose``."""

    gain = 0.0
    """Amount by which the score of an unfinished caption is expected to rise at most (nats).

    Above 0 only if true words are rewarded. It is then the largest reward of a single word, so
    several true words could exceed it.
    """

    def __init__(self, options: SearchOptions) -> None:
        self.options = options
        self.penalty = 0.0 if options.certainty else options.length_penalty
        """Exponent of the length in ``ranks``. With ``certainty``, a caption should contain only
        the words that are worth their cost, so long captions are not favoured."""

    def choose(self, totals: Array, beams: Beams, photos: Array) -> Choice:
        """Choose the continuations to keep, for all photos together.

        Args:
            totals: Score of every caption with every possible next word, (B, K, V). The only
                continuation of a finished caption is another end token, with the same score.
            beams: The captions so far.
            photos: Index of each photo in the original batch, (B,).
        """
        raise NotImplementedError

    def finished(self, beams: Beams) -> Array:
        """Return, for each photo, whether its best captions can no longer be beaten, (B,).

        Log-probabilities are never positive, so the score of an unfinished caption rises only
        through rewards, by about ``gain`` at most. Its final rank is therefore bounded by
        (score + gain) / max_length ** penalty. A photo is finished if the captions to return rank
        above this bound, in every group of beams.
        """
        xp, options = namespace(beams.scores), self.options
        groups, penalty = options.beam_groups, self.penalty
        # Two groups may find the same caption, so each group must finish enough captions itself.
        count = min(options.num_captions, options.beam_size // groups)
        shape = (len(beams.scores), groups, -1)
        scores, lengths = beams.scores.reshape(shape), beams.lengths.reshape(shape)
        ended = beams.ended.reshape(shape)
        if ended.shape[2] < count:
            return xp.all(beams.ended, axis=1)
        bounds = xp.where(ended, -xp.inf, (scores + self.gain) / options.max_length**penalty)
        ranks = xp.where(ended, scores / lengths**penalty, -xp.inf)
        worst_returned = top_k(ranks, count)[0][..., -1]
        bound = xp.max(bounds, axis=2)
        # With >= instead of >, a photo could finish while an unfinished caption has an equal rank,
        # and this caption could then be returned.
        return xp.all((worst_returned > bound) | (bound == -xp.inf), axis=1)

    def best(self, beams: Beams) -> Array:
        """Select the beams with the captions to return, best first.

        With groups, all beams are selected, because the groups may contain the same captions, which
        are dropped later. First comes the best beam of each group, then the second beam of each
        group, and so on.

        Returns:
            Indices of the beams, (B, n). Beams of equal rank keep their order.
        """
        ranks, groups = self.ranks(beams), self.options.beam_groups
        order = argsort(ranks, axis=1)
        if groups == 1:
            return order[:, : self.options.num_captions]
        xp = namespace(ranks)
        inside = argsort(ranks.reshape(len(ranks), groups, -1), axis=2)
        places = xp.argsort(inside, axis=2).reshape(ranks.shape)  # place of each beam in its group
        by_place = xp.argsort(xp.take_along_axis(places, order, axis=1), axis=1, stable=True)
        return xp.take_along_axis(order, by_place, axis=1)

    def ranks(self, beams: Beams) -> Array:
        """Return the scores that captions are compared by, score / length ** penalty, (B, K)."""
        return beams.scores / beams.lengths**self.penalty


class BeamSearch(Strategy):
    """Beam search: keep the captions with the highest scores."""

    def choose(self, totals: Array, beams: Beams, photos: Array) -> Choice:
        """Choose the continuations with the highest scores (see ``Strategy.choose``)."""
        del beams, photos
        vocabulary = totals.shape[2]
        size = min(self.options.beam_size, totals.shape[1] * vocabulary)
        scores, index = top_k(totals.reshape(len(totals), -1), size)
        return Choice(scores, index // vocabulary, index % vocabulary)


class DiverseBeams(Strategy):
    """Diverse beam search: each group of beams is penalized for words that earlier groups chose.

    At each step, the groups choose one after the other. A word costs ``diversity`` for each time
    that an earlier group has chosen it at this step. The cost affects which words are chosen, but
    not the scores of the captions.

    Source: Vijayakumar et al. 2018 (arXiv:1610.02424), Hamming diversity. Deviation: none.
    """

    def choose(self, totals: Array, beams: Beams, photos: Array) -> Choice:
        """Choose the continuations of one group after the other (see ``Strategy.choose``)."""
        del photos
        xp = namespace(totals)
        batch, width, vocabulary = totals.shape
        groups = self.options.beam_groups
        first = beams.tokens.shape[2] == 0  # all groups continue the single empty caption
        own = width if first else width // groups
        size = min(self.options.beam_size // groups, own * vocabulary)
        # How often earlier groups chose each word.
        taken = xp.zeros((batch, 1, vocabulary), dtype=totals.dtype, device=totals.device)
        vocabulary_tokens = xp.arange(vocabulary, device=totals.device)
        choices = []
        for group in range(groups):
            start = 0 if first else group * own
            part, ended = totals[:, start : start + own], beams.ended[:, start : start + own]
            # Finished captions choose no word, so they neither pay nor cause a penalty.
            cost = (self.options.diversity * taken) * ~ended[..., None]
            _, index = top_k((part - cost).reshape(batch, -1), size)
            parents, words = index // vocabulary, index % vocabulary
            scores = xp.take_along_axis(part.reshape(batch, -1), index, axis=1)
            counted = ~xp.take_along_axis(ended, parents, axis=1) & xp.isfinite(scores)
            chosen = (words[..., None] == vocabulary_tokens) & counted[..., None]  # (B, size, V)
            taken = taken + xp.astype(xp.sum(chosen, axis=1, keepdims=True), taken.dtype)
            choices.append(Choice(scores, parents + start, words))
        return Choice(*(xp.concat(parts, axis=1) for parts in zip(*choices, strict=True)))


class ForcedWords(Strategy):
    """Grid beam search: a separate bank of beams for each number of forced words used so far.

    Captions compete only within their bank. Otherwise, captions with an improbable forced word
    would be dropped. A caption moves to the next bank with each forced word. Only captions in the
    last bank, which contain all forced words, may end.

    Source: Hokamp and Liu 2017 (arXiv:1704.07138). Deviation: Each constraint is a single word. A
    forced word that a caption repeats counts once.
    """

    def __init__(
        self, options: SearchOptions, words: SearchTokens, end_token: int, xp: Any, device: Any
    ) -> None:
        """Copy the forced words to the device of the search. For the arguments, see `Rules`."""
        super().__init__(options)
        self.forced = on_device(words.forced, xp.int64, xp, device)  # (C,)
        self.end_token = end_token

    def choose(self, totals: Array, beams: Beams, photos: Array) -> Choice:
        """Choose the continuations of every bank (see ``Strategy.choose``).

        The returned beams are sorted by bank, beginning with the bank without forced words. All
        banks have the same number of beams.
        """
        del photos
        xp = namespace(totals)
        batch, _, vocabulary = totals.shape
        forced = self.forced
        banks = len(forced) + 1
        used = self._used(beams)  # (B, K, C)
        may_end = xp.all(used, axis=2)
        of_forced = totals[..., forced]  # (B, K, C)
        # Scores of the words that move a caption to the next bank, and of all other words.
        move = xp.where(used, -xp.inf, of_forced)
        stay = xp.asarray(totals, copy=True)
        stay[..., forced] = xp.where(used, of_forced, -xp.inf)
        stay[..., self.end_token] = xp.where(may_end, stay[..., self.end_token], -xp.inf)
        first = beams.tokens.shape[2] == 0
        if first:  # the only caption is empty and belongs to the first bank
            stay, move = (_with_empty_banks(part, banks) for part in (stay, move))
        own = stay.shape[1] // banks  # number of beams in each bank
        stay = stay.reshape(batch, banks, -1)  # (B, banks, own V)
        move = move.reshape(batch, banks, -1)
        nothing = xp.full_like(move[:, :1], -xp.inf)
        move = xp.concat([nothing, move[:, :-1]], axis=1)
        size = min(self.options.beam_size, stay.shape[2] + move.shape[2])
        scores, index = top_k(xp.concat([stay, move], axis=2), size)  # (B, banks, size)
        moved = index >= own * vocabulary
        jump = xp.where(moved, index - own * vocabulary, 0)
        parents = xp.where(moved, jump // len(forced), index // vocabulary)
        words = xp.where(moved, forced[jump % len(forced)], index % vocabulary)
        bank = xp.arange(banks, device=totals.device)[:, None] - xp.astype(moved, index.dtype)
        parents = bank * own + parents
        parents = xp.where(parents < 0, 0, parents) * (not first)
        return Choice(*(part.reshape(batch, -1) for part in (scores, parents, words)))

    def ranks(self, beams: Beams) -> Array:
        """Return the ranks of captions, (B, K), or -inf for captions without all forced words."""
        ranks = super().ranks(beams)
        xp = namespace(ranks)
        return xp.where(xp.all(self._used(beams), axis=2), ranks, -xp.inf)

    def _used(self, beams: Beams) -> Array:
        """Return, for each caption and forced word, whether the caption contains it, (B, K, C)."""
        return namespace(beams.tokens).any(beams.tokens[..., None] == self.forced, axis=2)


class Sampling(Strategy):
    """Sampling: draw every word at random, independently for each caption.

    A word of probability p is drawn with a probability proportional to p ** (1 / temperature). With
    ``top_k``, only this many of the most probable words can be drawn. With ``top_p``, only the
    smallest set of the most probable words can be drawn that together reach this probability. If
    both are set, ``top_k`` applies first.

    Source: Holtzman et al. 2020 (arXiv:1904.09751), nucleus (top-p) sampling. Fan et al. 2018
    (arXiv:1805.04833), top-k sampling. Deviation: none.
    """

    def __init__(self, options: SearchOptions, seeds: Sequence[int], xp: Any, device: Any) -> None:
        """Generate the random numbers of every photo in advance, from the photo's own seed.

        A photo then gets the same captions in every batch.
        """
        super().__init__(options)
        shape = (options.num_captions, options.max_length)
        uniform = [np.random.default_rng([options.seed, seed]).random(shape) for seed in seeds]
        self.uniform = on_device(np.array(uniform), xp.float32, xp, device)  # (N, K, T)

    def choose(self, totals: Array, beams: Beams, photos: Array) -> Choice:
        """Draw one continuation per caption (see ``Strategy.choose``)."""
        xp = namespace(totals)
        batch, _, vocabulary = totals.shape
        width, length = self.options.num_captions, beams.tokens.shape[2]
        # Before the first word, all samples share one empty caption.
        totals = xp.broadcast_to(totals, (batch, width, vocabulary))
        # Subtract the best score first. Otherwise, all shares would underflow to 0 at a small
        # temperature. If every word is forbidden, all shares are 0.
        best = xp.max(totals, axis=2, keepdims=True)
        below = totals - xp.where(best == -xp.inf, 0.0, best)
        shares = xp.exp(below / max(self.options.temperature, 1e-30))
        index = xp.arange(vocabulary, device=totals.device)
        index = xp.broadcast_to(index, (batch, width, vocabulary))
        if self.options.top_k:
            shares, index = top_k(shares, min(self.options.top_k, vocabulary))
        if self.options.top_p < 1:
            order = argsort(shares, axis=2)
            shares = xp.take_along_axis(shares, order, axis=2)
            index = xp.take_along_axis(index, order, axis=2)
            before = xp.cumulative_sum(shares, axis=2) - shares
            # The most probable word is always kept, even for a top_p that rounds to 0.
            keep = before < self.options.top_p * xp.sum(shares, axis=2, keepdims=True)
            shares = shares * keep
        mass = xp.cumulative_sum(shares, axis=2)  # (B, K, candidate words)
        threshold = self.uniform[photos][:, :, length, None] * mass[..., -1:]
        # int32, because torch sums booleans in int64 by default, which is ten times slower.
        sampled = xp.sum(mass <= threshold, axis=2, keepdims=True, dtype=xp.int32)
        # Rounding must not select a word that comes after the last word with a share above 0.
        last = xp.sum(mass < mass[..., -1:], axis=2, keepdims=True, dtype=xp.int32)
        chosen = xp.astype(xp.where(sampled < last, sampled, last), xp.int64)
        words = xp.take_along_axis(index, chosen, axis=2)
        parents = xp.arange(width, device=totals.device)
        if beams.scores.shape[1] < width:
            parents = parents * 0
        return Choice(
            xp.take_along_axis(totals, words, axis=2)[..., 0],
            xp.broadcast_to(parents, (batch, width)),
            words[..., 0],
        )

    def finished(self, beams: Beams) -> Array:
        """Return, for each photo, whether all samples have ended or cannot continue, (B,)."""
        xp = namespace(beams.scores)
        return xp.all(beams.ended | ~xp.isfinite(beams.scores), axis=1)


def build_strategy(
    options: SearchOptions,
    words: SearchTokens,
    seeds: Sequence[int],
    *,
    end_token: int,
    xp: Any,
    device: Any,
) -> Strategy:
    """Build the strategy that the search options select.

    Args:
        options: Search options.
        words: Token ids of the words in the options.
        seeds: Random seed for each photo, (N,), for sampling.
        end_token: The end token.
        xp: Namespace of the search's arrays (see ``arrays.namespace``).
        device: Device of the search's arrays.
    """
    if options.temperature > 0:
        return Sampling(options, seeds, xp, device)
    if options.beam_groups > 1:
        return DiverseBeams(options)
    if words.forced:
        return ForcedWords(options, words, end_token, xp, device)
    return BeamSearch(options)


def _with_empty_banks(part: Array, banks: int) -> Array:
    """Extend scores of one beam, (B, 1, n), to all banks, (B, banks, n).

    The scores in all banks except the first are -inf.
    """
    xp = namespace(part)
    empty = (part.shape[0], banks - 1, part.shape[2])
    return xp.concat([part, xp.full(empty, -xp.inf, dtype=part.dtype, device=part.device)], axis=1)
