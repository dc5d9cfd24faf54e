"""Caption search over a step function.

    beams = one empty caption per photo
    until every photo is finished:
        advance   the stepper scores every next word of every caption
        merge     man, woman, ... become person if the options require it
        favour    the scores of rare words rise if the options require it
        weigh     the truth of each word against its probability, with a reading of the photo
        forbid    the rules mask words that must not follow
        choose    the strategy keeps some of the continuations
    rerank        by their consensus, if the options require it

The search does not depend on a model: it drives any ``Stepper``. All photos and beams of a batch
advance together, no Python loop runs over photos or beams inside a step, and finished photos leave
the batch. Each step synchronizes with the device once, to find out which photos are finished.

A finished caption stays in the beam with its score frozen, so the beam always holds the best
captions known, finished or not. Attention and gates of every step are kept once; the returned
captions find theirs by their parents.

Notation: B photos still searched of N, K beams, V vocabulary, L regions, T words so far, n returned
captions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from captioner.options import SearchOptions
from captioner.search.arrays import Array, namespace, on_device, to_numpy
from captioner.search.consensus import by_consensus
from captioner.search.rules import Rules
from captioner.search.strategies import Beams, Choice, build_strategy
from captioner.search.words import SearchTokens
from captioner.search.worth import Worth, build_rewards

_KEPT_SAMPLES = 0.8
"""Share of the sampled candidates that are ranked and count as references: the best ones."""


class Advance(NamedTuple):
    """Result of one step."""

    log_probs: Array
    """(B, K, V) log-probabilities of the next word, float32; -inf for forbidden words. The search
    may modify it in place."""
    alphas: Array
    """(B, K, L) attention when the word is chosen."""
    gates: Array
    """(B, K) context gate."""


class Stepper(Protocol):
    """Advances a batch of photos by one word; holds the state of every beam.

    A new stepper has one beam per photo.
    """

    xp: Any
    """Namespace of its arrays: ``array_api_compat.torch`` or ``arrays.NUMPY``."""
    device: Any
    """Of its arrays; "cpu" for NumPy."""
    start_token: int | Array
    """One for all photos, or one per photo, (B,)."""
    end_token: int

    @property
    def batch_size(self) -> int:
        """B, the number of photos still searched."""

    def advance(self, tokens: Array) -> Advance:
        """Feed the last word of each beam, (B, K), and score the next."""

    def reorder(self, parents: Array) -> None:
        """Let beam k of each photo continue beam ``parents[b, k]`` of the last step, (B, K)."""

    def keep(self, rows: Array) -> None:
        """Continue with these photos only, (B',)."""


@dataclass(frozen=True)
class Hypothesis:
    """One caption of T tokens, without start and end."""

    tokens: list[int]
    token_log_probs: NDArray[np.float32]
    """(T,) the model's, whatever the search preferred."""
    alphas: NDArray[np.float32]
    """(T, L)."""
    gates: NDArray[np.float32]
    """(T,)."""
    log_prob: float
    """Of the whole caption, including its end token if it has one."""
    ended: bool
    """False: truncated at max_length, without an end token."""


class _Finished(NamedTuple):
    """The captions to return of the photos that finished at one step."""

    photos: Array  # (B,)
    steps: list[list[Array]]  # of each step, see ``search``
    beams: Beams  # (B, n, ...), best first


def search(
    stepper: Stepper,
    options: SearchOptions,
    words: SearchTokens = SearchTokens(),  # noqa: B008 - a tuple, never changed
    seeds: Sequence[int] | None = None,
    *,
    worth: Worth | None = None,
) -> list[list[Hypothesis]]:
    """Search for the captions of every photo.

    Args:
        stepper: A new stepper.
        options: Search options.
        words: The words in the options, from ``encode_search_words``.
        seeds: A random seed per photo, combined with ``options.seed``; None: its index.
        worth: The truth of every word for these photos, if the model has a reading.

    Returns:
        For each photo the best ``options.num_captions`` captions, best first; fewer if there are
        not as many different ones.
    """
    count, xp, device = stepper.batch_size, stepper.xp, stepper.device
    if not count:
        return []
    if options.candidates:
        wider = replace(options, candidates=0, num_captions=options.candidates, rare_words=0.0)
        found = search(stepper, wider, words, seeds, worth=worth)
        return [_most_agreed(candidates, options, words) for candidates in found]
    end = stepper.end_token
    rules = Rules(options, words, end, xp, device)
    seeds = range(count) if seeds is None else seeds
    strategy = build_strategy(options, words, seeds, end_token=end, xp=xp, device=device)
    rewards = build_rewards(worth, options, end, xp, device)
    strategy.gain = rewards.most
    photos = xp.arange(count, device=device)  # the photo in each row of the batch
    beams = _start(count, xp, device)
    last = on_device(stepper.start_token, xp.int64, xp, device)
    last = xp.broadcast_to(last, (count,))[:, None]
    # Of every step: alphas (B, parents, L) and gates (B, parents).
    steps: list[list[Array]] = []
    finished: list[_Finished] = []
    for t in range(options.max_length):
        advance = stepper.advance(last)
        rules.merge_people(advance.log_probs)
        rewards.widen(advance.log_probs, beams.tokens)
        scores = rules.favour_rare_words(advance.log_probs)
        scores = rewards.add(scores, beams.tokens, photos)
        rules.forbid(scores, beams.tokens)
        choice = strategy.choose(_totals(beams, scores, end), beams, photos)
        beams = _extend(beams, choice, advance.log_probs, end)
        steps.append([advance.alphas, advance.gates])
        stepper.reorder(choice.parents)
        final = t == options.max_length - 1
        # The only synchronization of a step.
        done = np.ones(len(photos), bool) if final else to_numpy(strategy.finished(beams))
        if done.any():
            ready, remaining = (
                on_device(np.flatnonzero(rows), xp.int64, xp, device) for rows in (done, ~done)
            )
            ending = _select(beams, ready)
            best = strategy.best(ending)
            scores = xp.where(strategy.ranks(ending) == -xp.inf, -xp.inf, ending.scores)
            each = _each(best)
            captions = Beams(*[part[each, best] for part in (scores, *ending[1:])])
            own = [[part[ready] for part in step] for step in steps]
            finished.append(_Finished(photos[ready], own, captions))
            if done.all():
                break
            photos, beams = photos[remaining], _select(beams, remaining)
            steps = [[part[remaining] for part in step] for step in steps]
            stepper.keep(remaining)
        last = beams.tokens[:, :, -1]
    rescored = options.rare_words > 0 or rewards.most > 0
    return _results(finished, count, options, end, rescored)


def _results(
    finished: Sequence[_Finished], count: int, options: SearchOptions, end: int, rescored: bool
) -> list[list[Hypothesis]]:
    """The captions of all photos in their order, best first."""
    results: list[list[Hypothesis]] = [[] for _ in range(count)]
    for photo, hypothesis in (one for each in finished for one in _trace(each, end, rescored)):
        results[photo].append(hypothesis)
    # Samples may repeat; beam groups may find the same caption, which is returned once.
    if options.temperature == 0:
        results = [_distinct(hypotheses) for hypotheses in results]
    return [hypotheses[: options.num_captions] for hypotheses in results]


def _most_agreed(
    candidates: Sequence[Hypothesis], options: SearchOptions, words: SearchTokens
) -> list[Hypothesis]:
    """The ``options.num_captions`` captions of a photo that agree most with all of its candidates.

    Samples occur as often as they are probable, except that those that rank lowest count only where
    the others are too few. A beam holds each caption once. There each counts with the square root
    of its probability: with all of it, the first would outweigh the others. Candidates are the
    captions that the search found, best first.
    """
    kept, dropped = candidates, candidates[:0]
    if options.temperature:
        count = math.ceil(_KEPT_SAMPLES * len(candidates))
        kept, dropped = candidates[:count], candidates[count:]
        weights = [1.0] * count
    else:
        best = candidates[0].log_prob if candidates else 0.0
        weights = [math.exp((each.log_prob - best) / 2) for each in candidates]
    order = by_consensus([each.tokens for each in kept], weights, words.rarity, options.rare_words)
    found = _distinct([*(kept[index] for index in order), *dropped])
    return found[: options.num_captions]


def _start(batch: int, xp: Any, device: Any) -> Beams:
    """One empty caption per photo."""
    zeros = xp.zeros((batch, 1), dtype=xp.float32, device=device)
    values, tokens = zeros[..., None][..., :0], xp.astype(zeros[..., None], xp.int64)[..., :0]
    return Beams(zeros, zeros, xp.astype(zeros, xp.bool), tokens, values, parents=tokens)


def _totals(beams: Beams, log_probs: Array, end_token: int) -> Array:
    """Log-probability of every caption with every next word, (B, K, V).

    A finished caption has one continuation, another end token at no cost.
    """
    xp = namespace(beams.scores)
    unfinished = xp.where(beams.ended, -xp.inf, beams.scores)
    totals = log_probs + unfinished[..., None]
    totals[..., end_token] = xp.where(beams.ended, beams.scores, totals[..., end_token])
    return totals


def _each(index: Array) -> Array:
    """Return the numbers of the rows, (B, 1): ``part[_each(index), index]`` is (B, n, ...).

    It takes ``index[b, k]`` from row b of a part of shape (B, K, ...), for every b and k.
    """
    return namespace(index).arange(len(index), device=index.device)[:, None]


def _extend(beams: Beams, choice: Choice, log_probs: Array, end_token: int) -> Beams:
    """Append the chosen words; (B, K, V) are the model's log-probabilities."""
    xp, parents, words = namespace(choice.words), choice.parents, choice.words
    each = _each(parents)
    before = Beams(*[part[each, parents] for part in beams])  # the captions that are continued
    chosen = xp.where(before.ended, 0.0, log_probs[each, parents, words])
    return Beams(
        scores=choice.scores,
        lengths=before.lengths + ~before.ended,
        ended=before.ended | (words == end_token),
        tokens=xp.concat([before.tokens, words[..., None]], axis=2),
        log_probs=xp.concat([before.log_probs, chosen[..., None]], axis=2),
        parents=xp.concat([before.parents, parents[..., None]], axis=2),
    )


def _select(beams: Beams, rows: Array) -> Beams:
    """Select photos."""
    return Beams(*(part[rows] for part in beams))


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Drop repeated captions."""
    first: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in hypotheses:
        first.setdefault(tuple(hypothesis.tokens), hypothesis)
    return list(first.values())


def _trace(finished: _Finished, end_token: int, rescored: bool) -> Iterator[tuple[int, Hypothesis]]:
    """The captions of finished photos, best first for each photo.

    If the search was rescored, the probabilities that it used are not the model's.
    """
    xp, beams = namespace(finished.photos), finished.beams
    each = _each(beams.scores)
    own = [
        [part[each, beams.parents[..., t]] for part in step]
        for t, step in enumerate(finished.steps)
    ]
    seen = [to_numpy(xp.stack(of_steps, axis=2)) for of_steps in zip(*own, strict=True)]
    scores, _, _, words, token_log_probs, _ = map(to_numpy, beams)
    photos = to_numpy(finished.photos).tolist()
    for row, column in np.argwhere(scores != -np.inf):  # else only forbidden words were left
        tokens = words[row, column].tolist()
        length = tokens.index(end_token) if end_token in tokens else len(tokens)
        ended = length < len(tokens)
        log_probs = token_log_probs[row, column]
        alphas, gates = (part[row, column, :length] for part in seen)
        used = scores[row, column]
        log_prob = log_probs[: length + ended].sum(dtype=np.float64) if rescored else used
        found = tokens[:length], log_probs[:length], alphas, gates
        yield photos[row], Hypothesis(*found, float(log_prob), ended)
