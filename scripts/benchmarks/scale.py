"""Time and peak memory of everything that grows with the number of photos.

    python scripts/benchmarks/scale.py [--photos 28000 57000 113287] [--stages NAME ...]

Photos are not read: the captions, five per photo, are invented (see synthetic_captions.py), with
the lengths and the repetition of COCO's. Each stage runs in a process of its own. Its peak memory
includes imports (torch alone takes some hundred megabytes; the stages ``vocabulary`` and ``order``
need it) and the captions. The seconds are processor time, which other programs change less than
the elapsed time.
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import in_child, memory, parser, print_table
from synthetic_captions import CAPTIONS, captions, write_annotations

import captioner
from captioner.data.coco import read_captions, read_dataset
from captioner.text.tokenizer import caption_tokens


def main() -> None:
    """Measure and print a table."""
    given = parser(__doc__)
    given.add_argument("--photos", type=int, nargs="+", default=[28_000, 57_000, 113_287])
    given.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    given.add_argument("--file", type=Path, help="run the first stage only, on this captions file")
    options = given.parse_args()
    if options.file:
        job = STAGES[options.stages[0]](options.file)
        started = time.process_time()
        job()
        print(json.dumps([time.process_time() - started, memory()]))
        return
    rows: dict[str, dict[str, float | str | None]] = {stage: {} for stage in options.stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captions.json"
        for photos in options.photos:
            write_annotations(path, photos)
            for stage, row in rows.items():
                seconds, peak = in_child(__file__, "--stages", stage, "--file", path)
                row |= {f"{photos:,} photos: s": seconds, f"{photos:,} photos: MB": peak}
                print(f"{stage}, {photos:,} photos: {seconds:.1f} s", file=sys.stderr, flush=True)
    print_table("stage", rows)


Job = Callable[[], object]


def read(path: Path) -> Job:
    """A COCO captions file to photos with their captions."""
    return lambda: read_dataset([path], None)


def vocabulary(path: Path) -> Job:
    """Read captions, tokenize, count words, captions to word numbers."""
    from captioner.options import DataConfig
    from captioner.training.data import encode_captions, new_vocabulary

    def job() -> None:
        photos = read_dataset([path], None)
        vocabulary, words = new_vocabulary(photos, DataConfig())
        encode_captions(photos, words, vocabulary, max_words=25)

    return job


def order(path: Path) -> Job:
    """An epoch's batches, grouped by caption length, and its requests for workers."""
    from captioner.data.batches import EncodedImage, EpochSampler, without_text

    photos = [
        EncodedImage(photo, tuple([5] * len(text.split()) for text in photo.captions))
        for photo in read_dataset([path], None)
    ]
    lengths = [[len(words) for words in photo.tokens] for photo in photos]

    def job() -> None:
        for batch in EpochSampler(lengths, 32, seed=0, bucket=64):
            pickle.dumps([(epoch, without_text(photos[index])) for epoch, index in batch])

    return job


def frequencies(path: Path) -> Job:
    """Read captions, count document frequencies, to the bytes stored with a model."""
    from captioner.evaluation.references import count_frequencies

    def job() -> None:
        references = {photo.image_id: photo.captions for photo in read_dataset([path], None)}
        count_frequencies(references).to_bytes()

    return job


def rewards(path: Path) -> Job:
    """Read captions, and the index of the references for self-critical training."""
    from captioner.evaluation.references import References

    def job() -> None:
        photos = read_dataset([path], None)
        References({p.image_id: [caption_tokens(text) for text in p.captions] for p in photos})

    return job


def evaluate(path: Path) -> Job:
    """Score a caption for one photo in three, with intervals."""
    texts = captions(len(read_captions([path])[0]), seed=1)
    results = dict(enumerate(itertools.islice(texts, 0, None, 3 * CAPTIONS), 1))
    return lambda: captioner.evaluate(annotations=path, results=results, progress=False)


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
