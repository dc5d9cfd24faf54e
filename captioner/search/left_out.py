"""Words that the search left out of a caption, found by letting the decoder continue it.

With the option ``certainty``, the search may end a caption before the decoder would end it. The
continuation shows which words the decoder would have written next.

Notation: B photos, U words left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from captioner.options import SearchOptions
from captioner.search.arrays import on_device, to_numpy
from captioner.search.rules import Rules
from captioner.search.search import Hypothesis, Stepper
from captioner.search.words import SearchTokens


def continuations(
    stepper: Stepper,
    captions: Sequence[Sequence[int]],
    options: SearchOptions,
    words: SearchTokens = SearchTokens(),  # noqa: B008 - a tuple, never changed
) -> list[Hypothesis | None]:
    """Continue each photo's caption with the most probable words (greedy search).

    The rules of the search apply to these words too, such as banned words. Words that are true of
    the photo are not rewarded.

    Args:
        stepper: A new stepper for B photos.
        captions: Token ids of one caption per photo, without start and end tokens.
        options: Search options, which set the rules for words and the maximum length.
        words: Token ids of the words in the options, from ``encode_search_words``.

    Returns:
        The U words that follow each caption, or None if the decoder would end the caption at the
        same place. ``log_prob`` of a result is the sum over these U words.
    """
    xp, device, end = stepper.xp, stepper.device, stepper.end_token
    rules = Rules(options, words, end, xp, device)
    count, longest = len(captions), options.max_length - 1
    tokens = np.full((count, longest), end, np.int64)
    for row, caption in enumerate(captions):
        tokens[row, : len(caption)] = caption[:longest]
    lengths = np.minimum([len(caption) for caption in captions], longest)
    stops = np.full(count, longest)  # length of caption and continuation, in words
    found = []
    start = on_device(stepper.start_token, xp.int64, xp, device)
    last = xp.broadcast_to(start, (count,))[:, None]
    for t in range(longest):
        advance = stepper.advance(last)
        rules.merge_people(advance.log_probs)
        so_far = on_device(tokens[:, None, :t], xp.int64, xp, device)
        scores = xp.asarray(advance.log_probs, copy=True)
        rules.forbid(scores, so_far)
        chosen = to_numpy(xp.argmax(scores[:, 0], axis=1)).copy()
        chosen[to_numpy(xp.max(scores[:, 0], axis=1)) == -np.inf] = end  # all words are forbidden
        free = (t >= lengths) & (t < stops)
        tokens[free, t] = chosen[free]
        stops[free & (chosen == end)] = t
        log_probs = to_numpy(advance.log_probs)[np.arange(count), 0, tokens[:, t]]
        found.append((log_probs, to_numpy(advance.alphas)[:, 0], to_numpy(advance.gates)[:, 0]))
        last = on_device(tokens[:, t : t + 1], xp.int64, xp, device)
        if (stops <= t).all():
            break
    log_probs, alphas, gates = (np.stack(parts, axis=1) for parts in zip(*found, strict=True))
    results: list[Hypothesis | None] = []
    for row, (length, stop) in enumerate(zip(lengths.tolist(), stops.tolist(), strict=True)):
        part = slice(length, stop)
        own = tokens[row, part].tolist(), log_probs[row, part], alphas[row, part], gates[row, part]
        total = float(log_probs[row, part].sum(dtype=np.float64))
        results.append(Hypothesis(*own, total, ended=stop < longest) if stop > length else None)
    return results
