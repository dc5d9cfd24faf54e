"""A caption: its words with their log-probabilities and attention maps.

All arrays are NumPy arrays, so that captions can be drawn and stored without torch.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.errors import ConfigError
from captioner.geometry import Geometry
from captioner.hints import Hinting, hinted
from captioner.text.vocabulary import content_words

# Tokens that the Penn Treebank splits off words.
CLITICS = frozenset({"'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "'"})
# Names of brackets in the Penn Treebank.
BRACKETS = {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}"}

CONJUNCTIONS = ("and", "or")
"""Words that join two content words of one phrase, as in "black and white"."""


@hinted
class CropBox(NamedTuple):
    """The part of a photo that the encoder saw, as fractions of the photo's width and height."""

    left: float = 0.0
    top: float = 0.0
    right: float = 1.0
    bottom: float = 1.0


class Alternative(NamedTuple):
    """A candidate word at a position of a caption."""

    word: str
    """The word as in the vocabulary, or ``END_NAME`` for the end of the caption."""
    log_prob: float
    """Natural log-probability of the word, given the previous words."""


END_NAME = "<end>"
"""Name of the end token among the alternatives."""

DOUBTFUL = 0.25
"""Probability below which a word is doubtful, if the caption has no ``truth``. With the shipped
model, fewer than half of the doubtful words occur in a reference caption (docs/confidence.md)."""

DOUBTFUL_TRUTH = 0.5
"""Value of ``Caption.truth`` below which a content word is doubtful. Such a word is more likely
false than true."""


class Keyword(NamedTuple):
    """A word for a thing in the photo, with its probability."""

    word: str
    probability: float
    """Calibrated probability, 0 to 1, that the word occurs in at least one of five captions that
    people write for the photo."""
    map: NDArray[np.float32] | None = None
    """Natural log-odds that the keyword applies, for each region, (Gh, Gw). None if a server sent
    the keyword without its map. The odds for the whole photo are the mean of the odds for its
    regions. If an image does not look like a photo, ``probability`` is lower than these odds
    imply."""


class Phrase(NamedTuple):
    """Consecutive words of a caption that are true or false together."""

    text: str
    truth: float
    """Probability that all content words of the phrase are true, 0 to 1, or NaN without content
    words. It is the product of the words' probabilities in ``Caption.truth``."""


@dataclass(frozen=True, eq=False, repr=False)
class LeftOut:
    """The U words that the search left out at the end of a caption.

    The model would have continued with these words. They are probably not true, so the search ended
    the caption before them.
    """

    words: tuple[str, ...]
    """The U words, as in the vocabulary."""
    log_probs: NDArray[np.float32]
    """Natural log-probability of each word, given all words before it, (U,)."""
    alphas: NDArray[np.float32]
    """Maps of the words, (U, Gh, Gw), computed by the caption's ``method``."""
    gates: NDArray[np.float32]
    """Context gates of the words, (U,), from 0 (photo ignored) to 1 (photo fully used)."""
    truth: NDArray[np.float32]
    """Probability that each content word is true, (U,). Function words have NaN."""
    pieces: tuple[str, ...] = ()
    """The U pieces with their spaces, or empty if the caption consists of whole words."""

    @property
    def text(self) -> str:
        """The left-out words as text."""
        return text_of(self.words, self.pieces)

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        """The left-out words, grouped into phrases."""
        return phrases_of(self.words, self.pieces, self.truth)

    def to_dict(self, *, attention: bool = False) -> dict[str, Any]:
        """Return the left-out words as JSON values.

        Args:
            attention: Include gates and attention maps.
        """
        data: dict[str, Any] = {
            "text": self.text,
            "words": list(self.words),
            "log_probs": _rounded(self.log_probs, 4),
            **_truth_to_dict(self.truth, self.phrases),
        }
        if attention:
            data["gates"] = _rounded(self.gates, 4)
            data["alphas"] = _rounded(self.alphas, 6)
        return data

    def __repr__(self) -> str:  # arrays would fill the screen
        return f"<{type(self).__name__} {self.text!r}>"


_MAPS = "the maps are in alphas; captioner.overlay(photo, caption) draws them"
_DRAW = "use captioner.overlay(photo, caption).show()"


@hinted
@dataclass(frozen=True, eq=False, repr=False)
class Caption(Hinting):
    """A caption of one photo: T words, with attention over a grid of Gh x Gw regions."""

    words: tuple[str, ...]
    """The T words, as in the vocabulary. If the model generates pieces of words (``data.tokenizer:
    bpe``), these are the T pieces without the spaces around them."""
    log_probs: NDArray[np.float32]
    """Natural log-probability of each word, given the previous words, (T,)."""
    alphas: NDArray[np.float32]
    """Attention map of each word, (T, Gh, Gw).

    With the method ``attention_gate``, each map sums to the gate of its word. With all other
    methods, each map sums to 1. Methods other than ``attention`` and ``attention_gate`` set regions
    that count against the word to 0. If no region supports the word, the whole map is 0.
    """
    gates: NDArray[np.float32]
    """Context gate beta of each word, (T,), from 0 (photo ignored) to 1 (photo fully used). A
    decoder with the order ``luong`` has no gate, so the value is always 1. A decoder with the
    attention ``fixed_at_start`` has no context, so the value is always 0."""
    log_prob: float
    """Natural log-probability of the whole sentence, including its end token."""
    crop_box: CropBox = field(default=CropBox())
    """The part of the photo that the maps cover, as fractions of its width and height."""
    alternatives: tuple[tuple[Alternative, ...], ...] = ()
    """The most probable words at each of the T positions, best first. Empty if they were not
    requested."""
    pieces: tuple[str, ...] = ()
    """The T pieces with their spaces. Joined, they form the sentence. Empty if the vocabulary
    consists of whole words."""
    geometry: Geometry | None = None
    """Positions of the regions in the photo, or None if the regions are equal cells of the crop box
    (see ``regions``)."""
    method: str = "attention"
    """The method that computed ``alphas`` (see ``model.explanations``)."""
    confidence: float | None = None
    """Calibrated probability, 0 to 1, that the caption is right (docs/confidence.md).

    Only the best caption of a search has a confidence. It is None if the model is not calibrated
    for the search options.
    """
    keywords: tuple[Keyword, ...] | None = None
    """Words for things in the photo, best first (docs/captioning.md), or None if they were not
    requested. Only the best caption of a search has keywords."""
    truth: NDArray[np.float32] | None = None
    """Calibrated probability, 0 to 1, that each content word is true of the photo, (T,). Function
    words have NaN. None if the model cannot check words (see ``inference.truth``)."""
    left_out: LeftOut | None = None
    """The words that the search left out at the end, or None if the sentence is complete."""

    _hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("attention", "attentions", "attention_weights", "weights"), "alphas"),
        **dict.fromkeys(("attention_map", "attention_maps", "maps", "heatmap", "heatmaps"), _MAPS),
        **dict.fromkeys(("show", "plot", "draw", "display", "visualize"), _DRAW),
        **dict.fromkeys(("score", "probability", "prob"), "confidence"),
        **dict.fromkeys(("scores", "probabilities", "probs", "logprobs"), "log_probs"),
        **dict.fromkeys(("caption", "sentence", "description", "string", "title"), "text"),
        **dict.fromkeys(("tags", "labels", "objects"), "keywords"),
        **dict.fromkeys(("json", "to_json", "asdict", "dict", "model_dump"), "to_dict"),
        "tokens": "words",
        "save": 'use captioner.overlay(photo, caption).save("attention.png"), or '
        "captioner.write_caption(photo, caption, in_place=True)",
        **dict.fromkeys(
            ("write", "embed"), "use captioner.write_caption(photo, caption, in_place=True)"
        ),
    }

    @property
    def text(self) -> str:
        """The sentence without a final full stop. Clitics such as 's join the previous word."""
        return self.text_until(len(self.words))

    def text_until(self, count: int) -> str:
        """Return the beginning of the sentence, up to its first ``count`` words."""
        return text_of(self.words[:count], self.pieces[:count])

    @property
    def regions(self) -> Geometry:
        """The positions of the regions in the photo, as fractions of its height and width."""
        return self.geometry or Geometry.even(self.alphas.shape[1:], *self.crop_box)

    @property
    def doubtful(self) -> tuple[int, ...]:
        """The positions, counted from 0, of the words that are probably wrong.

        These are the words with a ``truth`` below ``DOUBTFUL_TRUTH``. If the caption has no
        ``truth``, they are the words with a probability below ``DOUBTFUL``.
        """
        if self.truth is not None:
            found = np.flatnonzero(self.truth < DOUBTFUL_TRUTH)  # NaN compares as false
        else:
            found = np.flatnonzero(np.exp(self.log_probs) < DOUBTFUL)
        return tuple(int(i) for i in found)

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        """The words grouped into phrases, or empty if the caption has no ``truth``."""
        return () if self.truth is None else phrases_of(self.words, self.pieces, self.truth)

    def whole(self) -> Caption:
        """Return a copy of the caption with the left-out words at its end, for drawing.

        ``log_prob`` and ``confidence`` still describe the caption without these words.
        """
        rest = self.left_out
        if rest is None:
            return self
        said = np.full(len(self.words), np.nan, np.float32) if self.truth is None else self.truth
        return replace(
            self,
            words=self.words + rest.words,
            pieces=self.pieces + rest.pieces,
            log_probs=np.concatenate([self.log_probs, rest.log_probs]),
            alphas=np.concatenate([self.alphas, rest.alphas]),
            gates=np.concatenate([self.gates, rest.gates]),
            truth=np.concatenate([said, rest.truth]),
            alternatives=self.alternatives and (*self.alternatives, *[()] * len(rest.words)),
            left_out=None,
        )

    def unsure(self, min_confidence: float) -> bool | None:
        """Return whether the confidence is below a minimum, or None without a confidence.

        Raises:
            ConfigError: The minimum is below 0 or above 1.
        """
        if not 0 <= min_confidence <= 1:
            raise ConfigError(f"min_confidence is {min_confidence}; use a number from 0 to 1")
        return None if self.confidence is None else self.confidence < min_confidence

    def hedged(self, min_confidence: float) -> str:
        """Return the sentence, with "perhaps" in front if the caption is unsure.

        If the confidence is below half the minimum, the sentence begins with "hard to tell,
        perhaps".

        Raises:
            ConfigError: The minimum is below 0 or above 1.
        """
        if not self.unsure(min_confidence):
            return self.text
        doubt = "hard to tell, perhaps" if self.unsure(min_confidence / 2) else "perhaps"
        return f"{doubt} {self.text}"

    def of_keywords(self) -> Caption:
        """Return the keywords that have maps as a caption, so that they can be drawn like words.

        The odds that the photo shows a keyword are the mean over the regions. Each map shows which
        part of the odds comes from each region, so it sums to 1.
        """
        kept = [(one, one.map) for one in self.keywords or () if one.map is not None]
        words = [one.word for one, _ in kept]
        odds = [np.exp(found - found.max()) for _, found in kept]
        shares = [one / one.sum() for one in odds]
        log_probs = np.log([one.probability for one, _ in kept], dtype=np.float32)
        return replace(
            self,
            words=tuple(words),
            pieces=tuple(f", {word}" if number else word for number, word in enumerate(words)),
            log_probs=log_probs,
            log_prob=float(log_probs.sum()),
            alphas=np.array(shares, np.float32).reshape(-1, *self.alphas.shape[1:]),
            gates=np.ones(len(words), np.float32),
            alternatives=(),
            method="keywords",
            confidence=None,
            keywords=None,
            truth=None,
            left_out=None,
        )

    def to_dict(
        self, *, attention: bool = False, min_confidence: float | None = None
    ) -> dict[str, Any]:
        """Return the caption as JSON values, with the same keys as ``--format json``.

        Args:
            attention: Include gates, attention maps, the crop box and the region geometry.
            min_confidence: Include ``unsure``, which is true if the confidence is below this value.

        Returns:
            The attributes ``text``, ``words``, ``log_prob``, ``log_probs``, ``confidence`` and
            ``doubtful``. If the caption has them, also ``truth`` (null for function words),
            ``phrases``, ``left_out``, ``alternatives`` and ``keywords``. With ``attention``, also
            the ``map`` of each keyword, ``gates``, ``alphas``, ``region`` (the crop box) and
            ``geometry`` (see `Geometry.to_dict`). ``method`` is included if it is not
            ``attention``.
        """
        data: dict[str, Any] = {
            "text": self.text,
            "words": list(self.words),
            "log_prob": round(self.log_prob, 4),
            "log_probs": _rounded(self.log_probs, 4),
            "confidence": None if self.confidence is None else round(self.confidence, 4),
            "doubtful": list(self.doubtful),
        }
        if min_confidence is not None:
            data["unsure"] = self.unsure(min_confidence)
        if self.truth is not None:
            data |= _truth_to_dict(self.truth, self.phrases)
        if self.left_out is not None:
            data["left_out"] = self.left_out.to_dict(attention=attention)
        if self.alternatives:
            data["alternatives"] = [
                [{"word": other.word, "log_prob": round(other.log_prob, 4)} for other in words]
                for words in self.alternatives
            ]
        if self.keywords is not None:
            data["keywords"] = [
                {"word": one.word, "probability": round(one.probability, 4)}
                | ({"map": _rounded(one.map, 3)} if attention and one.map is not None else {})
                for one in self.keywords
            ]
        if attention:
            data["gates"] = _rounded(self.gates, 4)
            data["alphas"] = _rounded(self.alphas, 6)
            data["region"] = [round(side, 6) for side in self.crop_box]
            data["geometry"] = self.regions.to_dict()
            if self.method != "attention":
                data["method"] = self.method
        return data

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:  # arrays would fill the screen
        sure = "" if self.confidence is None else f", confidence {self.confidence:.2f}"
        return f"<{type(self).__name__} {self.text!r}, log_prob {self.log_prob:.2f}{sure}>"


def _rounded(values: NDArray[np.float32], decimals: int) -> list[Any]:
    """Return an array as nested lists of rounded numbers."""
    rounded: list[Any] = np.round(np.asarray(values, dtype=np.float64), decimals).tolist()
    return rounded


def _truth_to_dict(truth: NDArray[np.float32], phrases: tuple[Phrase, ...]) -> dict[str, Any]:
    """Return the probabilities that words and phrases are true, as JSON values.

    Words and phrases without a probability (NaN), such as "the", get null.
    """

    def known(value: float) -> float | None:
        return None if math.isnan(value) else round(float(value), 4)

    return {
        "truth": [known(value) for value in truth],
        "phrases": [{"text": one.text, "truth": known(one.truth)} for one in phrases],
    }


def phrases_of(
    words: tuple[str, ...], pieces: tuple[str, ...], truth: NDArray[np.float32]
) -> tuple[Phrase, ...]:
    """Group the words of a caption into phrases, with the probability that each phrase is true.

    Args:
        words: The T words.
        pieces: The T pieces with their spaces, or empty if the vocabulary has whole words.
        truth: Probability that each word is true of the photo, (T,). Function words have NaN.
    """
    return tuple(
        Phrase(text_of(words[span], pieces[span]), joint_truth(truth[span]))
        for span in phrase_spans(words)
    )


def phrase_spans(words: Sequence[str]) -> list[slice]:
    """Divide a caption into phrases, and return each phrase as a slice of the words.

    A phrase begins at a function word that follows a content word: "a black and white cat", "is
    sitting", "in a kitchen". Clitics and conjunctions between two content words do not begin a
    phrase.
    """
    content = content_words(words)
    starts = [
        at
        for at in range(1, len(words))
        if content[at - 1]
        and not content[at]
        and words[at] not in CLITICS
        and not (words[at] in CONJUNCTIONS and content[at + 1 : at + 2] == [True])
    ]
    ends = [*starts, len(words)]
    return [slice(start, end) for start, end in zip([0, *starts], ends, strict=True) if end]


def joint_truth(truth: NDArray[np.floating[Any]]) -> float:
    """Return the probability that all content words are true, as a product over the words.

    Args:
        truth: Probability that each word is true, (T,). Function words have NaN.

    Returns:
        The product, or NaN if there are no content words.
    """
    known = truth[~np.isnan(truth)]
    return float(known.prod()) if len(known) else float("nan")


def as_written(caption: Caption, text: str) -> Caption:
    """Return a caption that shows a person's text, with its capitals and punctuation.

    The text is complete, so the caption has no left-out words.

    Args:
        caption: The caption with the words of the text.
        text: The text. If it does not contain the caption's words in order, such as an empty text,
            the caption is returned unchanged.
    """
    text = unicodedata.normalize("NFC", text)  # as the tokenizer does
    lower, starts, at = text.lower().replace("\u2019", "'"), list[int](), 0
    for word in caption.words:
        at = lower.find(word, at)
        if at < 0 or len(lower) != len(text):  # some letters become two letters in lower case
            return caption
        starts.append(at)
        at += len(word)
    ends = [*starts[1:], len(text)]
    pieces = (text[start:end] for start, end in zip([0, *starts[1:]], ends, strict=True))
    return replace(caption, pieces=tuple(pieces), left_out=None) if starts else caption


def text_of(words: tuple[str, ...], pieces: tuple[str, ...]) -> str:
    """Return a sentence, made from its pieces if it has any, and otherwise from its words."""
    return "".join(pieces).strip() if pieces else join_words(words)


def join_words(words: tuple[str, ...] | list[str]) -> str:
    """Join tokens into a sentence, attaching Penn Treebank clitics to the previous word.

    Args:
        words: Tokens, e.g. ``["a", "man", "'s", "hat"]``.

    Returns:
        The sentence, e.g. ``"a man's hat"``.
    """
    text = ""
    for word in words:
        sign = BRACKETS.get(word, word)
        joined = not text or word in CLITICS or sign in ")]}" or text[-1] in "([{"
        text += sign if joined else f" {sign}"
    return text
