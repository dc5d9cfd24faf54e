"""How sentences grow: what a strategy keeps of all continuations, and which it gives back.

    BeamSearch       the most probable ones; a beam of one is greedy
    DiverseBeams     the same in groups that shun each other's words (beam_groups)
    ForcedWords      the same with a beam for every number of forced words said (forced_words)
    Sampling         one drawn at random for each sentence (temperature, top_k, top_p)

Notation: B photos, K beams, V vocabulary, T words so far, C forced words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.rules import WordNumbers


class Beams(NamedTuple):
    """The sentences so far."""

    scores: Tensor
    """(B, K) summed log-probabilities; -inf: there is no such sentence."""
    lengths: Tensor
    """(B, K) tokens that were scored, the end token included."""
    ended: Tensor
    """(B, K)."""
    tokens: Tensor
    """(B, K, T); after its end a sentence goes on with end tokens."""


class Choice(NamedTuple):
    """The sentences that go on."""

    scores: Tensor
    """(B, K) summed log-probabilities."""
    parents: Tensor
    """(B, K) the beam that each continues."""
    words: Tensor
    """(B, K) the word that each takes."""


class Strategy:
    """What all share; ``choose`` is theirs."""

    def __init__(self, options: SearchOptions) -> None:
        self.options = options

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """Pick the sentences that go on, for all photos together.

        Args:
            totals: Log-probability of every sentence with every next word, (B, K, V). A sentence
                that has ended has one next word, its end, which costs nothing.
            beams: The sentences.
            photos: Number of each photo among those that were given, (B,).
        """
        raise NotImplementedError

    def finished(self, beams: Beams) -> Tensor:
        """Photos whose best sentences no other can overtake any more, (B,)."""
        return self._settled(beams.scores, beams.lengths, beams.ended, self.options.num_captions)

    def best(self, beams: Beams) -> Tensor:
        """The beams to give back, best first, (B, n); equal ones in the order they stand in."""
        order = self.ranks(beams).sort(dim=1, descending=True, stable=True).indices
        return order[:, : self.options.num_captions]

    def ranks(self, beams: Beams) -> Tensor:
        """What sentences are compared by: log-probability / length ** penalty, (B, K)."""
        return _rank(beams.scores, beams.lengths, self.options.length_penalty)

    def _settled(self, scores: Tensor, lengths: Tensor, ended: Tensor, wanted: int) -> Tensor:
        """Whether the ``wanted`` best of a row of beams are settled: (..., K) to (...).

        Log-probabilities only fall, so a sentence is worth at most what its score so far would be
        worth at the greatest length.
        """
        penalty = self.options.length_penalty
        hope = _rank(scores, self.options.max_length, penalty).masked_fill(ended, -torch.inf)
        if ended.shape[-1] < wanted:
            return ended.all(dim=-1)
        ranks = _rank(scores, lengths, penalty).masked_fill(~ended, -torch.inf)
        worst_given = ranks.topk(wanted, dim=-1).values[..., -1]
        best_hope = hope.amax(dim=-1)
        # Not so at equal ranks: a sentence that goes on must not pass for one that has ended.
        settled: Tensor = (worst_given > best_hope) | (best_hope == -torch.inf)
        return settled


class BeamSearch(Strategy):
    """Keep the most probable sentences."""

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``."""
        del beams, photos
        vocabulary = totals.shape[2]
        size = min(self.options.beam_size, totals.shape[1] * vocabulary)
        scores, index = totals.flatten(1).topk(size, dim=1)
        return Choice(scores, index // vocabulary, index % vocabulary)


class DiverseBeams(Strategy):
    """Groups of beams, one after the other; each shuns the words that earlier ones take now.

    Source: Vijayakumar et al. 2018 (arXiv:1610.02424), Hamming diversity. Deviation: none; the
    penalty counts where words are chosen and not in the scores of the sentences.
    """

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; one group after the other, all photos together."""
        del photos
        batch, width, vocabulary = totals.shape
        groups = self.options.beam_groups
        first = beams.tokens.shape[2] == 0  # then all groups continue the one empty sentence
        own = width if first else width // groups
        size = min(self.options.beam_size // groups, own * vocabulary)
        taken = totals.new_zeros(batch, vocabulary)
        choices = []
        for group in range(groups):
            start = 0 if first else group * own
            mine, ended = totals[:, start : start + own], beams.ended[:, start : start + own]
            # A sentence that has ended takes no word, so it neither pays nor makes others pay.
            cost = (self.options.diversity * taken.unsqueeze(1)) * ~ended.unsqueeze(-1)
            index = (mine - cost).flatten(1).topk(size, dim=1).indices
            parents, words = index // vocabulary, index % vocabulary
            scores = mine.flatten(1).gather(1, index)
            says = ~ended.gather(1, parents) & scores.isfinite()
            taken.scatter_add_(1, words, says.to(taken.dtype))
            choices.append(Choice(scores, parents + start, words))
        return Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True)))

    def finished(self, beams: Beams) -> Tensor:
        """Photos of which every group is settled, (B,)."""
        groups = self.options.beam_groups
        parts = [part.view(len(part), groups, -1) for part in beams[:3]]
        # Groups may have found the same sentences, so each must have as many as are asked for.
        wanted = min(self.options.num_captions, self.options.beam_size // groups)
        return self._settled(parts[0], parts[1], parts[2], wanted).all(dim=1)

    def best(self, beams: Beams) -> Tensor:
        """The best of every group, then the second of every group, ..., (B, K)."""
        ranks = self.ranks(beams)
        ranks = ranks.view(len(ranks), self.options.beam_groups, -1)
        ranks, inside = ranks.sort(dim=2, descending=True, stable=True)  # (B, groups, own)
        starts = torch.arange(ranks.shape[1], device=ranks.device) * ranks.shape[2]
        index = inside + starts.unsqueeze(1)
        among = ranks.sort(dim=1, descending=True, stable=True).indices
        return index.gather(1, among).transpose(1, 2).flatten(1)


class ForcedWords(Strategy):
    """A beam for every number of forced words that its sentences have said, from none to all.

    Sentences compete with those only that have said as many, so the unlikely word is not lost on
    the way; only a sentence that has said all may end.

    Source: grid beam search, Hokamp and Liu 2017 (arXiv:1704.07138). Deviation: constraints are
    single words, and a repeated one counts once.
    """

    def __init__(
        self, options: SearchOptions, words: WordNumbers, end_token: int, device: torch.device
    ) -> None:
        super().__init__(options)
        self.forced = torch.tensor(words.forced, device=device)  # (C,)
        self.end_token = end_token

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; beams are ordered by the number of forced words said."""
        del photos
        batch, _, vocabulary = totals.shape
        forced = self.forced
        banks = len(forced) + 1
        said = self._said(beams)  # (B, K, C)
        may_end = said.all(dim=2)
        move = totals[..., forced].masked_fill(said, -torch.inf)  # (B, K, C), to the next bank
        stay = totals.index_copy(2, forced, totals[..., forced].masked_fill(~said, -torch.inf))
        stay[..., self.end_token].masked_fill_(~may_end, -torch.inf)
        first = beams.tokens.shape[2] == 0
        if first:  # the one empty sentence stands in the first bank
            stay, move = (_with_empty_banks(part, banks) for part in (stay, move))
        own = stay.shape[1] // banks
        stay = stay.reshape(batch, banks, -1)  # (B, banks, own V)
        move = move.reshape(batch, banks, -1)
        move = torch.cat([torch.full_like(move[:, :1], -torch.inf), move[:, :-1]], dim=1)
        size = min(self.options.beam_size, stay.shape[2] + move.shape[2])
        scores, index = torch.cat([stay, move], dim=2).topk(size, dim=2)  # (B, banks, size)
        moved = index >= own * vocabulary
        jump = (index - own * vocabulary).clamp(min=0)
        parents = torch.where(moved, jump // len(forced), index // vocabulary)
        words = torch.where(moved, forced[jump % len(forced)], index % vocabulary)
        bank = torch.arange(banks, device=totals.device).unsqueeze(1) - moved.long()
        parents = (bank * own + parents).clamp(min=0) * (not first)
        return Choice(scores.flatten(1), parents.flatten(1), words.flatten(1))

    def ranks(self, beams: Beams) -> Tensor:
        """See ``Strategy.ranks``; a sentence that lacks a word is none."""
        return super().ranks(beams).masked_fill(~self._said(beams).all(dim=2), -torch.inf)

    def _said(self, beams: Beams) -> Tensor:
        """Which forced words each sentence holds, (B, K, C)."""
        return (beams.tokens.unsqueeze(-1) == self.forced).any(dim=2)


class Sampling(Strategy):
    """Draw every word at random; every sentence is a draw of its own.

    Source: nucleus (top-p) sampling, Holtzman et al. 2020 (arXiv:1904.09751); top-k, Fan et al.
    2018 (arXiv:1805.04833). With both, top-k cuts first.
    """

    def __init__(self, options: SearchOptions, keys: Sequence[int], device: torch.device) -> None:
        """Draw the numbers that words will be picked by, for every photo from its own key."""
        super().__init__(options)
        shape = (options.num_captions, options.max_length)
        draws = [np.random.default_rng([options.seed, key]).random(shape) for key in keys]
        self.draws = torch.from_numpy(np.array(draws, dtype=np.float32)).to(device)  # (N, K, T)

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; every sentence goes on with one word."""
        width, length = self.options.num_captions, beams.tokens.shape[2]
        totals = totals.expand(-1, width, -1)  # the first word: all draws from one sentence
        # The best word at 0: then no temperature, however small, takes all words below what
        # float32 holds. Where no word is left, -inf - -inf is not a number: a share of 0.
        below = totals - totals.amax(dim=2, keepdim=True)
        shares = (below / max(self.options.temperature, 1e-30)).softmax(dim=2).nan_to_num()
        index = torch.arange(totals.shape[2], device=totals.device).expand_as(totals)
        if self.options.top_k:
            shares, index = shares.topk(min(self.options.top_k, shares.shape[2]), dim=2)
        if self.options.top_p < 1:
            shares, order = shares.sort(dim=2, descending=True, stable=True)
            index = index.gather(2, order)
            before = shares.cumsum(dim=2) - shares
            # The first word always stays, whatever rounding makes of a tiny top_p.
            keep = before < self.options.top_p * shares.sum(dim=2, keepdim=True)
            shares = shares * keep
        mass = shares.cumsum(dim=2)  # (B, K, words that may be drawn)
        drawn = self.draws[photos, :, length].unsqueeze(-1) * mass[..., -1:]
        place = (mass <= drawn).sum(dim=2, keepdim=True)
        last = (mass < mass[..., -1:]).sum(dim=2, keepdim=True)  # rounding must not pass it
        words = index.gather(2, torch.minimum(place, last))
        parents = torch.arange(width, device=totals.device).expand(len(totals), -1)
        return Choice(
            totals.gather(2, words).squeeze(2),
            parents.clamp(max=beams.scores.shape[1] - 1),
            words.squeeze(2),
        )

    def finished(self, beams: Beams) -> Tensor:
        """Photos whose draws have all ended, or cannot go on, (B,)."""
        return (beams.ended | ~beams.scores.isfinite()).all(dim=1)


def build_strategy(
    options: SearchOptions,
    words: WordNumbers,
    keys: Sequence[int],
    end_token: int,
    device: torch.device,
) -> Strategy:
    """The strategy that the options ask for.

    Args:
        options: Free of contradictions, as they always are.
        words: Their words.
        keys: What each photo's draws are made from.
        end_token: Ends a sentence.
        device: Where the search runs.
    """
    if options.temperature > 0:
        return Sampling(options, keys, device)
    if options.beam_groups > 1:
        return DiverseBeams(options)
    if words.forced:
        return ForcedWords(options, words, end_token, device)
    return BeamSearch(options)


def _with_empty_banks(part: Tensor, banks: int) -> Tensor:
    """(B, 1, n) to (B, banks, n): nothing stands in the others."""
    empty = part.new_full((part.shape[0], banks - 1, part.shape[2]), -torch.inf)
    return torch.cat([part, empty], dim=1)


def _rank(scores: Tensor, lengths: Tensor | int, penalty: float) -> Tensor:
    return scores / lengths**penalty
