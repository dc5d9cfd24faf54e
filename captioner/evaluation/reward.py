"""The reward for a sampled caption in self-critical training.

It is a weighted sum of CIDEr-D, BLEU-4 and a term R that rewards rare words:

    reward = cider * CIDEr-D (0 to 10) + bleu * BLEU-4 (0 to 1) + rare_words * R
    R      = sum over the caption's distinct words w of s(w) ln(N / df(w)) / ln N

s(w) is 1 if a reference of the photo contains the word w, otherwise -1. df(w) is the number of
photos, out of N, with w in their references. R rewards the words that a caption shares with its
references, in any order, and penalizes all other words. Rare words count most.

By default, the end of a sentence counts as a word. This end word is appended to every reference
before document frequencies are counted, and to every complete sample. Without the end word, all
phrases in "a man on a" could occur in references, so nothing would penalize its missing end. Models
would learn to break sentences off.

Source: Rennie et al. 2017 (arXiv:1612.00563). Their appendix E describes the end word.
Deviation: Rennie et al. optimize one metric at a time. Here, BLEU-4 and R may be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from captioner.evaluation.references import (
    SIGMA,
    DocumentFrequencies,
    Ngrams,
    bleu_counts,
    bleu_from_counts,
    cider_d,
    count_documents,
    ngrams,
    split,
    words_of,
)
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import SPECIAL_NAMES, Vocabulary

END_WORD = ""
"""The word that marks the end of a sentence. It is empty, so it differs from all real words."""


class CaptionReward:
    """A function that rewards sampled captions for resembling the photo's reference captions.

    References keep words that are not in the vocabulary. Document frequencies are counted for each
    style separately, because a phrase that is rare in one data set may be common in another. The
    object never changes after construction, so several threads may share it.

    Args:
        references: Tokens of all reference captions, by style, then by image id.
        vocabulary: The model's vocabulary, to convert the samples' token ids to words.
        cider: Weight of CIDEr-D.
        bleu: Weight of BLEU-4.
        rare_words: Weight of R.
        count_end: Count the end of a sentence as a word.

    Raises:
        DataError: An image has no references, or a style has no images.
    """

    def __init__(
        self,
        references: Mapping[str, Mapping[int, Sequence[Sequence[str]]]],
        vocabulary: Vocabulary,
        *,
        cider: float = 1.0,
        bleu: float = 0.0,
        rare_words: float = 0.0,
        count_end: bool = True,
    ) -> None:
        self._weights = float(cider), float(bleu), float(rare_words)
        self._end = (END_WORD,) if count_end else ()
        self._vocabulary = vocabulary
        # With a leading space, the name of a special token never equals a word.
        self._words = [[f" {name}"] for name in SPECIAL_NAMES]
        self._words += [split([word]) for word in vocabulary.words]
        self._frequencies: list[DocumentFrequencies] = []
        self._truth: dict[int, tuple[Sequence[Sequence[str]], DocumentFrequencies]] = {}
        for of_style in references.values():
            known = {
                image_id: [[*words, *self._end] for words in texts]
                for image_id, texts in words_of(of_style).items()
            }
            frequencies = count_documents(known.values())
            self._frequencies.append(frequencies)
            self._truth |= {image_id: (texts, frequencies) for image_id, texts in known.items()}

    def __call__(
        self,
        image_ids: Sequence[int],
        samples: Sequence[Sequence[Sequence[int]]],
        ended: Sequence[Sequence[bool]],
    ) -> NDArray[np.float64]:
        """Compute the rewards of K samples for each of B photos.

        Args:
            image_ids: Image ids of the photos, (B,).
            samples: Token ids of each sample, without start, end and padding tokens, (B, K).
                Special tokens count as words that do not occur in references.
            ended: False for samples that were truncated at the maximum length, (B, K).

        Returns:
            The rewards, (B, K).
        """
        cider, bleu, rare_words = self._weights
        rewards = np.zeros((len(image_ids), len(samples[0]) if samples else 0))
        for photo, (image_id, own, done) in enumerate(zip(image_ids, samples, ended, strict=True)):
            texts, frequencies = self._truth[image_id]
            references = [*map(ngrams, texts)]
            captions = [
                ngrams([*self._said(sample), *(self._end if end else ())])
                for sample, end in zip(own, done, strict=True)
            ]
            if cider:
                rewards[photo] += np.multiply(cider, cider_d(captions, references, frequencies))
            if bleu:
                rewards[photo] += bleu * bleu_from_counts(bleu_counts(captions, references))[:, -1]
            if rare_words:
                found = [_rare_words(one, references, frequencies) for one in captions]
                rewards[photo] += np.multiply(rare_words, found)
        return rewards

    def _said(self, sample: Sequence[int]) -> Iterable[str]:
        """Return the words of a sample. Sub-word pieces are joined, and the text is split."""
        if pieces := self._vocabulary.pieces(sample):
            return split(caption_tokens("".join(pieces)))
        return chain.from_iterable(self._words[token] for token in sample)

    def signature(self) -> str:
        """Describe in one line of text how the rewards are computed.

        Rewards with equal signatures are comparable. On a large data set, the call takes several
        seconds, because the line contains a digest of all document frequencies.
        """
        cider, bleu, rare_words = self._weights
        weights = f"cider-d:{cider!r}|bleu-4:{bleu!r}|".replace(".0|", "|")
        weights += f"rare_words:{rare_words:g}|" if rare_words else ""
        return "|".join(
            f"{weights}end:{'yes' if self._end else 'no'}"
            f"|df:train,{frequencies.documents} photos,{frequencies.digest()}|sigma:{SIGMA:g}"
            for frequencies in self._frequencies
        )


def _rare_words(
    caption: Ngrams, references: Sequence[Ngrams], frequencies: DocumentFrequencies
) -> float:
    """Compute the reward's term for rare words, R, for one caption.

    R adds up the rarity of the words that a reference also contains, and subtracts the rarity of
    all other words. A word's rarity is ln(N / df) / ln N, if df of N photos have it in references.
    """
    said = set().union(*(one[0] for one in references))
    weights = frequencies.weighted(dict.fromkeys(caption[0], 1))
    total = math.fsum(weight if word in said else -weight for word, weight in weights.items())
    return total / (math.log(frequencies.documents) or 1)
