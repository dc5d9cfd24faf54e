"""The search: drives a step function until every photo has its sentences.

    beams = one empty sentence a photo
    until every photo is finished:
        advance   the stepper scores every next word of every sentence
        forbid    the rules take out what must not follow
        choose    the strategy keeps some of the continuations

The search knows no model: it drives anything that fits ``Stepper``. Whole batches of photos and
their beams move together, no Python loop runs over photos or beams inside a step, and a photo that
is finished leaves the batch. A step waits for the device once, to learn which photos are finished.

A sentence that has ended keeps its place in the beam with its score frozen, so the places always
hold the best sentences known, ended or not. What a step saw (attention, gates) is kept as it came,
with the parents of the sentences; the sentences that are given back trace their own path through
it at the end, so nothing is copied on the way.

Notation: B photos still searched of N, K beams, V vocabulary, L regions, T words so far, M
sentences given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.rules import Rules, WordNumbers
from captioner.decoding.strategies import Beams, Choice, Strategy, build_strategy


class Advance(NamedTuple):
    """What a stepper gives for one word."""

    log_probs: Tensor
    """(B, K, V) log-probabilities of the next word, float32; -inf where a word is forbidden. The
    search may write into it."""
    alphas: Tensor
    """(B, K, L) attention while the word is chosen."""
    gates: Tensor
    """(B, K) context gate."""


class Stepper(Protocol):
    """One word further for a batch of photos; holds the state of every beam.

    A fresh stepper has one beam a photo.
    """

    device: torch.device
    start_token: int | Tensor
    """Of all photos, or of each, (B,)."""
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


class _Past(NamedTuple):
    """What one step saw, as it came."""

    rows: Tensor  # (N,) where each photo stood in the batch; meaningless for one that had left
    parents: Tensor  # (B, K)
    log_probs: Tensor  # (B, K) of the words that were chosen
    alphas: Tensor  # (B, parents, L)
    gates: Tensor  # (B, parents)


class _Found(NamedTuple):
    """The sentences of the photos that finished at one step."""

    photos: Tensor  # (B,)
    beams: Tensor  # (B, n) best first
    scores: Tensor  # (B, n)
    tokens: Tensor  # (B, n, T)


@torch.inference_mode()
def search(
    stepper: Stepper,
    options: SearchOptions,
    words: WordNumbers = WordNumbers(),  # noqa: B008 - a tuple, never changed
    keys: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Find the sentences of every photo.

    Args:
        stepper: A fresh stepper.
        options: What is looked for, and how.
        words: The words that the options name, from ``number_words``.
        keys: A number for each photo, from which its random draws are made; None: its place.

    Returns:
        For each photo its best ``options.num_captions`` sentences, best first; fewer only where
        there are no more different ones.
    """
    count, device = stepper.batch_size, stepper.device
    if not count:
        return []
    rules = Rules(options, words, stepper.end_token, device)
    keys = range(count) if keys is None else keys
    strategy = build_strategy(options, words, keys, stepper.end_token, device)
    photos = torch.arange(count, device=device)  # which photo each row of the batch is
    beams = _start(count, device)
    last = torch.as_tensor(stepper.start_token, device=device).expand(count).unsqueeze(1)
    past: list[_Past] = []
    found: list[_Found] = []
    for t in range(options.max_length):
        advance = stepper.advance(last)
        rules.forbid(advance.log_probs, beams.tokens)
        choice = strategy.choose(_totals(beams, advance, stepper.end_token), beams, photos)
        past.append(_remember(photos, count, beams, choice, advance))
        beams = _grow(beams, choice, stepper.end_token)
        if t == options.max_length - 1:
            found.append(_collect(strategy, beams, photos))
            break
        done = strategy.finished(beams).cpu()  # the step's one synchronization
        stepper.reorder(choice.parents)
        if done.any():
            order = done.int().argsort(descending=True, stable=True).to(device)  # one upload
            ready, going = order.tensor_split([int(done.sum())])
            found.append(_collect(strategy, _select(beams, ready), photos[ready]))
            if done.all():
                break
            photos, beams = photos[going], _select(beams, going)
            stepper.keep(going)
        last = beams.tokens[:, :, -1]
    results: list[list[Hypothesis]] = [[] for _ in range(count)]
    for photo, hypothesis in _trace(past, found, stepper.end_token):
        results[photo].append(hypothesis)
    # Draws may agree; the answers of a search may not, though groups of a beam can meet.
    if options.temperature == 0:
        results = [_distinct(hypotheses) for hypotheses in results]
    return [hypotheses[: options.num_captions] for hypotheses in results]


def _start(batch: int, device: torch.device) -> Beams:
    """One empty sentence a photo."""
    zeros = torch.zeros(batch, 1, device=device)
    return Beams(zeros, zeros, zeros.bool(), zeros.long().new_zeros(batch, 1, 0))


def _totals(beams: Beams, advance: Advance, end_token: int) -> Tensor:
    """Log-probability of every sentence with every next word, (B, K, V).

    A sentence that has ended goes on in one way only, as it is, at no cost.
    """
    going = beams.scores.masked_fill(beams.ended, -torch.inf)
    totals = advance.log_probs + going.unsqueeze(2)
    ends = totals[..., end_token]
    ends.copy_(torch.where(beams.ended, beams.scores, ends))
    return totals


def _take(part: Tensor, index: Tensor) -> Tensor:
    """``part[b, index[b, k]]`` for every b and k: (B, K, ...) and (B, n) to (B, n, ...)."""
    rows = torch.arange(len(index), device=index.device).unsqueeze(1)
    return part[rows, index]


def _grow(beams: Beams, choice: Choice, end_token: int) -> Beams:
    """Every sentence with its next word."""
    ended = _take(beams.ended, choice.parents)
    tokens = _take(beams.tokens, choice.parents)
    return Beams(
        scores=choice.scores,
        lengths=_take(beams.lengths, choice.parents) + ~ended,
        ended=ended | (choice.words == end_token),
        tokens=torch.cat([tokens, choice.words.unsqueeze(2)], dim=2),
    )


def _select(beams: Beams, rows: Tensor) -> Beams:
    """Some of the photos."""
    return Beams(*(part[rows] for part in beams))


def _collect(strategy: Strategy, beams: Beams, photos: Tensor) -> _Found:
    """What is given back of photos that are finished."""
    best = strategy.best(beams)
    scores = beams.scores.masked_fill(strategy.ranks(beams) == -torch.inf, -torch.inf)
    return _Found(photos, best, scores.gather(1, best), _take(beams.tokens, best))


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Every sentence once, where it first stands."""
    first: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in hypotheses:
        first.setdefault(tuple(hypothesis.tokens), hypothesis)
    return list(first.values())


def _remember(photos: Tensor, count: int, beams: Beams, choice: Choice, advance: Advance) -> _Past:
    rows = photos.new_zeros(count)
    rows[photos] = torch.arange(len(photos), device=photos.device)
    each = torch.arange(len(photos), device=photos.device).unsqueeze(1)
    chosen = advance.log_probs[each, choice.parents, choice.words]
    chosen = chosen.masked_fill(_take(beams.ended, choice.parents), 0.0)
    return _Past(rows, choice.parents, chosen, advance.alphas, advance.gates)


def _trace(
    past: list[_Past], found: list[_Found], end_token: int
) -> Iterator[tuple[int, Hypothesis]]:
    """The sentences that were found, with what was seen on their way; best first in each photo."""
    photos = torch.cat([f.photos.repeat_interleave(f.beams.shape[1]) for f in found])  # (M,)
    beams = torch.cat([f.beams.flatten() for f in found])
    lengths = [f.tokens.shape[2] for f in found for _ in range(f.beams.numel())]
    steps = torch.tensor(lengths, device=photos.device)
    seen = []
    for t in reversed(range(len(past))):
        rows, step = past[t].rows[photos], past[t]
        there = t < steps  # the others had left: their beam waits for its own last step
        beam = torch.where(there, beams, 0)
        parents = step.parents[rows, beam]
        seen.append(
            (step.log_probs[rows, beam], step.alphas[rows, parents], step.gates[rows, parents])
        )
        beams = torch.where(there, parents, beams)
    parts = [torch.stack(part[::-1], dim=1).cpu() for part in zip(*seen, strict=True)]  # (M, T, ..)
    scores = torch.cat([f.scores.flatten() for f in found]).tolist()
    sentences = [tokens for f in found for tokens in f.tokens.flatten(0, 1).tolist()]
    for photo, score, tokens, evidence in zip(
        photos.tolist(), scores, sentences, zip(*parts, strict=True), strict=True
    ):
        if score == -torch.inf:  # only forbidden words were left
            continue
        length = tokens.index(end_token) if end_token in tokens else len(tokens)
        log_probs, alphas, gates = (part[:length] for part in evidence)
        ended = length < len(tokens)
        yield photo, Hypothesis(tokens[:length], log_probs, alphas, gates, score, ended)
