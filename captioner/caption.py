"""A caption: the words, how sure the model was of each, and where it looked for each.

Plain NumPy, so that pictures, reports and files can be made from it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Tokens that the Penn Treebank convention splits off a word and that readers want joined again.
_CLITICS = frozenset({"'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "'"})
# The convention's names of brackets.
_BRACKETS = {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}"}


class CropBox(NamedTuple):
    """The part of a photo that the encoder saw, as fractions of its width and height.

    (0, 0, 1, 1) is the whole photo; a centre crop lies inside it.
    """

    left: float = 0.0
    top: float = 0.0
    right: float = 1.0
    bottom: float = 1.0


class Alternative(NamedTuple):
    """A word that the model could have said at a place."""

    word: str
    """As the vocabulary spells it; ``END_NAME`` for the sentence's end."""
    log_prob: float
    """Natural log-probability given the words before it."""


END_NAME = "<end>"
"""What an alternative calls the end of the sentence."""


@dataclass(frozen=True, eq=False, repr=False)
class Caption:
    """One sentence about one photo, with its evidence.

    T words, a grid of Gh x Gw regions.
    """

    words: tuple[str, ...]
    """The T words, as the vocabulary spells them."""
    log_probs: NDArray[np.float32]
    """(T,) natural log-probability of each word given the words before it."""
    alphas: NDArray[np.float32]
    """(T, Gh, Gw) attention while each word was chosen; every map sums to 1."""
    gates: NDArray[np.float32]
    """(T,) the context gate beta, 0 (the photo is ignored) to 1 (fully used). Models of the order
    ``luong`` have no gate: 1; with attention ``fixed_at_start`` no word is given a context: 0."""
    log_prob: float
    """Natural log-probability of the whole sentence, its end token included."""
    crop_box: CropBox = field(default=CropBox())
    """The part of the photo that the maps cover."""
    alternatives: tuple[tuple[Alternative, ...], ...] = ()
    """The most probable words at each of the T places, best first, the one that was said among
    them where it is one of them; empty where they were not asked for."""

    @property
    def text(self) -> str:
        """The sentence as a person writes it: clitics joined, no final stop."""
        return join_words(self.words)

    def as_dict(self, *, attention: bool = False) -> dict[str, Any]:
        """What JSON can hold of it.

        Args:
            attention: Tell the gates, the maps and the part of the photo that they cover too.

        Returns:
            ``text``, ``words``, ``log_prob``, ``log_probs``; ``alternatives`` where they were asked
            for, a list a word; with attention ``gates``, ``alphas`` (T, Gh, Gw) and ``region``
            (left, top, right, bottom).
        """
        told: dict[str, Any] = {
            "text": self.text,
            "words": list(self.words),
            "log_prob": round(self.log_prob, 4),
            "log_probs": _rounded(self.log_probs, 4),
        }
        if self.alternatives:
            told["alternatives"] = [
                [{"word": other.word, "log_prob": round(other.log_prob, 4)} for other in place]
                for place in self.alternatives
            ]
        if attention:
            told["gates"] = _rounded(self.gates, 4)
            told["alphas"] = _rounded(self.alphas, 6)
            told["region"] = [round(side, 6) for side in self.crop_box]
        return told

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:  # arrays would fill the screen
        return f"<{type(self).__name__} {self.text!r}, log_prob {self.log_prob:.2f}>"


def _rounded(values: NDArray[np.float32], decimals: int) -> list[Any]:
    """As nested lists of numbers that are short to write."""
    rounded: list[Any] = np.round(np.asarray(values, dtype=np.float64), decimals).tolist()
    return rounded


def join_words(words: tuple[str, ...] | list[str]) -> str:
    """Join tokens into a sentence; Penn Treebank clitics go back to the word before them.

    Args:
        words: Tokens, e.g. ``["a", "man", "'s", "hat"]``.

    Returns:
        The sentence, e.g. ``"a man's hat"``.
    """
    text = ""
    for word in words:
        sign = _BRACKETS.get(word, word)
        joined = not text or word in _CLITICS or sign in ")]}" or text[-1] in "([{"
        text += sign if joined else f" {sign}"
    return text
