"""Words of a caption: found by what a user typed; positions count from 0, for users from 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from captioner.caption import Caption
from captioner.errors import ConfigError
from captioner.text.tokenizer import normalize, tokenize

_POSITIONS = re.compile(r"(\d+)(?:\s*[-–]\s*(\d+))?")


def find(words: Sequence[str], query: str, pieces: Sequence[str] = ()) -> list[tuple[int, ...]]:
    """Positions, counted from 0, of every occurrence of a query in a caption of T words.

    It is a word ("dog"), consecutive words ("brown dog"), or of a model with sub-words several of
    its ``Caption.pieces``; a position counted from 1 ("3") or a range of them ("2-4"). Digits are
    always positions. ConfigError: there is no match.
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


def find_all(caption: Caption, only: Sequence[str]) -> list[tuple[int, ...]]:
    """Positions of all queries in a caption, without duplicates; missing ones are skipped."""
    found: list[tuple[int, ...]] = []
    for query in only:
        with suppress(ConfigError):
            found += find(caption.words, query, caption.pieces)
    return list(dict.fromkeys(found))


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
