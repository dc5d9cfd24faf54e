"""Reward for self-critical training: CIDEr-D of sampled captions, optionally mixed with BLEU-4.

    reward = cider * CIDEr-D (0 to 10) + bleu * BLEU-4 (0 to 1)

By default the end of a sentence counts as a word: it is appended to every reference, to the
document frequencies and to every sample that is complete. Both metrics count phrases; without an
end word "a man on a" loses nothing by its last words, and models learn to break sentences off.

Source: Rennie et al. 2017 (arXiv:1612.00563); appendix E describes the end word.
Deviation: they optimize one metric at a time; BLEU-4, which also counts the end word, may be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.evaluation.metrics import bleu_from_counts
from captioner.evaluation.references import END_WORD, SIGMA, References, Sentences
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import SPECIAL_NAMES, Vocabulary


class CaptionReward:
    """Rewards sampled captions against the reference captions of their photos.

    References keep words that the vocabulary lacks. The object is read-only after construction, so
    threads may share it.

    Args:
        references: Tokens of all reference captions by image id.
        vocabulary: The model's vocabulary, which the samples index.
        cider: Weight of CIDEr-D.
        bleu: Weight of BLEU-4.
        count_end: Count the end of a sentence as a word.

    Raises:
        DataError: An image has no references, or there is nothing to count.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        vocabulary: Vocabulary,
        *,
        cider: float = 1.0,
        bleu: float = 0.0,
        count_end: bool = True,
    ) -> None:
        self._cider, self._bleu = float(cider), float(bleu)
        self._references = References(references, end=count_end)
        unknown: dict[str, int] = {}
        self._vocabulary = vocabulary
        words = [tuple(self._references.encode([word], unknown)) for word in vocabulary.words]
        first_free = len(self._references.numbers) + len(unknown)  # matches no reference
        self._words = [(first_free + number,) for number in range(len(SPECIAL_NAMES))] + words
        self._end = (self._references.numbers[END_WORD],) if count_end else ()

    def __call__(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
    ) -> NDArray[np.float64]:
        """Reward K samples of each of B photos, each sample by itself.

        Args:
            image_ids: The photos, (B,).
            samples: Token ids of each sample without start, end and padding, (B, K). A special
                token is a word that matches no reference.
            ended: False where the sample was truncated at the maximum length, (B, K).

        Returns:
            The rewards, (B, K).
        """
        width = len(samples[0]) if samples else 0
        images = np.repeat(self._references.index(image_ids), width)
        unknown: dict[str, int] = {}
        flat = zip(chain.from_iterable(samples), chain.from_iterable(ended), strict=True)
        captions = Sentences(
            [*self._number(sample, unknown), *(self._end if done else ())] for sample, done in flat
        )
        matches = self._references.match(images, captions)
        rewards = np.zeros(len(images))
        if self._cider:
            rewards += self._cider * self._references.cider_d(images, captions, matches)
        if self._bleu:
            counts = self._references.bleu_counts(images, captions, matches)
            rewards += self._bleu * bleu_from_counts(counts)[:, -1]
        return rewards.reshape(len(image_ids), width)

    def _number(self, sample: Sequence[int], unknown: dict[str, int]) -> Iterable[int]:
        """Word numbers of a sample; pieces are joined to text, whose words are counted."""
        pieces = self._vocabulary.pieces(sample)
        if not pieces:
            return chain.from_iterable(self._words[n] for n in sample)
        return self._references.encode(caption_tokens("".join(pieces)), unknown)

    def signature(self) -> str:
        """Settings that must agree for two rewards to be comparable.

        Takes seconds on a large data set.
        """
        frequencies = self._references.frequencies()
        weights = f"cider-d:{self._cider!r}|bleu-4:{self._bleu!r}|".replace(".0|", "|")
        return (
            f"{weights}end:{'yes' if self._end else 'no'}"
            f"|df:train,{frequencies.documents} photos,{frequencies.digest()}|sigma:{SIGMA:g}"
        )


class StyleRewards:
    """A reward for each style, with the document frequencies of its own captions.

    A phrase that is rare in one data set may be common in another, and captions are evaluated on
    each with its own frequencies.

    Args:
        references: Tokens of all reference captions by style and image id.
        options: Of each ``CaptionReward``.
    """

    def __init__(
        self, references: Mapping[str, Mapping[int, Sequence[Sequence[str]]]], **options: Any
    ) -> None:
        self._rewards = [CaptionReward(one, **options) for one in references.values()]
        self._styles = {i: style for style, one in enumerate(references.values()) for i in one}

    def __call__(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
    ) -> NDArray[np.float64]:
        """See ``CaptionReward``."""
        rewards = np.empty((len(image_ids), len(samples[0]) if samples else 0))
        styles = np.array([self._styles[image_id] for image_id in image_ids], dtype=int)
        for style in np.unique(styles):
            rows = np.flatnonzero(styles == style).tolist()
            rewards[rows] = self._rewards[style](
                [image_ids[row] for row in rows],
                [samples[row] for row in rows],
                [ended[row] for row in rows],
            )
        return rewards

    def signature(self) -> str:
        """Settings that must agree for two rewards to be comparable."""
        return "|".join(reward.signature() for reward in self._rewards)
