"""Caption search over a step function.

    beams = one empty caption per photo
    until every photo is finished:
        advance   the stepper scores every next word of every caption
        forbid    the rules mask words that must not follow
        choose    the strategy keeps some of the continuations

The search does not depend on a model: it drives any ``Stepper``. All photos and beams of a batch
advance together, no Python loop runs over photos or beams inside a step, and finished photos leave
the batch. Each step synchronizes with the device once, to find out which photos are finished.

A finished caption stays in the beam with its score frozen, so the beam always holds the best
captions known, finished or not. Attention and gates of every step are stored with the parents of
the captions; the returned captions are traced back through them at the end, without copies in
between.

Notation: B photos still searched of N, K beams, V vocabulary, L regions, T words so far, M
returned captions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from captioner.config import SearchOptions
from captioner.decoding.rules import Rules
from captioner.decoding.strategies import Beams, Choice, Strategy, build_strategy
from captioner.decoding.words import SearchTokens
from captioner.hardware import upload


class Advance(NamedTuple):
    """Result of one step."""

    log_probs: Tensor
    """(B, K, V) log-probabilities of the next word, float32; -inf for forbidden words. The search
    may modify it in place."""
    alphas: Tensor
    """(B, K, L) attention when the word is chosen."""
    gates: Tensor
    """(B, K) context gate."""


class Stepper(Protocol):
    """Advances a batch of photos by one word; holds the state of every beam.

    A new stepper has one beam per photo.
    """

    device: torch.device
    start_token: int | Tensor
    """One for all photos, or one per photo, (B,)."""
    end_token: int

    @property
    def batch_size(self) -> int:
        """B, the number of photos still searched."""

    def advance(self, tokens: Tensor) -> Advance:
        """Feed the last word of each beam, (B, K), and score the next."""

    def reorder(self, parents: Tensor) -> None:
        """Let beam k of each photo continue beam ``parents[b, k]`` of the last step, (B, K)."""

    def keep(self, rows: Tensor) -> None:
        """Continue with these photos only, (B',)."""


class Evidence(NamedTuple):
    """What the search knew of a caption besides its words, for its confidence."""

    entropies: Tensor
    """(T,) entropy of the distribution that each word was chosen from, in nats."""
    share: float
    """The caption's probability as a share of all captions in the last beam, 0 to 1."""
    overlap: float
    """Mean share of its words that the captions of the last beam contain, each weighted by its
    probability, 0 to 1."""


@dataclass(frozen=True)
class Hypothesis:
    """One caption of T tokens, without start and end. Tensors are on the CPU."""

    tokens: list[int]
    token_log_probs: Tensor
    """(T,)."""
    alphas: Tensor
    """(T, L)."""
    gates: Tensor
    """(T,)."""
    log_prob: float
    """Of the whole caption, including its end token if it has one."""
    ended: bool
    """False: truncated at max_length, without an end token."""
    evidence: Evidence | None = None
    """None unless the search collected it."""


class _StepRecord(NamedTuple):
    """What one step produced, for tracing captions back."""

    rows: Tensor  # (N,) row of each photo in the batch; undefined for photos that have left
    parents: Tensor  # (B, K)
    log_probs: Tensor  # (B, K) of the chosen words
    alphas: Tensor  # (B, parents, L)
    gates: Tensor  # (B, parents)
    entropies: Tensor  # (B, parents)


class _Finished(NamedTuple):
    """The captions of the photos that finished at one step."""

    photos: Tensor  # (B,)
    beams: Tensor  # (B, n) best first
    scores: Tensor  # (B, n)
    tokens: Tensor  # (B, n, T)
    candidates: Beams  # all that the beam holds


@torch.inference_mode()
def search(
    stepper: Stepper,
    options: SearchOptions,
    words: SearchTokens = SearchTokens(),  # noqa: B008 - a tuple, never changed
    seeds: Sequence[int] | None = None,
    *,
    evidence: bool = False,
) -> list[list[Hypothesis]]:
    """Search for the captions of every photo.

    Args:
        stepper: A new stepper.
        options: Search options.
        words: The words in the options, from ``encode_search_words``.
        seeds: A random seed per photo, combined with ``options.seed``; None: its index.
        evidence: Collect the evidence of the captions, which takes a little longer.

    Returns:
        For each photo the best ``options.num_captions`` captions, best first; fewer if there are
        not as many different ones.
    """
    count, device = stepper.batch_size, stepper.device
    if not count:
        return []
    rules = Rules(options, words, stepper.end_token, device)
    seeds = range(count) if seeds is None else seeds
    strategy = build_strategy(options, words, seeds, stepper.end_token, device)
    photos = torch.arange(count, device=device)  # the photo in each row of the batch
    beams = _start(count, device)
    last = upload(torch.as_tensor(stepper.start_token), device).expand(count).unsqueeze(1)
    records: list[_StepRecord] = []
    finished: list[_Finished] = []
    for t in range(options.max_length):
        advance = stepper.advance(last)
        # Before words are forbidden.
        entropies = entropy(advance.log_probs) if evidence else torch.zeros_like(advance.gates)
        rules.forbid(advance.log_probs, beams.tokens)
        choice = strategy.choose(_totals(beams, advance, stepper.end_token), beams, photos)
        records.append(_record(_rows(photos, count), beams, choice, advance, entropies))
        beams = _extend(beams, choice, stepper.end_token)
        if t == options.max_length - 1:
            finished.append(_collect(strategy, beams, photos))
            break
        done = strategy.finished(beams).cpu()  # the only synchronization of a step
        stepper.reorder(choice.parents)
        if done.any():
            order = upload(done.int().argsort(descending=True, stable=True), device)
            ready, remaining = order.tensor_split([int(done.sum())])
            finished.append(_collect(strategy, _select(beams, ready), photos[ready]))
            if done.all():
                break
            photos, beams = photos[remaining], _select(beams, remaining)
            stepper.keep(remaining)
        last = beams.tokens[:, :, -1]
    results: list[list[Hypothesis]] = [[] for _ in range(count)]
    for photo, hypothesis in _trace(records, finished, stepper.end_token, evidence):
        results[photo].append(hypothesis)
    # Samples may repeat; beam groups may find the same caption, which is returned once.
    if options.temperature == 0:
        results = [_distinct(hypotheses) for hypotheses in results]
    return [hypotheses[: options.num_captions] for hypotheses in results]


def _start(batch: int, device: torch.device) -> Beams:
    """One empty caption per photo."""
    zeros = torch.zeros(batch, 1, device=device)
    return Beams(zeros, zeros, zeros.bool(), zeros.long().new_zeros(batch, 1, 0))


def _totals(beams: Beams, advance: Advance, end_token: int) -> Tensor:
    """Log-probability of every caption with every next word, (B, K, V).

    A finished caption has one continuation, another end token at no cost.
    """
    unfinished = beams.scores.masked_fill(beams.ended, -torch.inf)
    totals = advance.log_probs + unfinished.unsqueeze(2)
    ends = totals[..., end_token]
    ends.copy_(torch.where(beams.ended, beams.scores, ends))
    return totals


def _take(part: Tensor, index: Tensor) -> Tensor:
    """``part[b, index[b, k]]`` for every b and k: (B, K, ...) and (B, n) to (B, n, ...)."""
    rows = torch.arange(len(index), device=index.device).unsqueeze(1)
    return part[rows, index]


def _extend(beams: Beams, choice: Choice, end_token: int) -> Beams:
    """Append the chosen words."""
    ended = _take(beams.ended, choice.parents)
    tokens = _take(beams.tokens, choice.parents)
    return Beams(
        scores=choice.scores,
        lengths=_take(beams.lengths, choice.parents) + ~ended,
        ended=ended | (choice.words == end_token),
        tokens=torch.cat([tokens, choice.words.unsqueeze(2)], dim=2),
    )


def _select(beams: Beams, rows: Tensor) -> Beams:
    """Select photos."""
    return Beams(*(part[rows] for part in beams))


def _collect(strategy: Strategy, beams: Beams, photos: Tensor) -> _Finished:
    """The captions to return of finished photos."""
    best = strategy.best(beams)
    scores = beams.scores.masked_fill(strategy.ranks(beams) == -torch.inf, -torch.inf)
    return _Finished(photos, best, scores.gather(1, best), _take(beams.tokens, best), beams)


def _agreement(finished: _Finished, end_token: int) -> Tensor:
    """Share and overlap of the captions to return, see ``Evidence``: (B, n, 2)."""
    beams, best = finished.candidates, finished.beams
    shares = beams.scores.softmax(dim=1).nan_to_num()  # (B, K); NaN: no caption has a probability
    words = beams.tokens != end_token  # (B, K, T)
    overlaps = []
    for column in best.unbind(dim=1):  # one by one: n K T T numbers could be too many
        own = _take(beams.tokens, column.unsqueeze(1))  # (B, 1, T)
        found = (own.unsqueeze(3) == beams.tokens.unsqueeze(2)).any(dim=3)  # (B, K, T)
        counted = _take(words, column.unsqueeze(1))
        overlap = (found & counted).sum(dim=2) / counted.sum(dim=2).clamp(min=1)
        overlaps.append((shares * overlap).sum(dim=1))
    return torch.stack([shares.gather(1, best), torch.stack(overlaps, dim=1)], dim=2)


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy of distributions over the last dimension, in nats."""
    finite = log_probs.clamp(min=-1e4)  # 0 * -inf is NaN
    products: Tensor = torch.linalg.vecdot(log_probs.exp(), finite)
    return -products


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Drop repeated captions."""
    first: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in hypotheses:
        first.setdefault(tuple(hypothesis.tokens), hypothesis)
    return list(first.values())


def _record(
    rows: Tensor, beams: Beams, choice: Choice, advance: Advance, entropies: Tensor
) -> _StepRecord:
    each = torch.arange(len(choice.words), device=rows.device).unsqueeze(1)
    chosen = advance.log_probs[each, choice.parents, choice.words]
    chosen = chosen.masked_fill(_take(beams.ended, choice.parents), 0.0)
    return _StepRecord(rows, choice.parents, chosen, advance.alphas, advance.gates, entropies)


def _rows(photos: Tensor, count: int) -> Tensor:
    """The row of each of all photos in the batch, (N,); undefined for photos that have left."""
    rows = photos.new_zeros(count)
    rows[photos] = torch.arange(len(photos), device=photos.device)
    return rows


def _trace(
    records: list[_StepRecord], finished: list[_Finished], end_token: int, evidence: bool
) -> Iterator[tuple[int, Hypothesis]]:
    """Trace the finished captions back through the steps; best first for each photo."""
    photos = torch.cat([f.photos.repeat_interleave(f.beams.shape[1]) for f in finished])  # (M,)
    beams = torch.cat([f.beams.flatten() for f in finished])
    lengths = [f.tokens.shape[2] for f in finished for _ in range(f.beams.numel())]
    steps = upload(torch.tensor(lengths), photos.device)
    traced = []
    for t in reversed(range(len(records))):
        rows, step = records[t].rows[photos], records[t]
        present = t < steps  # the others finished earlier
        beam = torch.where(present, beams, 0)
        parents = step.parents[rows, beam]
        traced.append(
            (
                step.log_probs[rows, beam],
                step.alphas[rows, parents],
                step.gates[rows, parents],
                step.entropies[rows, parents],
            )
        )
        beams = torch.where(present, parents, beams)
    parts = [torch.stack(part[::-1], dim=1).cpu() for part in zip(*traced, strict=True)]
    scores = torch.cat([f.scores.flatten() for f in finished]).tolist()
    captions = [tokens for f in finished for tokens in f.tokens.flatten(0, 1).tolist()]
    agreements: list[list[float]] = [[]] * len(captions)
    if evidence:
        both = [_agreement(f, end_token).flatten(0, 1) for f in finished]
        agreements = torch.cat(both).tolist()
    for photo, score, tokens, agreement, own in zip(
        photos.tolist(), scores, captions, agreements, zip(*parts, strict=True), strict=True
    ):
        if score == -torch.inf:  # only forbidden words were left
            continue
        length = tokens.index(end_token) if end_token in tokens else len(tokens)
        log_probs, alphas, gates, entropies = (part[:length] for part in own)
        ended = length < len(tokens)
        yield (
            photo,
            Hypothesis(
                tokens[:length],
                log_probs,
                alphas,
                gates,
                score,
                ended,
                Evidence(entropies, *agreement) if evidence else None,
            ),
        )
