"""Beam search over a step function; greedy search is a beam of one.

The search knows no model: it drives anything that fits ``Stepper``. Whole batches of photos and
their beams move together, no Python loop runs over photos or beams inside a step, and a photo that
is finished leaves the batch.

A sentence that has ended keeps its place in the beam with its score frozen, so the places always
hold the best sentences known, ended or not.

Notation: B photos, K beams, V vocabulary, L regions, T words so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from captioner.config import SearchOptions


class Advance(NamedTuple):
    """What a stepper gives for one word."""

    log_probs: Tensor
    """(B, K, V) log-probabilities of the next word, float32; -inf where a word is forbidden."""
    alphas: Tensor
    """(B, K, L) attention while the word is chosen."""
    gates: Tensor
    """(B, K) context gate."""


class Stepper(Protocol):
    """One word further for a batch of photos; holds the state of every beam.

    A fresh stepper has one beam a photo.
    """

    device: torch.device
    start_token: int
    end_token: int

    @property
    def batch_size(self) -> int:
        """B, the photos that are still searched."""

    def advance(self, tokens: Tensor) -> Advance:
        """Take the last word of each beam, (B, K), and score the next."""

    def reorder(self, parents: Tensor) -> None:
        """Beam k of each photo continues beam ``parents[b, k]`` of the step before, (B, K)."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these photos only, (B',)."""


@dataclass(frozen=True)
class Hypothesis:
    """One sentence of a photo, T tokens, without start and end. Tensors are on the CPU."""

    tokens: list[int]
    token_log_probs: Tensor
    """(T,)."""
    alphas: Tensor
    """(T, L)."""
    gates: Tensor
    """(T,)."""
    log_prob: float
    """Of the whole sentence, its end token included where it has one."""
    ended: bool
    """False: cut at max_length before the end token came."""


class _Beams(NamedTuple):
    """The sentences so far."""

    scores: Tensor  # (B, K) summed log-probabilities
    lengths: Tensor  # (B, K) tokens that were scored, the end token included
    ended: Tensor  # (B, K)
    tokens: Tensor  # (B, K, T)
    log_probs: Tensor  # (B, K, T)
    alphas: Tensor  # (B, K, T, L)
    gates: Tensor  # (B, K, T)

    def select(self, rows: Tensor) -> _Beams:
        return _Beams(*(part[rows] for part in self))

    def follow(self, parents: Tensor) -> _Beams:
        """Beam k becomes a copy of beam parents[b, k]."""
        photos = torch.arange(len(parents), device=parents.device).unsqueeze(1)
        return _Beams(*(part[photos, parents] for part in self))


@torch.inference_mode()
def beam_search(stepper: Stepper, options: SearchOptions) -> list[list[Hypothesis]]:
    """Look for the most probable sentences of every photo.

    Args:
        stepper: A fresh stepper.
        options: Beam size, number of captions, length limit, ranking.

    Returns:
        For each photo its best ``options.num_captions`` sentences, best first; fewer only where
        the vocabulary allows no more.
    """
    results: list[list[Hypothesis]] = [[] for _ in range(stepper.batch_size)]
    photos = torch.arange(stepper.batch_size)  # which photo each row of the batch is
    beams = _start(stepper.batch_size, stepper.device)
    last = torch.full((stepper.batch_size, 1), stepper.start_token, device=stepper.device)
    for t in range(options.max_length):
        advance = stepper.advance(last)
        beams, parents = _grow(beams, advance, stepper.end_token, options.beam_size)
        if t == options.max_length - 1:
            done = torch.ones(len(photos), dtype=torch.bool)
        else:
            done = _finished(beams, options).cpu()  # the step's one synchronization
        for photo, row in zip(
            photos[done].tolist(), done.nonzero().flatten().tolist(), strict=True
        ):
            results[photo] = _read(beams, row, stepper.end_token, options)
        if done.all():
            break
        stepper.reorder(parents)
        if done.any():
            going = (~done).nonzero().flatten()
            photos = photos[going]
            going = going.to(stepper.device)
            beams = beams.select(going)
            stepper.keep(going)
        last = beams.tokens[:, :, -1]
    return results


def _start(batch: int, device: torch.device) -> _Beams:
    """One empty sentence a photo."""
    zeros = torch.zeros(batch, 1, device=device)
    nothing = zeros.new_zeros(batch, 1, 0)
    return _Beams(
        zeros, zeros, zeros.bool(), nothing.long(), nothing, nothing.unsqueeze(-1), nothing
    )


def _grow(beams: _Beams, advance: Advance, end_token: int, beam_size: int) -> tuple[_Beams, Tensor]:
    """Give every sentence every next word and keep the best.

    Returns:
        The new beams, and the beam that each of them continues, (B, K).
    """
    vocabulary = advance.log_probs.shape[-1]
    # A sentence that has ended goes on in one way only: as it is, at no cost.
    frozen = advance.log_probs.new_full((vocabulary,), -torch.inf)
    frozen[end_token] = 0.0
    log_probs = torch.where(beams.ended.unsqueeze(-1), frozen, advance.log_probs)  # (B, K, V)
    total = (beams.scores.unsqueeze(-1) + log_probs).flatten(1)  # (B, K V)
    scores, index = total.topk(min(beam_size, total.shape[1]), dim=1)
    parents, words = index // vocabulary, index % vocabulary
    old = beams.follow(parents)
    rows = torch.arange(len(parents), device=parents.device).unsqueeze(1)

    def append(past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past.expand(*past.shape[:3], *new.shape[2:]), new.unsqueeze(2)], dim=2)

    grown = _Beams(
        scores=scores,
        lengths=old.lengths + ~old.ended,
        ended=old.ended | (words == end_token),
        tokens=append(old.tokens, words),
        log_probs=append(old.log_probs, log_probs.flatten(1).gather(1, index)),
        alphas=append(old.alphas, advance.alphas[rows, parents]),
        gates=append(old.gates, advance.gates[rows, parents]),
    )
    return grown, parents


def _rank(scores: Tensor, lengths: Tensor | int, penalty: float) -> Tensor:
    """Score by which sentences are compared: log-probability / length ** penalty."""
    return scores / lengths**penalty


def _finished(beams: _Beams, options: SearchOptions) -> Tensor:
    """Photos whose best sentences no unended sentence can overtake any more, (B,).

    Log-probabilities only fall, so a sentence is worth at most what its score so far would be
    worth at the greatest length.
    """
    ranks = _rank(beams.scores, beams.lengths, options.length_penalty)
    ranks = ranks.masked_fill(~beams.ended, -torch.inf)
    hope = _rank(beams.scores, options.max_length, options.length_penalty)
    hope = hope.masked_fill(beams.ended, -torch.inf).amax(dim=1)
    if ranks.shape[1] < options.num_captions:
        return beams.ended.all(dim=1)
    worst_given = ranks.topk(options.num_captions, dim=1).values[:, -1]
    return (worst_given >= hope) | beams.ended.all(dim=1)


def _read(beams: _Beams, row: int, end_token: int, options: SearchOptions) -> list[Hypothesis]:
    """The best sentences of one photo, best first."""
    ranks = _rank(beams.scores[row], beams.lengths[row], options.length_penalty)
    order = ranks.argsort(descending=True, stable=True).tolist()
    found = []
    for k in order[: options.num_captions]:
        score = float(beams.scores[row, k])
        if score == -torch.inf:  # only forbidden words were left
            continue
        tokens = beams.tokens[row, k].tolist()
        length = tokens.index(end_token) if end_token in tokens else len(tokens)
        found.append(
            Hypothesis(
                tokens=tokens[:length],
                token_log_probs=beams.log_probs[row, k, :length].cpu(),
                alphas=beams.alphas[row, k, :length].cpu(),
                gates=beams.gates[row, k, :length].cpu(),
                log_prob=score,
                ended=length < len(tokens),
            )
        )
    return found
