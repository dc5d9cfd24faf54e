"""The search for the best captions of a batch of photos, word by word.

    beams = one empty caption per photo
    until every photo is finished:
        advance   compute the log-probability of every next word of every caption (stepper)
        merge     move the probability of man, woman, ... to person (option neutral)
        widen     add the probability of man, woman, ... to person (option certainty)
        favour    raise the scores of rare words (option rare_words)
        weigh     add rewards for words that are probably true of the photo (if it was read)
        forbid    exclude the words that break a rule
        choose    let the strategy pick the continuations to keep
    rerank        order the captions by how well they agree (option candidates)

The search does not depend on the model. It works with any object that has the methods of
``Stepper``. All photos and beams of a batch advance together, without a Python loop over photos or
beams. Finished photos leave the batch. Each step waits for the device only once, to find out which
photos are finished.

A beam is a place for one caption of a photo. A finished caption keeps its beam and its score, so
the beams always contain the best captions found so far. Each word stores the beam that it
continued, its parent. Attention maps and gates are stored once per step. At the end, the search
follows the parents of a returned caption back through the steps to collect its maps and gates.

Notation: N photos, B unfinished photos, K beams per photo, V tokens in the vocabulary, L regions,
T words so far, n returned captions per photo.
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
"""Share of the sampled candidates to compare with each other. The lowest-ranking are dropped."""


class Advance(NamedTuple):
    """The result of a stepper for one step."""

    log_probs: Array
    """Log-probabilities of the next word, (B, K, V), float32. Words that the model never generates
    have -inf. The search may modify the array in place."""
    alphas: Array
    """Attention weights for the next word, (B, K, L)."""
    gates: Array
    """Context gates for the next word, (B, K)."""


class Stepper(Protocol):
    """A decoder that advances a batch of photos by one word and keeps the state of every beam.

    A new stepper has one beam per photo. After that, ``reorder`` sets the number of beams.
    """

    xp: Any
    """Namespace of the stepper's arrays: ``array_api_compat.torch`` or ``arrays.NUMPY``."""
    device: Any
    """Device of the stepper's arrays, or "cpu" for NumPy."""
    start_token: int | Array
    """Start token, either one for all photos or one per photo, (B,)."""
    end_token: int
    """End token of all captions."""

    @property
    def batch_size(self) -> int:
        """The number of photos that are not finished yet, B."""

    def advance(self, tokens: Array) -> Advance:
        """Pass the last word of each caption to the decoder, and score the next word.

        Args:
            tokens: The last word of the caption in each beam, (B, K). At first, it is the start
                token.
        """

    def reorder(self, parents: Array) -> None:
        """Rearrange the decoder's state to the beams that the strategy has chosen.

        Args:
            parents: Beam of the last step that each beam continues, (B, K). Beam k of photo b
                continues beam ``parents[b, k]``.
        """

    def keep(self, rows: Array) -> None:
        """Drop all photos except those with these indices in the batch, (B',)."""


@dataclass(frozen=True)
class Hypothesis:
    """A caption of T tokens, without start and end tokens."""

    tokens: list[int]
    """Token ids of the words, T of them."""
    token_log_probs: NDArray[np.float32]
    """The model's own log-probability of each token, (T,), without rewards of the search."""
    alphas: NDArray[np.float32]
    """Attention weights of each token, (T, L)."""
    gates: NDArray[np.float32]
    """Context gate of each token, (T,)."""
    log_prob: float
    """Log-probability of the whole caption, including its end token if it has one."""
    ended: bool
    """False if the caption was truncated at ``max_length`` and has no end token."""


class _Finished(NamedTuple):
    """The captions to return for B photos that finished in the same step."""

    photos: Array
    """Index of each photo in the original batch, (B,)."""
    steps: list[list[Array]]
    """Attention weights, (B, beams, L), and gates, (B, beams), of each step."""
    beams: Beams
    """The captions, (B, n, ...), best first."""


def search(
    stepper: Stepper,
    options: SearchOptions,
    words: SearchTokens = SearchTokens(),  # noqa: B008 - a tuple, never changed
    seeds: Sequence[int] | None = None,
    *,
    worth: Worth | None = None,
) -> list[list[Hypothesis]]:
    """Search for the best captions of every photo.

    Args:
        stepper: A new stepper for the N photos.
        options: Search options.
        words: Token ids of the words in the options, from ``encode_search_words``.
        seeds: Random seed for each photo, combined with ``options.seed``. Only sampling uses it.
            By default, the index of the photo.
        worth: The probability that each word is true of each photo. If None, true words are not
            rewarded.

    Returns:
        The captions of each photo, best first. Their number is ``options.num_captions``, or less
        if the search found fewer different captions.
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
    # For every step: alphas (B, beams, L) and gates (B, beams).
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
        # This is the only line in which a step waits for the device.
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
    """Collect the captions of each photo, best first.

    Args:
        finished: The captions, in groups of photos that finished in the same step.
        count: Number of photos, N.
        options: Search options.
        end: The end token.
        rescored: Whether the search changed the model's probabilities (see ``_trace``).
    """
    results: list[list[Hypothesis]] = [[] for _ in range(count)]
    for photo, hypothesis in (one for each in finished for one in _trace(each, end, rescored)):
        results[photo].append(hypothesis)
    # Samples may repeat. A caption that several beam groups found is returned only once.
    if options.temperature == 0:
        results = [_distinct(hypotheses) for hypotheses in results]
    return [hypotheses[: options.num_captions] for hypotheses in results]


def _most_agreed(
    candidates: Sequence[Hypothesis], options: SearchOptions, words: SearchTokens
) -> list[Hypothesis]:
    """Return the captions of a photo that agree best with all of the photo's candidates.

    Probable captions should count more. If captions were sampled, probable captions already occur
    more often, so every sample has the same weight. The lowest-ranking fifth of the samples is
    dropped. These samples are used only if the other samples contain too few different captions.

    Beam search finds each caption only once. So its captions are weighted by the square root of
    their probability. With the probability itself, the first caption would outweigh all others.

    Args:
        candidates: All captions that the search found, best first.
        options: Search options. ``num_captions`` is the number of captions to return.
        words: Token ids of the words in the options.
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
    """Create the first beams: one empty caption per photo."""
    zeros = xp.zeros((batch, 1), dtype=xp.float32, device=device)
    values, tokens = zeros[..., None][..., :0], xp.astype(zeros[..., None], xp.int64)[..., :0]
    return Beams(zeros, zeros, xp.astype(zeros, xp.bool), tokens, values, parents=tokens)


def _totals(beams: Beams, log_probs: Array, end_token: int) -> Array:
    """Return the log-probability of every caption extended by every next word, (B, K, V).

    The only continuation of a finished caption is another end token, at no cost.
    """
    xp = namespace(beams.scores)
    unfinished = xp.where(beams.ended, -xp.inf, beams.scores)
    totals = log_probs + unfinished[..., None]
    totals[..., end_token] = xp.where(beams.ended, beams.scores, totals[..., end_token])
    return totals


def _each(index: Array) -> Array:
    """Return row numbers, (B, 1), that help to select different columns in each row.

    ``index`` contains n columns for each row, (B, n). For an array of the shape (B, K, ...),
    ``array[_each(index), index]`` selects these columns. The result has the shape (B, n, ...).
    """
    return namespace(index).arange(len(index), device=index.device)[:, None]


def _extend(beams: Beams, choice: Choice, log_probs: Array, end_token: int) -> Beams:
    """Append the chosen words to the captions.

    Args:
        beams: The captions so far.
        choice: The continuations to keep.
        log_probs: The model's own log-probabilities of the next word, (B, K, V).
        end_token: The end token.

    Returns:
        The captions in the new beams, with one more word each.
    """
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
    """Return the beams of the photos with these indices in the batch."""
    return Beams(*(part[rows] for part in beams))


def _distinct(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    """Return the first copy of each caption, without repetitions, in the same order."""
    first: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in hypotheses:
        first.setdefault(tuple(hypothesis.tokens), hypothesis)
    return list(first.values())


def _trace(finished: _Finished, end_token: int, rescored: bool) -> Iterator[tuple[int, Hypothesis]]:
    """Yield each caption of the finished photos with the index of its photo.

    The captions of a photo are yielded best first.

    Args:
        finished: The captions and the steps that led to them.
        end_token: The end token.
        rescored: Whether the search changed the model's probabilities. If so, the scores of the
            captions are not log-probabilities, and ``Hypothesis.log_prob`` is the sum of the
            model's own log-probabilities instead.
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
    for row, column in np.argwhere(scores != -np.inf):  # -inf: every continuation was forbidden
        tokens = words[row, column].tolist()
        length = tokens.index(end_token) if end_token in tokens else len(tokens)
        ended = length < len(tokens)
        log_probs = token_log_probs[row, column]
        alphas, gates = (part[row, column, :length] for part in seen)
        used = scores[row, column]
        log_prob = log_probs[: length + ended].sum(dtype=np.float64) if rescored else used
        found = tokens[:length], log_probs[:length], alphas, gates
        yield photos[row], Hypothesis(*found, float(log_prob), ended)
