"""Search strategies: which continuations to keep, and which captions to return.

    BeamSearch       the most probable ones; beam size 1 is greedy search
    DiverseBeams     groups of beams, penalised for choosing the same words (beam_groups)
    ForcedWords      a beam for each number of forced words used so far (forced_words)
    Sampling         one random continuation per caption (temperature, top_k, top_p)

Notation: B photos, K beams, V vocabulary, T words so far, C forced words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.words import SearchTokens
from captioner.hardware import upload


class Beams(NamedTuple):
    """The captions so far."""

    scores: Tensor
    """(B, K) summed log-probabilities; -inf marks an unused beam."""
    lengths: Tensor
    """(B, K) scored tokens, end token included."""
    ended: Tensor
    """(B, K)."""
    tokens: Tensor
    """(B, K, T); finished captions are padded with end tokens."""


class Choice(NamedTuple):
    """The continuations to keep."""

    scores: Tensor
    """(B, K) summed log-probabilities."""
    parents: Tensor
    """(B, K) the beam that each continues."""
    words: Tensor
    """(B, K) the next word of each."""


class Strategy:
    """Base class; subclasses implement ``choose``."""

    def __init__(self, options: SearchOptions) -> None:
        self.options = options

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """Choose the continuations to keep, for all photos together.

        Args:
            totals: Log-probability of every caption with every next word, (B, K, V). A finished
                caption has one continuation, its end token at no cost.
            beams: The captions.
            photos: Index of each photo in the original batch, (B,).
        """
        raise NotImplementedError

    def finished(self, beams: Beams) -> Tensor:
        """Photos whose best captions can no longer be beaten, (B,)."""
        return self._settled(beams.scores, beams.lengths, beams.ended, self.options.num_captions)

    def best(self, beams: Beams) -> Tensor:
        """The beams to return, best first, (B, n); ties keep their order."""
        order = self.ranks(beams).sort(dim=1, descending=True, stable=True).indices
        return order[:, : self.options.num_captions]

    def ranks(self, beams: Beams) -> Tensor:
        """Length-normalised scores, log-probability / length ** penalty, (B, K)."""
        return _rank(beams.scores, beams.lengths, self.options.length_penalty)

    def _settled(self, scores: Tensor, lengths: Tensor, ended: Tensor, count: int) -> Tensor:
        """Whether the ``count`` best of a row of beams are final: (..., K) to (...).

        Log-probabilities only decrease, so the rank of an unfinished caption is bounded by that of
        its present score at the maximum length.
        """
        penalty = self.options.length_penalty
        bounds = _rank(scores, self.options.max_length, penalty).masked_fill(ended, -torch.inf)
        if ended.shape[-1] < count:
            return ended.all(dim=-1)
        ranks = _rank(scores, lengths, penalty).masked_fill(~ended, -torch.inf)
        worst_returned = ranks.topk(count, dim=-1).values[..., -1]
        bound = bounds.amax(dim=-1)
        # Strictly: at equal ranks an unfinished caption could be returned as a finished one.
        settled: Tensor = (worst_returned > bound) | (bound == -torch.inf)
        return settled


class BeamSearch(Strategy):
    """Keep the most probable captions."""

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``."""
        del beams, photos
        vocabulary = totals.shape[2]
        size = min(self.options.beam_size, totals.shape[1] * vocabulary)
        scores, index = totals.flatten(1).topk(size, dim=1)
        return Choice(scores, index // vocabulary, index % vocabulary)


class DiverseBeams(Strategy):
    """Diverse beam search: each group is penalised for words that earlier groups chose.

    Source: Vijayakumar et al. 2018 (arXiv:1610.02424), Hamming diversity. Deviation: none; the
    penalty applies within a step and affects the choice of words, not the captions' scores.
    """

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; one group after the other, all photos together."""
        del photos
        batch, width, vocabulary = totals.shape
        groups = self.options.beam_groups
        first = beams.tokens.shape[2] == 0  # all groups continue the one empty caption
        own = width if first else width // groups
        size = min(self.options.beam_size // groups, own * vocabulary)
        taken = totals.new_zeros(batch, vocabulary)
        choices = []
        for group in range(groups):
            start = 0 if first else group * own
            part, ended = totals[:, start : start + own], beams.ended[:, start : start + own]
            # Finished captions choose no word: they pay no penalty and cause none.
            cost = (self.options.diversity * taken.unsqueeze(1)) * ~ended.unsqueeze(-1)
            index = (part - cost).flatten(1).topk(size, dim=1).indices
            parents, words = index // vocabulary, index % vocabulary
            scores = part.flatten(1).gather(1, index)
            counted = ~ended.gather(1, parents) & scores.isfinite()
            taken.scatter_add_(1, words, counted.to(taken.dtype))
            choices.append(Choice(scores, parents + start, words))
        return Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True)))

    def finished(self, beams: Beams) -> Tensor:
        """Photos whose groups are all final, (B,)."""
        groups = self.options.beam_groups
        scores, lengths, ended = (part.view(len(part), groups, -1) for part in beams[:3])
        # Groups may have found the same captions, so each must have enough of its own.
        count = min(self.options.num_captions, self.options.beam_size // groups)
        return self._settled(scores, lengths, ended, count).all(dim=1)

    def best(self, beams: Beams) -> Tensor:
        """The best caption of every group, then the second of every group, ..., (B, K)."""
        ranks = self.ranks(beams)
        ranks = ranks.view(len(ranks), self.options.beam_groups, -1)
        ranks, inside = ranks.sort(dim=2, descending=True, stable=True)  # (B, groups, own)
        starts = torch.arange(ranks.shape[1], device=ranks.device) * ranks.shape[2]
        index = inside + starts.unsqueeze(1)
        among = ranks.sort(dim=1, descending=True, stable=True).indices
        return index.gather(1, among).transpose(1, 2).flatten(1)


class ForcedWords(Strategy):
    """Grid beam search: one bank of beams for each number of forced words used so far.

    Captions compete only within their bank, so that an improbable forced word is not pruned; only
    captions in the last bank may end.

    Source: Hokamp and Liu 2017 (arXiv:1704.07138). Deviation: constraints are single words, and a
    repeated word counts once.
    """

    def __init__(
        self, options: SearchOptions, words: SearchTokens, end_token: int, device: torch.device
    ) -> None:
        super().__init__(options)
        self.forced = upload(torch.tensor(words.forced), device)  # (C,)
        self.end_token = end_token

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; beams are ordered by bank."""
        del photos
        batch, _, vocabulary = totals.shape
        forced = self.forced
        banks = len(forced) + 1
        used = self._used(beams)  # (B, K, C)
        may_end = used.all(dim=2)
        move = totals[..., forced].masked_fill(used, -torch.inf)  # (B, K, C), to the next bank
        stay = totals.index_copy(2, forced, totals[..., forced].masked_fill(~used, -torch.inf))
        stay[..., self.end_token].masked_fill_(~may_end, -torch.inf)
        first = beams.tokens.shape[2] == 0
        if first:  # the one empty caption is in the first bank
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
        """See ``Strategy.ranks``; captions that lack a forced word rank -inf."""
        return super().ranks(beams).masked_fill(~self._used(beams).all(dim=2), -torch.inf)

    def _used(self, beams: Beams) -> Tensor:
        """Which forced words each caption contains, (B, K, C)."""
        return (beams.tokens.unsqueeze(-1) == self.forced).any(dim=2)


class Sampling(Strategy):
    """Sample every word; captions are independent samples.

    Source: nucleus (top-p) sampling, Holtzman et al. 2020 (arXiv:1904.09751); top-k, Fan et al.
    2018 (arXiv:1805.04833). If both are set, top-k applies first.
    """

    def __init__(self, options: SearchOptions, seeds: Sequence[int], device: torch.device) -> None:
        """Generate the uniform random numbers of every photo from its own seed."""
        super().__init__(options)
        shape = (options.num_captions, options.max_length)
        uniform = [np.random.default_rng([options.seed, seed]).random(shape) for seed in seeds]
        numbers = torch.from_numpy(np.array(uniform, dtype=np.float32))
        self.uniform = upload(numbers, device)  # (N, K, T)

    def choose(self, totals: Tensor, beams: Beams, photos: Tensor) -> Choice:
        """See ``Strategy.choose``; one continuation per caption."""
        width, length = self.options.num_captions, beams.tokens.shape[2]
        totals = totals.expand(-1, width, -1)  # at the first word all samples share one caption
        # Relative to the best word, so that no small temperature makes all words underflow. If no
        # word is left, -inf - -inf is NaN and becomes probability 0.
        below = totals - totals.amax(dim=2, keepdim=True)
        shares = (below / max(self.options.temperature, 1e-30)).softmax(dim=2).nan_to_num()
        index = torch.arange(totals.shape[2], device=totals.device).expand_as(totals)
        if self.options.top_k:
            shares, index = shares.topk(min(self.options.top_k, shares.shape[2]), dim=2)
        if self.options.top_p < 1:
            shares, order = shares.sort(dim=2, descending=True, stable=True)
            index = index.gather(2, order)
            before = shares.cumsum(dim=2) - shares
            # Always keeps the first word, even for a top_p that rounds to 0.
            keep = before < self.options.top_p * shares.sum(dim=2, keepdim=True)
            shares = shares * keep
        mass = shares.cumsum(dim=2)  # (B, K, candidate words)
        threshold = self.uniform[photos, :, length].unsqueeze(-1) * mass[..., -1:]
        sampled = (mass <= threshold).sum(dim=2, keepdim=True)
        last = (mass < mass[..., -1:]).sum(dim=2, keepdim=True)  # rounding must not exceed it
        words = index.gather(2, torch.minimum(sampled, last))
        parents = torch.arange(width, device=totals.device).expand(len(totals), -1)
        return Choice(
            totals.gather(2, words).squeeze(2),
            parents.clamp(max=beams.scores.shape[1] - 1),
            words.squeeze(2),
        )

    def finished(self, beams: Beams) -> Tensor:
        """Photos whose samples have all ended or have no possible next word, (B,)."""
        return (beams.ended | ~beams.scores.isfinite()).all(dim=1)


def build_strategy(
    options: SearchOptions,
    words: SearchTokens,
    seeds: Sequence[int],
    end_token: int,
    device: torch.device,
) -> Strategy:
    """Build the strategy that the options select; see ``search`` for the arguments."""
    if options.temperature > 0:
        return Sampling(options, seeds, device)
    if options.beam_groups > 1:
        return DiverseBeams(options)
    if words.forced:
        return ForcedWords(options, words, end_token, device)
    return BeamSearch(options)


def _with_empty_banks(part: Tensor, banks: int) -> Tensor:
    """(B, 1, n) to (B, banks, n), with -inf in the other banks."""
    empty = part.new_full((part.shape[0], banks - 1, part.shape[2]), -torch.inf)
    return torch.cat([part, empty], dim=1)


def _rank(scores: Tensor, lengths: Tensor | int, penalty: float) -> Tensor:
    return scores / lengths**penalty
