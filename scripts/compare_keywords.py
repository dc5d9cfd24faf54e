"""Compare keywords from the model's reading, from sampled captions, and from one caption.

    python scripts/compare_keywords.py --annotations COCO/captions_val.json --images COCO/val \
        --annotations data/flickr8k/captions_val.json --images FLICKR8K/images \
        --instances COCO128/annotations/instances.json --instance-photos COCO128/images \
        --labels COCO/captions_train.json --label-photos COCO/train

The reading is the part of the model that predicts which words people use about a photo. A keyword
is right if a reference caption of the photo contains it. The score of a keyword from samples is the
share of 64 sampled captions that contain it. A scale and a shift, shared by all words, turn the
log-odds of these scores into calibrated probabilities. They are fitted on one half of the photos
and applied to the other half.

--instances adds a comparison with annotated objects. Keywords that name a category of COCO are
compared with the annotated categories, and their maps are compared with the masks. --labels adds a
comparison on 2,000 photos with one caption each. It uses the entry ``"labels"`` of each image, a
list of category numbers from 1 to 19, as in COCO.

Notation: N photos, K keywords or groups of words.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fit_reading import WORDS, mentions, read_words
from numpy.typing import NDArray

import captioner
from captioner.caption_types import Caption
from captioner.data.coco import read_dataset
from captioner.evaluation import calibrate
from captioner.evaluation.fit_confidence import Judged, calibration_error, logistic_regression
from captioner.evaluation.grounding import measure as measure_maps
from captioner.evaluation.grounding import read_instances
from captioner.evaluation.objects import find_names
from captioner.inference.captioner import Captioner
from captioner.inference.reading import MIN_PROBABILITY

SAMPLES = 64
"""Number of captions that are sampled for each photo."""
LABELLED = 2000
"""Number of photos with labels on which keywords are compared."""
CATEGORIES = {
    1: "person", 2: "bicycle", 3: "car", 4: "motorcycle", 5: "airplane", 6: "bus", 7: "train",
    8: "truck", 9: "boat", 10: "traffic light", 11: "fire hydrant", 13: "stop sign",
    14: "parking meter", 15: "bench", 16: "bird", 17: "cat", 18: "dog", 19: "horse",
}  # fmt: skip
"""Names of COCO's first 18 categories by number. COCO does not use the number 12."""

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]


def main() -> None:
    """Compare the sources of keywords on each set of photos, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--annotations",
        action="append",
        default=[],
        help="compare keywords with the reference captions in this COCO captions file; repeat the "
        "option for several files",
    )
    parser.add_argument(
        "--images",
        action="append",
        default=[],
        help="folder with the photos of --annotations; repeat it in the same order",
    )
    parser.add_argument(
        "--instances", help="compare keywords with the objects in this COCO instances file"
    )
    parser.add_argument("--instance-photos", help="folder with the photos of --instances")
    parser.add_argument(
        "--labels", help="compare keywords with the labels of images in this COCO captions file"
    )
    parser.add_argument("--label-photos", type=Path, help="folder with the photos of --labels")
    options = parser.parse_args()
    model = captioner.load()
    for references, images in zip(options.annotations, options.images, strict=True):
        print(f"\n{references}")
        compare(model, references, images)
    if options.instances:
        compare_with_masks(model, options.instances, options.instance_photos)
    if options.labels:
        compare_with_labels(model, options.labels, options.label_photos)


def of_groups(mentioned: Sequence[Set[str]], groups: Sequence[Set[str]]) -> Labels:
    """Return whether each photo mentions at least one word of each group, (N, K)."""
    return np.array([[not group.isdisjoint(there) for group in groups] for there in mentioned])


def platt(odds: Floats, labels: Labels) -> tuple[float, float]:
    """Return the scale and shift that calibrate log-odds.

    They are shared by all words, as in Platt scaling.

    Args:
        odds: Log-odds of each keyword for each photo, (N, K).
        labels: True where the keyword is right for the photo, (N, K).
    """
    inputs = np.stack([odds.ravel(), np.ones(odds.size)], axis=1)
    scale, shift = logistic_regression(inputs, labels.ravel().astype(float), np.full(2, 1e-6))
    return float(scale), float(shift)


def cross_calibrated(odds: Floats, labels: Labels) -> Floats:
    """Return calibrated probabilities, (N, K). Each half of the photos is calibrated on the other.

    For the arguments, see `platt`.
    """
    half = np.random.default_rng(0).permutation(len(odds)) % 2
    probabilities = np.zeros(odds.shape)
    for part in (0, 1):
        scale, shift = platt(odds[half != part], labels[half != part])
        probabilities[half == part] = np.exp(-np.logaddexp(0, -scale * odds[half == part] - shift))
    return probabilities


def measure(probabilities: Floats, labels: Labels) -> dict[str, float]:
    """Measure the quality of keywords.

    Args:
        probabilities: Probability of each word for each photo, (N, K).
        labels: True where the word is right for the photo, (N, K).

    Returns:
        A dictionary with these entries:

        - ``photos`` and ``words``: the numbers of photos and words.
        - ``mean_average_precision``: the mean over the words that are right for 10 photos or more.
        - ``keywords``: the number of words per photo with a probability of ``MIN_PROBABILITY`` or
          more.
        - ``precision``, ``recall`` and ``calibration_error``: measured on these keywords.
        - ``precision_at_8`` and ``recall_at_8``: measured on the eight most probable words.
    """
    common = np.flatnonzero(labels.sum(axis=0) >= 10)
    kept = probabilities >= MIN_PROBABILITY
    best = np.zeros_like(kept)
    np.put_along_axis(best, np.argsort(-probabilities, axis=1)[:, :8], True, axis=1)
    judged = Judged(probabilities[kept], labels[kept].astype(float), 0.5)
    return {
        "photos": len(labels),
        "words": labels.shape[1],
        "mean_average_precision": float(
            np.mean([average_precision(probabilities[:, k], labels[:, k]) for k in common])
        ),
        "keywords": float(kept.sum(axis=1).mean()),
        "precision": float(labels[kept].mean()),
        "recall": float(kept[labels].mean()),
        "calibration_error": calibration_error(judged),
        "precision_at_8": float(labels[best].mean()),
        "recall_at_8": float(best[labels].mean()),
    }


def average_precision(scores: Floats, labels: Labels) -> float:
    """Return the average precision of one word.

    The photos are ranked by score. The precision at a rank is the share of right photos up to this
    rank. The average precision is its mean over the ranks of the right photos.

    Args:
        scores: Score of the word for each photo, (N,).
        labels: True where the word is right for the photo, (N,).
    """
    ranked = labels[np.argsort(-scores, kind="stable")]
    hits = ranked.cumsum() / np.arange(1, len(ranked) + 1)
    return float(hits[ranked].mean())


def compare(model: Captioner, annotations: str, images: str) -> None:
    """Print the figures for each source of keywords, on photos with reference captions."""
    words = model.stored.reading
    assert words is not None
    table, rows = read_words(WORDS), {word: row for row, word in enumerate(words.keywords)}
    read, sampled, single, true = [], [], [], []
    seconds = dict.fromkeys(("reading", "samples", "caption"), 0.0)

    def timed(name: str, run: Callable[[], Any]) -> Any:
        """Return the result of a function, and add the time that it took to ``seconds``."""
        start = time.perf_counter()
        result = run()
        seconds[name] += time.perf_counter() - start
        return result

    photos = read_dataset([annotations], [images])
    plain, varied = model.options(), model.options(temperature=1.0, num_captions=SAMPLES)
    on_error = partial(print, file=sys.stderr)
    for batch, prepared in calibrate.photo_batches(model, photos, on_error):
        grids = model.ensemble.encode(prepared)
        memories = model.ensemble.memories(grids)
        seeds = range(len(batch))

        def found(options: Any) -> list[list[set[str]]]:
            """Caption the batch, and return the keywords of each caption of each photo."""
            vocabulary = model.stored.vocabulary
            hypotheses = model.ensemble.search(memories, options, vocabulary, seeds)  # noqa: B023
            shown = vocabulary.shown
            return [[mentions([" ".join(shown(h.tokens))], table) for h in of] for of in hypotheses]

        reading = model.ensemble.read(grids)
        assert reading is not None
        read += timed(
            "reading",
            lambda: [words.read_keywords(*one, len(rows)) for one in zip(*reading, strict=True)],  # noqa: B023
        )
        sampled += timed("samples", lambda: found(varied))
        single += [best for (best, *_) in timed("caption", lambda: found(plain))]
        true += [mentions(photo.captions, table) for photo in batch]
    columns = [{word} for word in rows]
    labels = of_groups(true, columns)
    counts = np.array([of_groups(one, columns).sum(axis=0) for one in sampled])
    share = (counts + 0.05) / (SAMPLES + 0.1)
    alone = of_groups(single, columns)
    probabilities = np.zeros(labels.shape)
    for row, found_words in enumerate(read):
        for one in found_words:
            probabilities[row, rows[one.word]] = one.probability
    results = {
        "reading": probabilities,
        "samples": cross_calibrated(np.log(share / (1 - share)), labels),
        "caption": alone.astype(float),
    }
    for name, found_by in results.items():
        figures = {key: round(value, 3) for key, value in measure(found_by, labels).items()}
        figures["milliseconds"] = round(1000 * seconds[name] / len(true), 3)
        print(name, figures)
    ranked = labels.ravel()[np.argsort(-results["reading"].ravel())]
    hits = ranked.cumsum()
    as_precise = np.flatnonzero(hits / np.arange(1, len(hits) + 1) >= labels[alone].mean()).max()
    print(
        f"recall of the reading at the precision of the caption: {hits[as_precise] / hits[-1]:.3f}"
    )


def compare_with_masks(model: Captioner, instances: str, folder: str) -> None:
    """Print how well captions and keywords agree with annotated objects.

    Named categories are compared with annotated categories, and attention maps with object masks.
    """
    known = read_instances(Path(instances))
    ids = {Path(one["file_name"]).name: image_id for image_id, one in known.images.items()}
    photos = [path for path in sorted(Path(folder).iterdir()) if path.name in ids]
    captions = {
        ids[path.name]: one
        for path, one in zip(photos, model.caption(photos, keywords=8), strict=True)
    }
    annotated = {
        image_id: {c for c in known.categories if known.labels(image_id, c) is not None}
        for image_id in captions
    }
    for name, group in compare_categories(captions, annotated).items():
        maps = measure_maps(group, known)
        for key in ("correctness", "uniform", "centre", "pointing", "pointing_centre", "ratio"):
            print(f"  {name}: {key} {maps[key]:.3f}", maps["intervals"][key])


def compare_with_labels(model: Captioner, labels: str, folder: Path) -> None:
    """Print precision and recall for COCO's categories 1 to 19, on photos with labels.

    Args:
        model: The model.
        labels: COCO captions file in which images have the entry ``labels``.
        folder: Folder with the photos.
    """
    content = json.loads(Path(labels).read_text(encoding="utf-8"))
    counts = Counter(one["image_id"] for one in content["annotations"])
    images = [one for one in content["images"] if one.get("labels") and counts[one["id"]] == 1]
    images = random.Random(0).sample(images, min(LABELLED, len(images)))
    found = model.caption([folder / one["file_name"] for one in images], keywords=8)
    captions = {one["id"]: caption for one, caption in zip(images, found, strict=True)}
    annotated = {one["id"]: {CATEGORIES[label] for label in one["labels"]} for one in images}
    compare_categories(captions, annotated, set(CATEGORIES.values()))


def compare_categories(
    captions: Mapping[int, Caption],
    annotated: Mapping[int, Set[str]],
    known: Set[str] | None = None,
) -> dict[str, dict[int, Caption]]:
    """Print precision and recall of the categories that captions and keywords name.

    Args:
        captions: A caption for each photo, by image id.
        annotated: The categories that are annotated in each photo, by image id.
        known: The categories that count, or None if all categories count.

    Returns:
        The captions under the key ``caption``, and their keywords in the form of captions under the
        key ``keywords``. Both are dictionaries by image id.
    """
    words = {image_id: _apart(one.of_keywords()) for image_id, one in captions.items()}
    groups = {"caption": dict(captions), "keywords": words}
    for name, group in groups.items():
        hits = total = there = 0
        for image_id, caption in group.items():
            found = {one.category for one in find_names(caption.words)}
            found = found if known is None else found & known
            hits += len(found & annotated[image_id])
            total += len(found)
            there += len(annotated[image_id])
        print(f"{name}: precision {hits / total:.3f}, recall {hits / there:.3f}")
    return groups


def _apart(keywords: Caption) -> Caption:
    """Return the keywords with a comma after each, so that two keywords do not form one name.

    For example, "toilet" and "bowl" must not count as "toilet bowl".
    """
    words = [part for word in keywords.words for part in (word.replace(" ", "-"), ",")]
    twice = {name: np.repeat(getattr(keywords, name), 2, axis=0) for name in ("alphas", "gates")}
    return replace(keywords, words=tuple(words), **twice)


if __name__ == "__main__":
    main()
