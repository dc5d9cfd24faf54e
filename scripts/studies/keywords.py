"""Compare three sources of keywords: the reading of the features, samples, the caption alone.

    python scripts/studies/keywords.py --annotations COCO/captions_val.json --images COCO/val \
        --annotations data/flickr8k/captions_val.json --images FLICKR8K/images \
        --instances COCO128/annotations/instances.json --instance-photos COCO128/images

Words are those of ``captioner prepare keywords``; one is right if a reference caption of the photo
has it. Samples: the share of 64 sampled captions that have a word, calibrated like the reading: one
half of the photos with the scale and shift of the other. With instance masks, words that name a
category of COCO are compared with what is annotated, and their maps with the masks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import captioner
from captioner.caption import Caption
from captioner.data.coco import read_dataset
from captioner.evaluation.calibrate import photo_batches
from captioner.evaluation.grounding import measure as measure_maps
from captioner.evaluation.keywords import (
    WORDS,
    cross_calibrated,
    measure,
    mentions,
    of_groups,
    read_words,
)
from captioner.evaluation.masks import read_instances
from captioner.evaluation.objects import find_names
from captioner.inference.captioner import Captioner
from captioner.inference.confidence import sigmoid
from captioner.text.tokenizer import caption_tokens

SAMPLES = 64


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotations", action="append", required=True)
    parser.add_argument("--images", action="append", required=True)
    parser.add_argument("--instances")
    parser.add_argument("--instance-photos")
    options = parser.parse_args()
    model = captioner.load()
    for references, images in zip(options.annotations, options.images, strict=True):
        print(f"\n{references}")
        compare(model, references, images)
    if options.instances:
        compare_with_masks(model, options.instances, options.instance_photos)


def compare(model: Captioner, annotations: str, images: str) -> None:
    """Print the figures of each source on photos with references."""
    reader = model.stored.keywords
    assert reader is not None
    table, rows = read_words(WORDS), reader.rows(neutral=False)
    odds, sampled, single, true = [], [], [], []
    seconds = dict.fromkeys(("reading", "samples", "caption"), 0.0)

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        seconds[name] += time.perf_counter() - start
        return result

    photos = read_dataset([annotations], [images])
    plain, varied = model.options(), model.options(temperature=1.0, num_captions=SAMPLES)
    for batch, prepared in photo_batches(model, photos, "photos", 32, print, progress=True):
        memories = model.ensemble.memories(model.ensemble.encode(prepared))
        start = model.stored.vocabulary.start("")
        seeds = range(len(batch))

        def found(options: Any) -> list[list[set[str]]]:
            from captioner.search.words import encode_search_words

            words = encode_search_words(options, model.stored.vocabulary)
            hypotheses = model.ensemble.search(memories, options, words, start, seeds)  # noqa: B023
            shown = model.stored.vocabulary.shown
            return [[mentions([" ".join(shown(h.tokens))], table) for h in of] for of in hypotheses]

        vectors = model.ensemble.summary(memories)
        odds.append(
            timed("reading", lambda: vectors @ reader.weights.T + reader.biases)  # noqa: B023
        )
        sampled += timed("samples", lambda: found(varied))
        single += [best for (best, *_) in timed("caption", lambda: found(plain))]
        true += [mentions(photo.captions, table) for photo in batch]
    columns = [{word} for word in rows]
    labels = of_groups(true, columns)
    counts = np.array([of_groups(one, columns).sum(axis=0) for one in sampled])
    share = (counts + 0.05) / (SAMPLES + 0.1)
    alone = of_groups(single, columns)
    read = np.concatenate(odds)[:, : len(rows)].astype(float)
    results = {
        "reading": cross_calibrated(read, labels),
        "samples": cross_calibrated(np.log(share / (1 - share)), labels),
        "caption": alone.astype(float),
    }
    for name, probabilities in results.items():
        figures = {key: round(value, 3) for key, value in measure(probabilities, labels).items()}
        figures["milliseconds"] = round(1000 * seconds[name] / len(true), 3)
        print(name, figures)
    stored = np.vectorize(sigmoid)(read)
    print("reading as stored", {k: round(v, 3) for k, v in measure(stored, labels).items()})


def compare_with_masks(model: Captioner, instances: str, folder: str) -> None:
    """Print precision and recall of the categories named, and how maps agree with masks."""
    known = read_instances(Path(instances))
    ids = {Path(name).name: image_id for image_id, name in known.names.items()}
    photos = [path for path in sorted(Path(folder).iterdir()) if path.name in ids]
    captions = {
        ids[path.name]: one
        for path, one in zip(photos, model.caption(photos, keywords=8), strict=True)
    }
    words = {image_id: one.of_keywords() for image_id, one in captions.items()}

    def named(caption: Caption) -> set[str]:
        tokens: Sequence[str] = caption.words
        if caption.method == "keywords":
            names = (find_names(caption_tokens(word)) for word in tokens)
            return {name.category for found in names for name in found}
        return {name.category for name in find_names(tokens)}

    for name, group in {"caption": captions, "keywords": words}.items():
        hits = total = there = 0
        for image_id, caption in group.items():
            annotated = {c for c in known.categories if known.masks(image_id, c) is not None}
            found = named(caption)
            hits, total, there = (
                hits + len(found & annotated),
                total + len(found),
                there + len(annotated),
            )
        maps = measure_maps(group, known).summary()
        print(name, f"precision {hits / total:.3f} recall {hits / there:.3f}", maps)


if __name__ == "__main__":
    main()
