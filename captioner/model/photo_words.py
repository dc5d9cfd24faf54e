"""An auxiliary loss: the words of a photo from its mean feature.

Notation: B photos, C content words.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from captioner.hardware import upload
from captioner.model.attention import Memory, widen
from captioner.model.decoder import Decoder


@dataclass(frozen=True)  # not a tuple, for the reason given at ``objectives.Task``
class PhotoWords:
    """The words that photos are about, without the others of the vocabulary; on the CPU."""

    tokens: Tensor
    """Token ids of all content words, (C,)."""
    present: Tensor
    """(B, C), 1 at the words of each photo."""


def photo_words_loss(decoder: Decoder, memory: Memory, words: PhotoWords) -> Tensor:
    """Predict the words of a photo from its mean feature alone, with the decoder's own readout.

        - sum over photos, sum over the photo's words w of log softmax(readout_photo)_w

    A scalar, nats; the softmax is over content words. It asks the encoder for what the captions
    name, wherever it is in the photo, and adds no weights.

    Source: the word detectors of Fang et al. 2015 (arXiv:1411.4952), section 3, and the attributes
    of Wu et al. 2016 (arXiv:1506.01144). Deviation: one softmax over the mean feature instead of a
    detector per region and word. Not for attention ``fixed_at_start``.
    """
    logits = widen(decoder.readout_photo(memory))
    tokens, present = (upload(part, logits.device) for part in (words.tokens, words.present))
    return -(logits.index_select(1, tokens).log_softmax(dim=1) * present).sum()
