"""Measure time and peak memory of each stage of training or evaluation that grows with the data.

    python scripts/benchmarks/scale.py [--photos 113287] [--stages NAME ...]

The stages read only captions, not photos. Each photo has five captions of made-up words, with the
lengths and word frequencies of COCO's captions. Each stage runs in a new process. Its peak memory
includes the captions and the imports. ``vocabulary`` imports torch, which takes several hundred
megabytes. Times are processor time, because other programs affect it less than real time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measuring import Rows, in_child, peak, print_table

import captioner
from captioner.data.coco import read_dataset
from captioner.text.tokenizer import caption_tokens

# Number of captions by length, in 3,431 captions of COCO train2017. The length is the number of
# tokens without start and end.
LENGTHS = {7: 29, 8: 563, 9: 754, 10: 721, 11: 518, 12: 367, 13: 185, 14: 106, 15: 60, 16: 41,
           17: 33, 18: 10, 19: 12, 20: 5, 21: 7, 22: 6, 23: 3, 24: 3, 25: 4, 26: 1}  # fmt: skip

CAPTIONS = 5
"""Number of captions per photo."""
WORDS = 25_000
"""Number of different words, as in COCO. Their frequencies follow Zipf's law."""
FOLLOWERS = 300
"""Number of words that may follow a given word."""


def main() -> None:
    """Measure the stages and print a table."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument(
        "--photos", type=int, nargs="+", default=[113_287], help="numbers of photos to measure"
    )
    given.add_argument(
        "--stages",
        nargs="+",
        choices=list(STAGES),
        default=list(STAGES),
        help="measure only these stages",
    )
    given.add_argument(
        "--file", type=Path, help="run only the first stage of --stages, on this captions file"
    )
    options = given.parse_args()
    if options.file:
        started = time.process_time()
        STAGES[options.stages[0]](options.file)
        print(json.dumps([time.process_time() - started, peak()]))
        return
    rows: Rows = {stage: {} for stage in options.stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captions.json"
        for photos in options.photos:
            write_annotations(path, photos)
            for stage, row in rows.items():
                seconds, size = in_child(__file__, "--stages", stage, "--file", path)
                row |= {f"{photos:,} photos: s": seconds, f"{photos:,} photos: MB": size}
                print(f"{stage}, {photos:,} photos: {seconds:.1f} s", file=sys.stderr, flush=True)
    print_table("stage", rows)


def read(path: Path) -> None:
    """Read a COCO captions file."""
    read_dataset([path], None)


def vocabulary(path: Path) -> None:
    """Tokenize captions, build the vocabulary, and convert the captions to token ids."""
    from captioner.options import DataConfig
    from captioner.training.data import encode_captions, new_vocabulary

    photos = read_dataset([path], None)
    found, words = new_vocabulary(photos, DataConfig())
    encode_captions(photos, words, found, max_words=25)


def frequencies(path: Path) -> None:
    """Count document frequencies for CIDEr, and encode them as they are stored with a model."""
    from captioner.evaluation.references import count_frequencies

    references = {photo.image_id: photo.captions for photo in read_dataset([path], None)}
    count_frequencies(references).to_bytes()


def rewards(path: Path) -> None:
    """Prepare references and document frequencies for self-critical training."""
    from captioner.evaluation.reward import CaptionReward
    from captioner.text.vocabulary import Vocabulary

    photos = read_dataset([path], None)
    tokens = {p.image_id: [caption_tokens(text) for text in p.captions] for p in photos}
    CaptionReward({"": tokens}, Vocabulary([]))


def evaluate(path: Path) -> None:
    """Score made-up captions for a third of the photos, with confidence intervals."""
    texts = captions(len(read_dataset([path], None)), seed=1)
    results = dict(enumerate(itertools.islice(texts, 0, None, 3 * CAPTIONS), 1))
    captioner.evaluate(annotations=path, results=results, progress=False)


def captions(photos: int, seed: int = 0) -> Iterator[str]:
    """Yield ``CAPTIONS`` made-up captions for each photo, photo by photo."""
    generator = np.random.default_rng(seed)
    names = ["".join(letters) for letters in itertools.product("bdfgklmn", "aeiou", repeat=3)]
    names = [f"{name}{'s' if n >= len(names) // 2 else ''}" for n, name in enumerate(names)][:WORDS]
    words = len(names)
    shares = 1 / np.arange(1, words + 1)
    followers = generator.choice(words, (words, FOLLOWERS), p=shares / shares.sum())
    pool = np.repeat(list(LENGTHS), list(LENGTHS.values()))
    for start in range(0, photos, 1000):
        lengths = generator.choice(pool, (min(1000, photos - start) * CAPTIONS))
        steps = np.minimum(generator.zipf(1.3, (len(lengths), int(pool.max()))), FOLLOWERS) - 1
        rows = np.empty_like(steps)
        rows[:, 0] = steps[:, 0]
        for t in range(1, rows.shape[1]):
            rows[:, t] = followers[rows[:, t - 1], steps[:, t]]
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            yield " ".join([names[word] for word in row[:length]]).capitalize() + "."


def write_annotations(path: Path, photos: int) -> None:
    """Write a COCO captions file with made-up captions of this number of photos."""
    images = [{"id": n, "file_name": f"{n:012}.jpg"} for n in range(1, photos + 1)]
    annotations = [
        {"id": n, "image_id": 1 + n // CAPTIONS, "caption": text}
        for n, text in enumerate(captions(photos))
    ]
    content = {"images": images, "annotations": annotations}
    path.write_text(json.dumps(content), encoding="utf-8")


STAGES = {
    "read captions": read,
    "vocabulary": vocabulary,
    "frequencies": frequencies,
    "rewards": rewards,
    "evaluate": evaluate,
}
"""Functions that run a stage on a COCO captions file, by the name of the stage."""

if __name__ == "__main__":
    main()
