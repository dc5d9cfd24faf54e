"""What of a caption a picture shows: a word, a phrase, all of it. Arrays and words only.

A phrase's map is made of its words' maps: the mean (a map again: it sums to 1) or, at every
region, the greatest of them (no longer a share of one whole, and not renormalised: a region keeps
the colour it had in the word's own map).

Notation: T words, a grid of Gh x Gw regions. Places count from 0; people count from 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from captioner.caption import Caption
from captioner.errors import ConfigError
from captioner.tokenizer import tokenize

Combine = Literal["mean", "max"]

_PLACES = re.compile(r"(\d+)(?:\s*[-–]\s*(\d+))?")


def find(words: Sequence[str], what: str) -> list[tuple[int, ...]]:
    """Where a word or a phrase stands in a caption.

    Args:
        words: The T words of the caption.
        what: A word ("dog"), words in a row ("brown dog"), a place counted from 1 ("3") or places
            ("2-4"). Digits are always places.

    Returns:
        The places, counted from 0, of every occurrence: at least one.

    Raises:
        ConfigError: The caption does not have it.
    """
    if match := _PLACES.fullmatch(what.strip()):
        first = int(match[1])
        last = int(match[2] or match[1])
        if 1 <= first <= last <= len(words):
            return [tuple(range(first - 1, last))]
        raise ConfigError(f"there is no place {what.strip()!r} in the caption: {_told(words)}")
    spelled = [word.casefold() for word in words]
    for wanted in (what.casefold().split(), [word.casefold() for word in tokenize(what)]):
        length = len(wanted)
        starts = range(len(words) - length + 1) if wanted else ()
        if found := [s for s in starts if spelled[s : s + length] == wanted]:
            return [tuple(range(start, start + length)) for start in found]
    raise ConfigError(f"{what!r} is not in the caption: {_told(words)}")


def check_caption(caption: Caption) -> None:
    """Refuse what is no caption, or one whose arrays do not fit its words or hold no numbers.

    Raises:
        ConfigError: It is such a one.
    """
    if not isinstance(caption, Caption):
        raise ConfigError(
            "a caption is what model.caption(photo) or model.explain(photo, text) gives, not "
            f"{type(caption).__name__}; give one of those"
        )
    count, shape = len(caption.words), np.shape(caption.alphas)
    if len(shape) != 3 or shape[0] != count or (count and 0 in shape):
        raise ConfigError(
            f"the alphas of a caption of {count} words have the shape ({count}, rows, columns), "
            f"not {shape}"
        )
    if not np.isfinite(caption.alphas).all():
        raise ConfigError("the alphas hold NaN or infinity; there is no map to draw")
    for name in ("log_probs", "gates"):
        if np.shape(getattr(caption, name)) != (count,):
            raise ConfigError(
                f"the {name} of a caption of {count} words have the shape ({count},), "
                f"not {np.shape(getattr(caption, name))}"
            )
    if caption.alternatives and len(caption.alternatives) != count:
        raise ConfigError(
            f"a caption of {count} words has alternatives at {count} places, "
            f"not at {len(caption.alternatives)}"
        )


def combined(
    alphas: NDArray[np.float32], places: Sequence[int], how: Combine = "mean"
) -> NDArray[np.float32]:
    """One map for several words.

    Args:
        alphas: Attention of a caption, (T, Gh, Gw).
        places: The words, counted from 0; at least one.
        how: ``mean``, or ``max`` for the greatest at every region, which is not renormalised.

    Returns:
        (Gh, Gw).
    """
    if how not in ("mean", "max"):
        raise ConfigError(f"combine is {how!r}; give mean or max")
    chosen = np.asarray(alphas, dtype=np.float32)[list(places)]
    result: NDArray[np.float32] = chosen.mean(axis=0) if how == "mean" else chosen.max(axis=0)
    return result


def coverage(alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of the caption's attention each region got: the mean of all words' maps.

    The sum over the words, T in all, could not share a colour scale with one word's map; the mean
    sums to 1 as they do.

    Args:
        alphas: Attention of a caption, (T, Gh, Gw), T at least 1.

    Returns:
        (Gh, Gw).
    """
    return combined(alphas, range(len(alphas)))


def between(
    start: NDArray[np.float32], end: NDArray[np.float32], part: float
) -> NDArray[np.float32]:
    """A map on the way from one to another, which leaves and arrives gently.

        e = 3 part^2 - 2 part^3
        (1 - e) start + e end

    Every map on the way sums to 1 where both ends do.

    Args:
        start: (Gh, Gw) at ``part`` 0.
        end: (Gh, Gw) at ``part`` 1.
        part: Of the time that is over, 0 to 1.
    """
    eased = np.float32(ease(part))
    mixed: NDArray[np.float32] = (np.float32(1.0) - eased) * start + eased * end
    return mixed


def ease(part: float) -> float:
    """The part of the way after a part of the time: slow, fast, slow."""
    part = min(max(part, 0.0), 1.0)
    return part * part * (3.0 - 2.0 * part)


def _told(words: Sequence[str]) -> str:
    """The words with their places, for a message."""
    return " ".join(f"{place} {word}" for place, word in enumerate(words, 1)) or "it has no words"
