"""Time and peak memory of everything that grows with the number of photos.

    python scripts/benchmark_scale.py [--photos 28000 57000 113287] [--stages NAME ...]

Photos are not read: the captions, five per photo, are invented (see synthetic_captions.py), with
the lengths and the repetition of COCO's. Each stage runs in a process of its own. Its peak memory
includes imports (torch alone takes some hundred megabytes; the stages ``vocabulary`` and ``order``
need it) and the captions. The seconds are processor time, which other programs change less than
the elapsed time.

| stage | |
|---|---|
| read captions | a COCO captions file to photos with their captions |
| vocabulary | read captions, tokenize, count words, captions to word numbers |
| order | an epoch's batches, grouped by caption length, and its requests for workers |
| frequencies | read captions, count document frequencies, to the bytes stored with a model |
| rewards | the index of the references for self-critical training |
| evaluate | score a caption for one photo in three, with intervals |
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import Report, add_arguments, in_child, peak_memory
from synthetic_captions import CAPTIONS, captions, write_annotations

from captioner.data.coco import read_captions, read_dataset
from captioner.text.tokenizer import caption_tokens

BATCH = 32


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=int, nargs="+", default=[28_000, 57_000, 113_287])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)  # a stage and the captions file
    add_arguments(parser)
    options = parser.parse_args()
    if options.only:
        stage, path = options.only
        STAGES[stage](Path(path))
        return
    report = Report("scale", "stage")
    with tempfile.TemporaryDirectory() as folder:
        files = {photos: Path(folder) / f"{photos}.json" for photos in options.photos}
        for photos, path in files.items():
            write_annotations(path, photos)
        for stage in options.stages:
            figures: dict[str, float] = {}
            for photos, path in files.items():
                found = in_child(__file__, "--only", stage, path)
                figures[f"{photos:,} photos: s"] = found["seconds"]
                figures[f"{photos:,} photos: MB"] = found["megabytes"]
                print(f"{stage}, {photos:,} photos: {found}", file=sys.stderr, flush=True)
            report.add(stage, figures)
    report.finish(options)


def timed(job: Callable[[], object]) -> None:
    """Run a job and print its processor time and the peak memory of the process."""
    started = time.process_time()
    job()
    seconds = time.process_time() - started
    print(json.dumps({"seconds": round(seconds, 2), "megabytes": round(peak_memory())}))


def read(path: Path) -> None:
    """Stage ``read captions``."""
    timed(lambda: read_dataset([path], None))


def vocabulary(path: Path) -> None:
    """Stage ``vocabulary``."""
    from captioner.options import DataConfig
    from captioner.training.data import count_vocabulary, encode_captions

    def job() -> None:
        photos = read_dataset([path], None)
        words = [[caption_tokens(caption) for caption in photo.captions] for photo in photos]
        counted = count_vocabulary(words, DataConfig())
        encode_captions(photos, words, counted, max_words=25)

    timed(job)


def order(path: Path) -> None:
    """Stage ``order``."""
    from captioner.data.batches import EncodedImage, EpochSampler, without_text

    photos = [
        EncodedImage(photo, tuple([5] * len(text.split()) for text in photo.captions))
        for photo in read_dataset([path], None)
    ]
    lengths = [[len(words) for words in photo.tokens] for photo in photos]

    def job() -> None:
        sampler = EpochSampler(lengths, BATCH, seed=0, bucket=64)
        for batch in sampler:
            pickle.dumps([(epoch, without_text(photos[index])) for epoch, index in batch])

    timed(job)


def frequencies(path: Path) -> None:
    """Stage ``frequencies``."""
    from captioner.evaluation.frequencies import DocumentFrequencies

    def job() -> None:
        photos = read_dataset([path], None)
        references = {photo.image_id: photo.captions for photo in photos}
        DocumentFrequencies.from_references(references).to_bytes()

    timed(job)


def rewards(path: Path) -> None:
    """Stage ``rewards``."""
    from captioner.evaluation.references import References

    def job() -> None:
        photos = read_dataset([path], None)
        References({p.image_id: [caption_tokens(text) for text in p.captions] for p in photos})

    timed(job)


def evaluate(path: Path) -> None:
    """Stage ``evaluate``."""
    import captioner

    photos = len(read_captions([path])[0])
    texts = captions(photos, seed=1)
    results = dict(enumerate(itertools.islice(texts, 0, None, 3 * CAPTIONS), 1))
    timed(lambda: captioner.evaluate(annotations=path, results=results, progress=False))


STAGES = {
    "read captions": read,
    "vocabulary": vocabulary,
    "order": order,
    "frequencies": frequencies,
    "rewards": rewards,
    "evaluate": evaluate,
}

if __name__ == "__main__":
    main()
