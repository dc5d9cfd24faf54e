"""What self-critical training is rewarded with: CIDEr-D of sampled captions, BLEU-4 mixed in.

    reward = cider * CIDEr-D (0 to 10) + bleu * BLEU-4 (0 to 1)

The end of a sentence is a word here, unless told otherwise: the last of every reference, of the
document frequencies, and of every sample that has ended. Both metrics count phrases, so that
without it "a man on a" loses nothing by its last words; trained so, models break sentences off.

Source: Rennie et al. 2017 (arXiv:1612.00563); appendix E: without the end, fragments such as "with
a" dominate what training gains.
Deviation: they reward one metric at a time. BLEU-4 may be mixed in; it counts the end as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from captioner.errors import ConfigError
from captioner.evaluation.metrics import bleu_from_counts
from captioner.evaluation.references import END_WORD, SIGMA, Matches, References, Sentences
from captioner.frequencies import ORDERS, DocumentFrequencies
from captioner.vocabulary import SPECIAL_NAMES, Vocabulary


class CaptionReward:
    """Rewards sampled captions by the true captions of their photos.

    References are not squeezed into the vocabulary: two words that the model cannot say stay two.
    Nothing is written after the references are prepared: several threads may ask at once.
    """

    def __init__(
        self,
        references: Mapping[int, Sequence[Sequence[str]]],
        vocabulary: Vocabulary,
        *,
        cider: float = 1.0,
        bleu: float = 0.0,
        count_end: bool = True,
        frequencies: DocumentFrequencies | None = None,
    ) -> None:
        """Prepare the references.

        Args:
            references: Tokens of all true captions, by image id.
            vocabulary: The model's, whose numbers the samples are.
            cider: Weight of CIDEr-D.
            bleu: Weight of BLEU-4.
            count_end: The end of a sentence is a word.
            frequencies: Frozen frequencies; None counts those of ``references``.

        Raises:
            ConfigError: A weight is no number from 0 on, both are 0, or frozen frequencies, which
                know no end, are to go with one.
            DataError: An image has no references, or there is nothing to count.
        """
        if not (0 <= cider < math.inf and 0 <= bleu < math.inf and cider + bleu > 0):
            raise ConfigError(
                f"cider is {cider} and bleu is {bleu}; give weights from 0 on, one of them above 0"
            )
        if count_end and frequencies is not None:
            raise ConfigError(
                "frozen document frequencies know no end of a sentence; leave them out, which "
                "counts those of the references, or set count_end to false"
            )
        self._cider, self._bleu, self._frozen = float(cider), float(bleu), frequencies
        self._references = References(references, frequencies, end=count_end)
        unknown: dict[str, int] = {}
        words = [tuple(self._references.encode([word], unknown)) for word in vocabulary.words]
        beyond = len(self._references.numbers) + len(unknown)  # what no reference can hold
        self._words = [(beyond + number,) for number in range(len(SPECIAL_NAMES))] + words
        self._end = (self._references.numbers[END_WORD],) if count_end else ()

    def __call__(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
    ) -> NDArray[np.float64]:
        """Reward K samples of each of B photos, each by itself.

        Args:
            image_ids: The photos, (B,).
            samples: Numbers of the words of each sample, without start, end and padding, (B, K).
                A special token is a word that no reference holds.
            ended: Whether the sample came to its end; false where the greatest length cut it,
                (B, K).

        Returns:
            The rewards, (B, K).

        Raises:
            ConfigError: The shapes differ, or the vocabulary lacks a number.
            DataError: An image is not among the references.
        """
        width = self._check(image_ids, samples, ended)
        images = np.repeat(self._references.index(image_ids), width)
        captions = Sentences(
            [
                [*chain.from_iterable(self._words[n] for n in sample), *(self._end if done else ())]
                for sample, done in zip(
                    chain.from_iterable(samples), chain.from_iterable(ended), strict=True
                )
            ]
        )
        matches = self._references.match(images, captions)
        rewards = np.zeros(len(images))
        if self._cider:
            rewards += self._cider * self._references.cider_d(images, captions, matches)
        if self._bleu:
            rewards += self._bleu * _bleu_4(self._references, images, captions, matches)
        return rewards.reshape(len(image_ids), width)

    def signature(self) -> str:
        """What must agree for two rewards to be compared; counts for seconds on a large data set.

        Such as ``cider-d:1|bleu-4:0|end:yes|df:train,6000 photos,<12 signs>|sigma:6``; frozen
        frequencies name themselves so in the place of ``train``.
        """
        source = "train" if self._frozen is None else "frozen"
        used = self._frozen or self._references.frequencies()
        return "|".join(
            [
                f"cider-d:{_plain(self._cider)}",
                f"bleu-4:{_plain(self._bleu)}",
                f"end:{'yes' if self._end else 'no'}",
                f"df:{source},{used.documents} photos,{used.digest()}",
                f"sigma:{_plain(SIGMA)}",
            ]
        )

    def _check(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
    ) -> int:
        """Give the samples a photo, after a look at what was handed in."""
        widths = [len(row) for row in samples]
        if len(widths) != len(image_ids) or len(set(widths)) > 1:
            raise ConfigError(
                f"{len(image_ids)} photos have {widths} samples; give every photo the same number"
            )
        if [len(row) for row in ended] != widths:
            raise ConfigError(
                f"ended has {[len(row) for row in ended]} entries a photo and samples {widths}; "
                "give one a sample"
            )
        said = set(chain.from_iterable(chain.from_iterable(samples)))
        strange = [number for number in said if not 0 <= number < len(self._words)]
        if strange:
            raise ConfigError(
                f"a sample holds the number {strange[0]}; the vocabulary has 0 to "
                f"{len(self._words) - 1}"
            )
        return widths[0] if widths else 0


def _bleu_4(
    references: References,
    images: NDArray[np.int64],
    captions: Sentences,
    matches: Sequence[Matches],
) -> NDArray[np.float64]:
    """BLEU-4 of each caption by itself, 0 to 1: (C,).

    Source: Papineni et al. 2002, as pycocoevalcap's ``Bleu(4)`` gives it for each sentence: the
    reference of the closest length, the shorter one of two.
    """
    size, lengths = len(images), captions.lengths
    right, made = [], []
    for order, found in enumerate(matches, 1):
        best = np.zeros(len(found.gram), dtype=np.int64)
        np.maximum.at(best, found.place, np.minimum(found.often[found.place], found.most))
        right.append(np.bincount(found.caption, best, size))
        made.append(np.maximum(lengths - order + 1, 0))
    closest = _closest(references, images, lengths)
    counts = np.stack([*right, *made, lengths, closest], axis=1).astype(np.float64)
    return bleu_from_counts(counts)[:, ORDERS - 1]


def _closest(
    references: References, images: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Words of the reference whose length is closest to the caption's: (C,)."""
    sizes = references.sizes[images]
    after = np.cumsum(sizes)
    caption = np.repeat(np.arange(len(images)), sizes)
    number = np.arange(len(caption)) + np.repeat(references.first[images] + sizes - after, sizes)
    words = references.lengths[number]
    order = np.lexsort((words, np.abs(words - lengths[caption]), caption))
    closest: NDArray[np.int64] = words[order[after - sizes]]
    return closest


def _plain(number: float) -> str:
    return repr(number).removesuffix(".0")
