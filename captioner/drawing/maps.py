"""Find words in a caption and combine their attention maps. Arrays and words only.

Notation: T words, a grid of Gh x Gw regions. Positions count from 0; in user input, from 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from captioner.caption import Caption
from captioner.drawing.options import Combine
from captioner.errors import ConfigError
from captioner.text.tokenizer import normalize, tokenize

_POSITIONS = re.compile(r"(\d+)(?:\s*[-–]\s*(\d+))?")


def find(words: Sequence[str], query: str, pieces: Sequence[str] = ()) -> list[tuple[int, ...]]:
    """Find a word or phrase in a caption.

    Args:
        words: The T words of the caption.
        query: A word ("dog"), consecutive words ("brown dog"), a position counted from 1 ("3") or
            a range of positions ("2-4"). Digits are always positions.
        pieces: ``Caption.pieces``: the query may be several of them, joined.

    Returns:
        The positions, counted from 0, of every occurrence; at least one.

    Raises:
        ConfigError: There is no match.
    """
    numbered = " ".join(f"{number} {word}" for number, word in enumerate(words, 1))
    numbered = numbered or "(no words)"
    if match := _POSITIONS.fullmatch(query.strip()):
        first = int(match[1])
        last = int(match[2] or match[1])
        if 1 <= first <= last <= len(words):
            return [tuple(range(first - 1, last))]
        raise ConfigError(f"position {query.strip()!r} is not in the caption: {numbered}")
    spelled = [word.casefold() for word in words]
    for wanted in (query.casefold().split(), [word.casefold() for word in tokenize(query)]):
        length = len(wanted)
        starts = range(len(words) - length + 1) if wanted else ()
        if found := [s for s in starts if spelled[s : s + length] == wanted]:
            return [tuple(range(start, start + length)) for start in found]
    if joined := _find_pieces(pieces, normalize(query).casefold().strip()):
        return joined
    raise ConfigError(f"{query!r} is not in the caption: {numbered}")


def _find_pieces(pieces: Sequence[str], wanted: str) -> list[tuple[int, ...]]:
    """The shortest runs of consecutive pieces that, joined, are the text."""
    found = []
    for start in range(len(pieces)):
        text = ""
        for stop in range(start, len(pieces)):
            text = (text + pieces[stop].casefold()).lstrip()
            if text == wanted and pieces[start].strip():
                found.append(tuple(range(start, stop + 1)))
            if len(text) >= len(wanted):
                break
    return found


def check_caption(caption: Caption) -> None:
    """Check that a caption can be drawn.

    Raises:
        ConfigError: It is not a ``Caption``, its arrays do not match its words, or its attention
            is not finite.
    """
    if not isinstance(caption, Caption):
        raise ConfigError(
            f"expected a Caption, not {type(caption).__name__}; use the result of "
            "model.caption(photo) or model.explain(photo, text)"
        )
    count, shape = len(caption.words), np.shape(caption.alphas)
    if len(shape) != 3 or shape[0] != count or (count and 0 in shape):
        raise ConfigError(
            f"alphas of a caption of {count} words must have shape ({count}, rows, columns), "
            f"not {shape}"
        )
    if not np.isfinite(caption.alphas).all():
        raise ConfigError("alphas contain NaN or infinity and cannot be drawn")
    for name in ("log_probs", "gates", "pieces", "alternatives"):
        values = getattr(caption, name)
        if len(values) != count and not (name in ("pieces", "alternatives") and not values):
            raise ConfigError(f"a caption of {count} words has {len(values)} {name}")


def combine_maps(
    alphas: NDArray[np.float32], positions: Sequence[int], how: Combine = "mean"
) -> NDArray[np.float32]:
    """Combine the maps of several words into one.

    Args:
        alphas: Attention of a caption, (T, Gh, Gw).
        positions: Positions of the words, counted from 0; at least one.
        how: ``mean``, which sums to 1 again, or ``max`` per region, which is not renormalized:
            regions keep the colour of the word's own map.

    Returns:
        (Gh, Gw).
    """
    chosen = np.asarray(alphas, dtype=np.float32)[list(positions)]
    result: NDArray[np.float32] = chosen.mean(axis=0) if how == "mean" else chosen.max(axis=0)
    return result


def mean_map(alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean of all words' maps: the coverage of the caption divided by T.

    Coverage itself sums to T and could not share a colour scale with the maps of words.

    Args:
        alphas: Attention of a caption, (T, Gh, Gw), T at least 1.

    Returns:
        (Gh, Gw).
    """
    return combine_maps(alphas, range(len(alphas)))


def interpolate(
    start: NDArray[np.float32], end: NDArray[np.float32], part: float
) -> NDArray[np.float32]:
    """Interpolate between two maps with ``ease``; the sum stays 1 if both sum to 1.

    Args:
        start: (Gh, Gw) at ``part`` 0.
        end: (Gh, Gw) at ``part`` 1.
        part: Elapsed share of the time, 0 to 1.
    """
    eased = np.float32(ease(part))
    mixed: NDArray[np.float32] = (np.float32(1.0) - eased) * start + eased * end
    return mixed


def ease(part: float) -> float:
    """Smoothstep, 3 t^2 - 2 t^3: slow at both ends. ``part`` is clipped to 0 to 1."""
    part = min(max(part, 0.0), 1.0)
    return part * part * (3.0 - 2.0 * part)
