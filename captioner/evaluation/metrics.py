"""Caption metrics: pycocoevalcap's scorers over Penn Treebank tokens.

The tokens come from ``captioner.tokenizer``, which gives what pycocoevalcap's own tokenizer gives
without its Java. Names and scale are pycocoevalcap's: CIDEr 1.0 is what papers print as 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from captioner.errors import DataError
from captioner.tokenizer import tokenize

SIGNATURE = (
    "PTB tokens (captioner.tokenizer) | pycocoevalcap Bleu, Rouge, Cider | one caption an image"
)
"""What makes numbers comparable: two reports with the same signature were measured alike."""


class Scores(NamedTuple):
    """Scores of a set of captions."""

    corpus: dict[str, float]
    """Bleu_1 .. Bleu_4, ROUGE_L, CIDEr over all images."""
    images: dict[int, dict[str, float]]
    """The same of each image; a single image's CIDEr takes its document frequencies from all."""


def score(candidates: Mapping[int, str], references: Mapping[int, Sequence[str]]) -> Scores:
    """Score one caption an image.

    Args:
        candidates: Caption by image id, as a person writes it.
        references: All true captions by image id; must hold every candidate's image.

    Raises:
        DataError: Nothing to score, or an image has no references.
    """
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    if not candidates:
        raise DataError("there are no captions to score; give at least one image")
    lacking = [image_id for image_id in candidates if not references.get(image_id)]
    if lacking:
        raise DataError(
            f"{len(lacking)} of {len(candidates)} images have no reference captions "
            f"(first: id {lacking[0]}); give annotations that cover every image"
        )
    ids = sorted(candidates)
    result = {i: [" ".join(tokenize(candidates[i]))] for i in ids}
    truth = {i: [" ".join(tokenize(text)) for text in references[i]] for i in ids}
    corpus: dict[str, float] = {}
    images: dict[int, dict[str, float]] = {i: {} for i in ids}
    bleu, bleu_images = Bleu(4).compute_score(truth, result, verbose=0)
    parts = {f"Bleu_{n + 1}": (bleu[n], bleu_images[n]) for n in range(4)}
    parts["ROUGE_L"] = Rouge().compute_score(truth, result)
    parts["CIDEr"] = Cider().compute_score(truth, result)
    for name, (whole, each) in parts.items():
        corpus[name] = float(whole)
        for image_id, value in zip(ids, each, strict=True):
            images[image_id][name] = float(value)
    return Scores(corpus, images)
